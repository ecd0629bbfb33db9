"""Kernel launches of one Qwen3 decoding step, and the time to read its bytes, recorded from the code.

    python -P benchmarks/gpu_launches.py        8B, int4, FP8 keys and values, 4,096 tokens; H100 and RTX 5090
    python -P benchmarks/gpu_launches.py --model 30b-a3b       a mixture, with a bfloat16 router
    python -P benchmarks/gpu_launches.py --form bf16 --kv bf16 --ctx 32768 --cards h200

No GPU is needed. The copy bandwidths are assumed, not measured: 3.05 TB/s on an H100 (SXM), 4.3 on an H200, 1.63 on an
RTX 5090.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

CARDS = {"h100": (90, 132, 3.05e12), "h200": (90, 132, 4.3e12), "5090": (120, 170, 1.63e12)}
FORMS = {"int4": "int4 g128", "nvfp4": "e2m1 e4m3", "bf16": "bf16", "fp8": "e4m3 row", "q4_k": "int4 sub"}
# hidden, inner, layers, heads, KV heads, experts, experts per token
MODELS = {"8b": (4096, 12288, 36, 32, 8, 0, 0), "30b-a3b": (2048, 768, 48, 32, 4, 128, 8)}
DIM, VOCAB, PAGE = 128, 151_936, 16


def launches(
    model: str, form: str, kv: str, ctx: int, capability: int, num_sms: int
) -> Iterator[tuple[str, str, int, int]]:
    """Return (part of the step, kernel, launches per step, bytes it must read)."""
    hidden, inner, layers, heads, kv_heads, experts, top_k = MODELS[model]
    import torch

    from localllm.kernels import OpFacts
    from localllm.kernels.layer_weights import (
        AttentionWeights,
        ExpertsWeights,
        HeadWeights,
        Linear,
        LinearPart,
        MlpWeights,
        Norm,
    )
    from localllm.kernels.sampling import SamplingInputs
    from localllm.kernels.table import implementations, kernel_table
    from localllm.kernels.triton import aot_cases
    from localllm.kernels.triton.cards import Card
    from localllm.kernels.triton.launch import recording
    from localllm.kernels.triton.sampling import sample

    described = {one.name: one for one in aot_cases.FORMS}
    impl = next(one for one in implementations("linear") if one.name == "triton")
    x = torch.empty(1, hidden, dtype=torch.bfloat16, device="meta")

    def linear(n: int, k: int, name: str) -> Linear:
        return Linear((LinearPart(impl, aot_cases.described(described[name], n, k), None, (n, k)),))

    def norm(size: int) -> Norm:
        return Norm(torch.empty(size, device="meta"), 1e-6)

    stored = FORMS[form]
    qkv, out = linear((heads + 2 * kv_heads) * DIM, hidden, stored), linear(hidden, heads * DIM, stored)
    gate_up, down = linear(2 * inner, hidden, stored), linear(hidden, inner, stored)
    attention = AttentionWeights(norm(hidden), qkv, out, heads, kv_heads, DIM, DIM**-0.5, norm(DIM), norm(DIM))
    mlp = MlpWeights(norm(hidden), gate_up, down, "silu")
    router = linear(experts or 1, hidden, "bf16")
    all_up, all_down = (
        linear(max(experts, 1) * 2 * inner, hidden, stored),
        linear(max(experts, 1) * hidden, inner, stored),
    )
    both = all_up.parts[0], all_down.parts[0]
    each = (gate_up,) * experts, (down,) * experts
    mixture = ExpertsWeights(norm(hidden), router, *each, top_k, "softmax", "silu", stacked=both)
    head = HeadWeights(norm(hidden), linear(VOCAB, hidden, "bf16"), None)
    facts = OpFacts(
        kv, heads, kv_heads, DIM, PAGE, device="cuda", capability=capability, dtype="bfloat16", deterministic=False
    )
    table = kernel_table(facts)
    pages = aot_cases._pages(kv, kv_heads, PAGE, DIM)
    meta: dict[str, Any] = {"device": "meta"}
    turns = torch.empty(1, DIM // 2, **meta)
    where = torch.empty(1, -(-ctx // PAGE), dtype=torch.int32, **meta), torch.empty(1, dtype=torch.int64, **meta)
    bounds, lengths = torch.empty(2, dtype=torch.int32, **meta), torch.empty(1, dtype=torch.int32, **meta)
    kept = 2 * kv_heads * (DIM * (1 if kv in ("fp8", "int8") else 2) + (4 if kv in ("fp8", "int8") else 0)) * ctx
    parts = {
        "qkv": (lambda: table.attn_in(x, attention, turns, turns, pages, where[1]), [qkv.nbytes]),
        "attention": (lambda: table.attention(q, attention, pages, where[0], bounds, lengths), [kept]),
        "o": (lambda: table.attn_out(torch.empty(1, heads * DIM, dtype=x.dtype, **meta), x, attention), [out.nbytes]),
        "mlp": (lambda: table.mlp(x, mlp), [gate_up.nbytes, down.nbytes]),
        "experts": (
            lambda: table.experts(x, mixture),
            [router.nbytes, 0, top_k * gate_up.nbytes, top_k * down.nbytes],
        ),
        "head": (lambda: table.head(x, head), [head.linear.nbytes]),
        "sampler": (
            lambda: sample(torch.empty(1, VOCAB, **meta), SamplingInputs.empty(1, 1, VOCAB, "meta")),
            [4 * VOCAB] * 9,
        ),
    }
    del parts["mlp" if experts else "experts"]
    q = torch.empty(1, heads, DIM, dtype=torch.bfloat16, **meta)
    for name, (run, read) in parts.items():
        with recording(Card(capability, num_sms)) as found:
            run()
        times = 1 if name in ("head", "sampler") else layers
        left = iter(read)
        for kernel in (launch.kernel.__name__.strip("_") for launch in found):
            yield name, kernel, times, 0 if kernel in ("digits_kernel", "norm_rows") else next(left, 0)


def main() -> int:
    """Record the launches and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--form", choices=FORMS, default="int4")
    parser.add_argument("--kv", choices=("fp8", "int8", "bf16"), default="fp8")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=["h100", "5090"])
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    for card in options.cards:
        capability, num_sms, bandwidth = CARDS[card]
        found = list(launches(options.model, options.form, options.kv, options.ctx, capability, num_sms))
        print(f"{card}: Qwen3-{options.model.upper()} {options.form}, KV {options.kv}, {options.ctx:,} tokens")
        for part, kernel, times, nbytes in found:
            print(f"  {part:10} {kernel:18} x {times:2} {nbytes / 1e6:8.2f} MB {nbytes / bandwidth * 1e6:8.1f} us")
        step = sum(times * nbytes for *_, times, nbytes in found) / bandwidth
        print(
            f"  {sum(times for *_, times, _ in found)} launches; bytes alone: {step * 1e3:.2f} ms, {1 / step:.0f} tok/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
