"""Fused projections stored in shards: ranges of a file's bytes, few of them, whatever the file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.checkpoint.mapped_file import TensorInfo
from localllm.checkpoint.shards import MAX_SHARDS, unsharded

LAYOUT = {"attention_projection_layout": "fused_qkv", "num_hidden_layers": 4, "hybrid_layer_pattern": [0] * 4}


def fused(layers: int, shards: int, rows: int) -> dict[str, TensorInfo]:
    """Layers whose shards have `rows` rows of one element."""
    found = {}
    for layer in range(layers):
        name, size, blocks = f"model.layers.{layer}.self_attn.qkv_proj.weight", shards * rows, shards * -(-rows // 128)
        scale = TensorInfo(f"{name}_scale_inv", "U8", (blocks, 1), blocks, Path("x"), 10_000 * layer + size)
        found |= {name: TensorInfo(name, "F8_E4M3", (size, 1), size, Path("x"), 10_000 * layer), scale.name: scale}
    return found


def heads(count: int, kv: int, dim: int, value: int) -> dict[str, Any]:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    return LAYOUT | dict(zip(names, (count, kv, dim, value), strict=True))


def test_blocks_that_follow_each_other_are_one_piece() -> None:
    found = unsharded(fused(1, 2, 512), heads(4, 2, 128, 128))
    start = "model.layers.0.self_attn."
    assert found[f"{start}q_proj.weight"].pieces == ((0, 256), (512, 256))
    assert found[f"{start}q_proj.weight_scale_inv"].pieces == ((1024, 2), (1028, 2))
    assert found[f"{start}v_proj.weight_scale_inv"].pieces == ((1027, 1), (1031, 1))
    halves = unsharded(fused(1, 1, 384), heads(3, 1, 64, 128))
    assert halves[f"{start}q_proj.weight_scale_inv"].pieces == ((384, 1), (384, 1), (385, 1))


def test_layers_of_the_mtp_head_are_left_alone() -> None:
    found = unsharded(fused(6, 2, 512), heads(4, 2, 128, 128))
    assert sum("q_proj.weight" in name and "qkv" not in name for name in found) == 2 * 4
    assert {name.split(".")[2] for name in found if ".qkv_proj." in name} == {"4", "5"}


@pytest.mark.parametrize("shards", [MAX_SHARDS, MAX_SHARDS + 1])
def test_shards_have_a_limit(shards: int) -> None:
    found = unsharded(fused(1, shards, 192), heads(shards, shards, 64, 64))
    assert (len(found) == 6) == (shards == MAX_SHARDS)


def test_pieces_have_a_limit() -> None:
    config = heads(MAX_SHARDS, MAX_SHARDS, 64, 64) | {"num_hidden_layers": 1000, "hybrid_layer_pattern": [0] * 1000}
    found = unsharded(fused(300, MAX_SHARDS, 192), config)
    pieces = sum(len(info.pieces) for info in found.values())
    assert (1 << 15) < pieces <= 1 << 16
    assert any(".qkv_proj." in name for name in found)
