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

from .mapped_file import TensorInfo

_FUSED = re.compile(r"(model\.layers\.(\d{1,6})\.self_attn\.)qkv_proj\.weight")
BLOCK = 128
HALF_BLOCK = 64
MAX_ROWS = 1 << 20  # far above published models: a range is kept for each block


def unsharded(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return all tensors, with the shards of fused projections taken apart; other layouts are left alone."""
    if config.get("attention_projection_layout") != "fused_qkv":
        return dict(tensors)
    found = dict(tensors)
    for name, info in tensors.items():
        match, scale = _FUSED.fullmatch(name), tensors.get(f"{name}_scale_inv")
        if match is None or scale is None or info.dtype != "F8_E4M3":
            continue
        sizes, shards = _sizes(config, int(match[2]))
        if parts := list(_parts(match[1], info, scale, sizes, shards)):
            del found[name], found[scale.name]
            found |= {part.name: part for part in parts}
    return found


def _sizes(config: Mapping[str, Any], layer: int) -> tuple[list[int], int]:
    """Rows of queries, keys and values, and shards; zeros if the configuration does not say."""
    pattern = config.get("hybrid_layer_pattern")
    windowed = isinstance(pattern, list) and layer < len(pattern) and pattern[layer] == 1
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    own = (config.get(f"swa_{name}") if windowed else None for name in names)
    stated = [config.get(name) if one is None else one for name, one in zip(names, own, strict=True)]
    numbers = [one for one in (*stated, config.get(names[1])) if type(one) is int and 0 < one < 1 << 16]
    if len(numbers) < len(names) + 1:
        return [0, 0, 0], 1
    heads, kv_heads, dim, value, shards = numbers
    return [heads * dim, kv_heads * dim, kv_heads * value], shards


def _parts(start: str, info: TensorInfo, scale: TensorInfo, sizes: list[int], shards: int) -> Iterator[TensorInfo]:
    """The weights and scales of the projections; none if the shapes do not fit, or if a half block would be split."""
    rows, per_shard = [size // shards for size in sizes], -(-sum(sizes) // shards // BLOCK)
    begins = [0, rows[0], rows[0] + rows[1]]
    whole = all(size and size % shards == 0 for size in sizes) and len(info.shape) == len(scale.shape) == 2
    if not whole or sum(sizes) > MAX_ROWS or info.shape[0] != sum(sizes) or scale.shape[0] != shards * per_shard:
        return
    if any(one % HALF_BLOCK for one in (*rows, *begins)):
        return
    row_bytes, scale_bytes = info.nbytes // info.shape[0], scale.nbytes // scale.shape[0]
    for kind, begin, count in zip("qkv", begins, rows, strict=True):
        size = HALF_BLOCK if begin % BLOCK or count % BLOCK else BLOCK
        of_rows = [(shard * sum(rows) + begin, count) for shard in range(shards)]
        blocks = [
            shard * per_shard + at // BLOCK for shard in range(shards) for at in range(begin, begin + count, size)
        ]
        yield _taken(info, f"{start}{kind}_proj.weight", of_rows, row_bytes)
        yield _taken(scale, f"{start}{kind}_proj.weight_scale_inv", [(block, 1) for block in blocks], scale_bytes)


def _taken(info: TensorInfo, name: str, rows: list[tuple[int, int]], row_bytes: int) -> TensorInfo:
    """The tensor that consists of these ranges of rows, given by first row and count."""
    pieces = tuple((info.offset + first * row_bytes, count * row_bytes) for first, count in rows)
    total = sum(count for _, count in rows)
    shape, nbytes = (total, *info.shape[1:]), total * row_bytes
    return replace(info, name=name, shape=shape, nbytes=nbytes, offset=pieces[0][0], pieces=pieces)
