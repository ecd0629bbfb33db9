"""`layout.Prepared` -> the values it stands for, in plain torch: for embeddings, and for tests of `layout`.

Exact, but for rows of E4M3 codes that hold a NaN: they are NaN throughout, as any product with them is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gguf_blocks import E2M1, IQ4, constant, exp2_e8m0
from .layout import SUPER, Prepared
from .layout_codes import CODES, HALVES


def _unpack_codes(p: Prepared, index: slice | Tensor) -> Tensor:
    """uint8 [index, K]: the codes as numbers, from halves and high bits."""
    kind = CODES[p.code]
    halves = p.low[index].int().view(-1, p.low.shape[1] // HALVES, 1, HALVES)
    shifts = torch.arange(kind.planes, dtype=torch.int32, device=p.low.device).view(1, 1, -1, 1)
    codes = (halves >> (shifts * kind.low)) & ((1 << kind.low) - 1)
    if p.high is not None:
        high = p.high[index].int().view(-1, halves.shape[1], kind.high_bytes)
        if kind.high_bytes == 4:
            high = torch.stack([high & 15, high >> 4], -1).flatten(2)
        codes = codes | (((high.unsqueeze(2) >> (shifts * kind.high)) & ((1 << kind.high) - 1)) << kind.low)
    codes = codes.to(torch.uint8).unflatten(3, (HALVES // p.run, p.run)).transpose(2, 3)
    return codes.flatten(1)[:, : p.shape[1]]


def _values(p: Prepared, index: slice | Tensor) -> Tensor:
    """float32 [index, K]: codes without their zero, before any scale."""
    if p.is_float32:
        return p.low[index]
    if p.code in ("bf16", "f16"):
        dtype = torch.bfloat16 if p.code == "bf16" else torch.float16
        return p.low[index, : p.shape[1]].view(dtype).float()
    codes = _unpack_codes(p, index)
    if p.code == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if p.code in ("e2m1", "iq4"):
        table = constant(tuple(E2M1 if p.code == "e2m1" else IQ4), torch.float32, codes.device)
        return table[codes.int()]
    return codes.float() - p.zero


def _group_values(p: Prepared, index: slice | Tensor) -> tuple[Tensor | None, Tensor | None]:
    """float32 [index, G] scales and minima, computed in the order of the stored format's definition."""
    if p.scales is None:
        return None, None
    of_scales = torch.arange(p.shape[0], device=p.low.device)[index] // p.scale_rows
    stored = p.scales[of_scales]

    def above(supers: Tensor) -> Tensor:
        return supers[index].float().repeat_interleave(SUPER // p.group, 1)

    scales = scale_values(p.scale_kind, stored)
    if p.supers is not None:
        scales = above(p.supers) * scales
    if p.min_kind == "none":
        return scales, None
    mins = stored >> 4 if p.mins is None else p.mins[index]
    return scales, mins.float() if p.super_mins is None else -(above(p.super_mins) * mins.float())


def scale_values(kind: str, stored: Tensor) -> Tensor:
    """float32 of stored group scales, without the super scale; half of it for e8m0, which may be subnormal."""
    if kind == "e4m3":
        return stored.view(torch.float8_e4m3fn).float()
    if kind == "e8m0":
        return exp2_e8m0(stored)
    if kind == "nibble":
        return (stored & 15).float()
    return stored.float()


def rows(p: Prepared, index: slice | Tensor) -> Tensor:
    """Rows of the values, float32 [len(index), K]: columns in natural order, pre_scale folded in."""
    out = _scaled(p, index)
    if p.perm is not None:
        out = out[:, torch.argsort(p.perm)]
    if p.pre_scale is not None:
        out = out * p.pre_scale.float()
    return out


def _scaled(p: Prepared, index: slice | Tensor) -> Tensor:
    values = _values(p, index)
    scales, mins = _group_values(p, index)
    row_scale = None if p.row_scale is None else p.row_scale[index].unsqueeze(-1)
    if scales is None:
        return values if row_scale is None else values * row_scale
    if row_scale is not None:
        scales = scales * row_scale  # as the canonical form defines it: both scales meet before the element
    scales = _per_element(scales, p)
    if p.scale_kind == "e8m0":
        values = values * 2
    if p.min_kind == "zero":
        assert mins is not None
        return (values - _per_element(mins, p)) * scales
    values = values * scales
    return values if mins is None else values + _per_element(mins, p)


def _per_element(groups: Tensor, p: Prepared) -> Tensor:
    return groups.repeat_interleave(p.group, 1)[:, : p.shape[1]]
