"""How near decoding a mixture of experts comes to what its active bytes cost: random weights at real shapes.

    python benchmarks/mixtures.py qwen3-30b-a3b --layers 4 --folder /tmp/mixtures

writes a GGUF of the first so many layers, decodes, and prints the median of several rounds (and the best, for machines
that others use, too) beside the time that the bytes of a step take at the read bandwidth measured right after.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from synthetic import blocks

from localllm.device.cpu import read_bandwidth
from localllm.models.architectures import open_model
from localllm.models.inputs import AttentionInputs, ForwardBatch
from localllm.models.kv_cache import KVCache
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model

VOCAB, CONTEXT, PAGE = 32_768, 512, 16


@dataclass(frozen=True)
class Shape:
    """A model's sizes, and how its experts and the rest are stored."""

    arch: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    num_experts: int
    top_k: int
    experts: str
    others: str


SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3moe", 2048, 32, 4, 128, 768, 128, 8, "Q4_K", "Q4_K"),
    "gpt-oss-20b": Shape("gpt-oss", 2880, 64, 8, 64, 2880, 32, 4, "MXFP4", "Q8_0"),
}


def write(path: Path, shape: Shape, layers: int) -> None:
    """A GGUF with random blocks."""
    random, s = np.random.default_rng(0), shape
    w = gguf.GGUFWriter(path, s.arch)
    w.add_block_count(layers)
    w.add_context_length(4096)
    w.add_embedding_length(s.hidden)
    w.add_feed_forward_length(s.inner)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv_heads)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_expert_count(s.num_experts)
    w.add_expert_used_count(s.top_k)
    w.add_expert_feed_forward_length(s.inner)
    w.add_sliding_window(128 if s.arch == "gpt-oss" else 0)
    w.add_tokenizer_model("llama")
    w.add_token_list(["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, VOCAB))])
    w.add_token_scores([-float(i) for i in range(VOCAB)])
    w.add_token_types([2, 3, 3, *[1] * (VOCAB - 3)])

    def matrix(name: str, kind: str, rows: int, columns: int, experts: int = 0) -> None:
        values = blocks(random, kind, max(experts, 1) * rows, columns, columns**-0.5)
        stored = values.reshape(experts, rows, -1) if experts else values
        w.add_tensor(f"{name}.weight", stored, raw_dtype=gguf.GGMLQuantizationType[kind])

    def vector(name: str, *dims: int, value: float = 0.01) -> None:
        w.add_tensor(name, np.full(dims, value, np.float32))

    matrix("token_embd", "Q6_K" if s.hidden % 256 == 0 else "Q8_0", VOCAB, s.hidden)
    for layer in range(layers):
        at = f"blk.{layer}"
        vector(f"{at}.attn_norm.weight", s.hidden, value=1.0)
        for name, rows in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            matrix(f"{at}.attn_{name}", s.others, rows * s.head_dim, s.hidden)
        matrix(f"{at}.attn_output", s.others, s.hidden, s.heads * s.head_dim)
        w.add_tensor(f"{at}.ffn_gate_inp.weight", random.normal(size=(s.num_experts, s.hidden)).astype(np.float32))
        matrix(f"{at}.ffn_gate_exps", s.experts, s.inner, s.hidden, s.num_experts)
        matrix(f"{at}.ffn_up_exps", s.experts, s.inner, s.hidden, s.num_experts)
        matrix(f"{at}.ffn_down_exps", s.experts, s.hidden, s.inner, s.num_experts)
        if s.arch == "gpt-oss":
            vector(f"{at}.post_attention_norm.weight", s.hidden, value=1.0)
            vector(f"{at}.attn_sinks.weight", s.heads)
            vector(f"{at}.ffn_gate_inp.bias", s.num_experts)
            for name, rows in (("gate", s.inner), ("up", s.inner), ("down", s.hidden)):
                vector(f"{at}.ffn_{name}_exps.bias", s.num_experts, rows)
        else:
            vector(f"{at}.ffn_norm.weight", s.hidden, value=1.0)
            vector(f"{at}.attn_q_norm.weight", s.head_dim, value=1.0)
            vector(f"{at}.attn_k_norm.weight", s.head_dim, value=1.0)
    vector("output_norm.weight", s.hidden, value=1.0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def seconds(model: Model, count: int, rounds: int) -> tuple[float, float]:
    """The median and the best of steps of `count` tokens at the start of a sequence's page, after two that warm up."""
    pages = -(-CONTEXT // PAGE)
    cache = KVCache(model.groups, [pages] * len(model.groups), PAGE, "f32")
    random, times = torch.Generator().manual_seed(1), []
    for number in range(rounds + 2):
        first = (number * count) % (CONTEXT - count) if count == 1 else 0
        at = torch.arange(first, first + count)
        inputs = AttentionInputs(torch.arange(pages).int().unsqueeze(0), at)
        ids = torch.randint(3, VOCAB, (count,), generator=random)
        length = first + count
        bounds, lens = torch.tensor([0, count]).int(), torch.tensor([length]).int()
        batch = ForwardBatch(
            ids, at, (count,), (length,), bounds, lens, torch.tensor([count - 1]), (inputs,) * len(model.groups)
        )
        begun = time.perf_counter()
        with torch.inference_mode():
            if count == 1:
                model.step(batch, cache)
            else:
                model.logits(model.forward(batch, cache))
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:]), min(times[2:])


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--composed", action="store_true", help="without the C segments that hold experts")
    given = parser.parse_args()
    path = given.folder / f"{given.shape}-{given.layers}.gguf"
    if not path.exists():
        write(path, SHAPES[given.shape], given.layers)
    torch.set_num_threads(given.threads)
    disabled = frozenset(("experts:c", "decoder:c", "step:c")) if given.composed else frozenset()
    with open_model(path) as checkpoint:
        facts = checkpoint.facts
        model = load_model(checkpoint, LoadOptions(disabled=disabled))
    active = facts.weight_bytes * facts.active_share
    (decode, best), (prefill, _) = seconds(model, 1, given.rounds), seconds(model, 256, 3)
    bandwidth = read_bandwidth(given.threads, 64 << 20)
    floor = active / bandwidth
    print(f"{path.name}: {facts.weight_bytes / 1e9:.2f} GB, {active / 1e6:.0f} MB a token, {bandwidth / 1e9:.1f} GB/s")
    print(f"decode {decode * 1e3:.2f} ms, {floor / decode:.2f} of the bandwidth; best {best * 1e3:.2f} ms")
    print(f"prefill {256 / prefill:.0f} tokens/s")


if __name__ == "__main__":
    main()
