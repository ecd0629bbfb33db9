"""Takes apart fused projections that are stored in shards, as MiMo-V2.5 and 2.6 have them.

self_attn.qkv_proj.weight            F8_E4M3 [shards * (q + k + v), K]: each shard's queries, keys and values
self_attn.qkv_proj.weight_scale_inv  [shards * cdiv(q + k + v, 128), cdiv(K, 128)]: blocks start anew in every shard

There are as many shards as KV heads of a layer without a window. Result: {q,k,v}_proj.weight and .weight_scale_inv. No
bytes are moved. If a projection's rows do not begin with a block in each shard, its scales are those of half blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .fields import MAX_LAYERS
from .mapped_file import TensorInfo

_FUSED = re.compile(r"(model\.(mtp\.)?layers\.(\d{1,6})\.self_attn\.)qkv_proj\.weight")
BLOCK = 128
HALF_BLOCK = 64
# far above published models
MAX_ROWS, MAX_SHARDS, MAX_PIECES = 1 << 20, 256, 1 << 16
# What configurations may leave out.
SIZES = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128}
NUM_LAYERS, FULL_EVERY = 48, 6


def unsharded(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return all tensors, with the shards of fused projections taken apart; other layouts are left alone."""
    if config.get("attention_projection_layout") != "fused_qkv":
        return dict(tensors)
    found, room = dict(tensors), MAX_PIECES
    layers = min(_number(config, "num_hidden_layers", NUM_LAYERS), MAX_LAYERS)
    for name, info in tensors.items():
        match, scale = _FUSED.fullmatch(name), tensors.get(f"{name}_scale_inv")
        if match is None or int(match[3]) >= layers or scale is None or info.dtype != "F8_E4M3":
            continue
        has_window = bool(match[2]) or _windowed(config, int(match[3]))  # MTP heads have one
        parts = list(_parts(match[1], info, scale, *_sizes(config, has_window)))
        room -= sum(len(part.pieces) for part in parts)
        if room < 0:
            break
        if parts:
            del found[name], found[scale.name]
            found |= {part.name: part for part in parts}
    return found


def is_windowed(layer: int) -> bool:
    """Whether a layer has a window if the configuration lists no kinds of layers."""
    return layer > 0 and layer % FULL_EVERY != FULL_EVERY - 1


def _windowed(config: Mapping[str, Any], layer: int) -> bool:
    for key, kind in (("layer_types", "sliding_attention"), ("hybrid_layer_pattern", 1)):
        listed = config.get(key)
        if isinstance(listed, list):
            return layer < len(listed) and listed[layer] == kind
    return is_windowed(layer)


def _sizes(config: Mapping[str, Any], has_window: bool) -> tuple[list[int], int]:
    """Rows of queries, keys and values, and shards; a value that is no size counts as 0."""
    heads, kv_heads, dim, value = (_number(config, name, default) for name, default in SIZES.items())
    shards = kv_heads
    if has_window:
        own = zip(SIZES, (heads, 2 * kv_heads, dim, value), strict=True)
        heads, kv_heads, dim, value = (_number(config, f"swa_{name}", default) for name, default in own)
    return [heads * dim, kv_heads * dim, kv_heads * value], shards


def _number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = default if config.get(key) is None else config[key]
    return value if type(value) is int and 0 < value < 1 << 16 else 0


def _parts(start: str, info: TensorInfo, scale: TensorInfo, sizes: list[int], shards: int) -> Iterator[TensorInfo]:
    """The weights and scales of the projections; none if the shapes do not fit, or if a half block would be split."""
    if not 0 < shards <= MAX_SHARDS:
        return
    rows, per_shard = [size // shards for size in sizes], -(-sum(sizes) // shards // BLOCK)
    begins = [0, rows[0], rows[0] + rows[1]]
    whole = all(size and size % shards == 0 for size in sizes) and len(info.shape) == len(scale.shape) == 2
    if not whole or sum(sizes) > MAX_ROWS or info.shape[0] != sum(sizes) or scale.shape[0] != shards * per_shard:
        return
    if any(one % HALF_BLOCK for one in (*rows, *begins)):
        return
    row_bytes, scale_bytes = info.nbytes // info.shape[0], scale.nbytes // scale.shape[0]
    for kind, begin, count in zip("qkv", begins, rows, strict=True):
        firsts = [shard * sum(rows) + begin for shard in range(shards)]
        blocks = [(shard * per_shard + begin // BLOCK, count // BLOCK) for shard in range(shards)]
        if begin % BLOCK or count % BLOCK:  # a scale for each half block
            halves = range(begin, begin + count, HALF_BLOCK)
            blocks = [(shard * per_shard + at // BLOCK, 1) for shard in range(shards) for at in halves]
        yield _taken(info, f"{start}{kind}_proj.weight", [(first, count) for first in firsts], row_bytes)
        yield _taken(scale, f"{start}{kind}_proj.weight_scale_inv", blocks, scale_bytes)


def _taken(info: TensorInfo, name: str, rows: list[tuple[int, int]], row_bytes: int) -> TensorInfo:
    """The tensor that consists of these ranges of rows, given by first row and count."""
    pieces = tuple((info.offset + first * row_bytes, count * row_bytes) for first, count in rows)
    total = sum(count for _, count in rows)
    shape, nbytes = (total, *info.shape[1:]), total * row_bytes
    return replace(info, name=name, shape=shape, nbytes=nbytes, offset=pieces[0][0], pieces=pieces)
