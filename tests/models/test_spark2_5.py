"""Spark-X2.5 against a plain implementation: windows, two rotations, gates per head, one module for q, k and v."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from localllm.errors import LocalLLMError
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.quality.quantize import quantize
from localllm.quant.encode import Target

from .test_gguf_models import write_gguf
from .test_nanbeige import prompt

KINDS = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
CONFIG: dict[str, Any] = {
    "model_type": "spark2_5", "architectures": ["Spark2_5ForCausalLM"], "vocab_size": 99, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "sliding_window": 9, "layer_types": KINDS,
    "hidden_act": "gelu", "gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True,
    "tie_word_embeddings": False, "eos_token_id": 7,
    "rope_parameters": {
        "full_attention": {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip


def weights(inner: int = 80, hidden: int = 48, dim: int = 16) -> dict[str, Tensor]:
    torch.manual_seed(3)
    found = {"model.embedding.weight": torch.randn(99, hidden), "lm_head.weight": torch.randn(99, hidden) * 0.15}
    found["model.norm.weight"] = 1 + 0.2 * torch.randn(hidden)
    for layer in range(5):
        start = f"model.layers.{layer}."
        shapes = {"self_attn.q_k_v_proj": (8 * dim, hidden), "self_attn.g_proj": (4, hidden)}
        shapes |= {"self_attn.out_proj": (hidden, 4 * dim), "mlp.gate_proj": (inner, hidden)}
        shapes |= {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        found |= {f"{start}{name}.weight": torch.randn(n, k) * k**-0.5 for name, (n, k) in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{start}{name}.weight"] = 1 + 0.2 * torch.randn(hidden)
    return found


def expected(tensors: dict[str, Tensor], ids: list[int], dim: int = 16) -> Tensor:
    """The model in plain PyTorch, without any of ours."""
    x, count = tensors["model.embedding.weight"][ids], len(ids)
    behind = torch.arange(count)[:, None] - torch.arange(count)[None]
    for layer, kind in enumerate(KINDS):
        given = {name.removeprefix(f"model.layers.{layer}."): one for name, one in tensors.items()}
        normed = functional.rms_norm(x, x.shape[1:], given["input_layernorm.weight"], 1e-6)
        q, k, v = (normed @ given["self_attn.q_k_v_proj.weight"].T).view(count, 8, dim).split([4, 2, 2], 1)
        theta, turned = (10_000.0, dim) if kind[0] == "s" else (5_000_000.0, dim // 4)
        angles = torch.arange(count)[:, None] * theta ** (-torch.arange(0, turned, 2) / turned)
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)

        def rotated(heads: Tensor, cos: Tensor = cos, sin: Tensor = sin, half: int = turned // 2) -> Tensor:
            a, b, rest = heads.split([half, half, dim - 2 * half], -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

        q, k = rotated(q), rotated(k).repeat_interleave(2, 1)
        seen = (behind >= 0) & ((behind < 9) | (kind[0] == "f"))
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(dim**-0.5).masked_fill(~seen, -torch.inf)
        heads = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
        heads = heads * torch.sigmoid(normed @ given["self_attn.g_proj.weight"].T).unsqueeze(-1)
        x = x + heads.flatten(1) @ given["self_attn.out_proj.weight"].T
        normed = functional.rms_norm(x, x.shape[1:], given["post_attention_layernorm.weight"], 1e-6)
        gate, up = (normed @ given[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (functional.gelu(gate) * up) @ given["mlp.down_proj.weight"].T
    return functional.rms_norm(x, x.shape[1:], tensors["model.norm.weight"], 1e-6) @ tensors["lm_head.weight"].T


def saved(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def test_logits_are_those_of_the_plain_implementation(paged: Any, tmp_path: Path) -> None:
    """Whole, in chunks, and from GGUF."""
    tensors, ids = weights(), prompt()
    wanted = expected(tensors, ids)
    names = {"embedding": "embed_tokens", "q_k_v_proj": "qkv_proj", "g_proj": "gate_proj", "out_proj": "o_proj"}
    usual = {name: one for name, one in tensors.items() if not any(part in name for part in names)}
    for theirs, ours in names.items():
        found = {n: one for n, one in tensors.items() if f".{theirs}." in n}
        usual |= {n.replace(f".{theirs}.", f".{ours}."): one for n, one in found.items()}
    turned = CONFIG["rope_parameters"] | {"partial_rotary_factor": 0.25}
    config = CONFIG | {"rope_parameters": turned}
    path = write_gguf(tmp_path / "spark.gguf", config, usual, gguf.GGMLQuantizationType.F32)
    for place in (saved(tmp_path / "spark", tensors), path):
        with open_model(place) as checkpoint:
            assert checkpoint.facts.windows == (9, 9, 9, None, 9)
            ours = load_model(checkpoint, LoadOptions(exact=True))
        for chunks in ([40], [17, 1, 22]):
            assert torch.allclose(paged(ours).all_logits(ids, chunks), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("target", ["fp8", "int4"])
def test_quantized_weights_are_cut_between_queries_and_keys(target: str, paged: Any, tmp_path: Path) -> None:
    """Blocks of 128 rows, and groups of inputs."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    tensors, ids = weights(128, 128, 32), prompt()
    quantize(saved(tmp_path / "plain", tensors, **sizes), tmp_path / "q", Target(target))
    with open_model(tmp_path / "q") as checkpoint:
        ours = paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [40])
    wanted = expected(tensors, ids, 32)
    assert float((ours - wanted).norm() / wanted.norm()) < {"fp8": 0.1, "int4": 0.35}[target]


def test_other_options_are_refused(tmp_path: Path) -> None:
    cases = {"with hidden_act silu": {"hidden_act": "silu"}, "without gates": {"headwise_attn_output_gate": False}}
    cases |= {"with gate_attn_act_mode silu": {"gate_attn_act_mode": "silu"}}
    for number, (words, changes) in enumerate(cases.items()):
        folder = saved(tmp_path / str(number), weights(), **changes)
        with open_model(folder) as checkpoint, pytest.raises(LocalLLMError, match=words):
            _ = checkpoint.facts
