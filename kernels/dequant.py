"""Reference dequantization of every weight form: `Weight` to float32, in bounded chunks of rows.

Values follow the table in `kernels/weight.py`. Columns are in natural order (`perm` undone) with `pre_scale` folded in,
so `x @ dequantize(w).T` is the layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gguf_blocks import CHUNK_ELEMS, E2M1, constant, dequantize_blocks, exp2_e8m0
from .weight import Weight

FP8_BLOCK = 128  # block-scaled FP8 has one scale per 128 x 128 block


def unpack_nibbles(packed: Tensor) -> Tensor:
    """u8 [..., K/2] -> u8 [..., K]; the low nibble of byte j is element 2j."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def row_chunk(columns: int) -> int:
    """Number of rows of `columns` elements to decode at a time: keeps temporaries near 5 MB."""
    return max(1, CHUNK_ELEMS // max(columns, 1))


def _fp4(packed: Tensor) -> Tensor:
    """u8 [rows, K/2] -> float32 [rows, K], with one table lookup per byte."""
    values = constant(tuple(E2M1), torch.float32, packed.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)  # [256, 2], low nibble first
    return pairs.index_select(0, packed.flatten().int()).view(packed.shape[0], -1)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply [rows, K] by its group scales [rows, K/g]."""
    return (values.view(values.shape[0], scales.shape[1], -1) * scales.unsqueeze(-1)).flatten(1)


def _int4g(w: Weight, scales: Tensor, rows: slice | Tensor) -> Tensor:
    scales = scales[rows].float()
    q = unpack_nibbles(w.qweight[rows]).float().view(scales.shape[0], scales.shape[1], -1)
    if w.mins is not None:
        return (scales.unsqueeze(-1) * q + w.mins[rows].float().unsqueeze(-1)).flatten(1)
    zeros = 8.0 if w.zeros is None else w.zeros[rows].float().unsqueeze(-1)
    return (scales.unsqueeze(-1) * (q - zeros)).flatten(1)


def _fp4g16(w: Weight, scales: Tensor, rows: slice | Tensor) -> Tensor:
    assert w.global_scale is not None
    return _scaled(_fp4(w.qweight[rows]), scales[rows].float() * w.global_scale[rows].unsqueeze(-1))


def _fp8(w: Weight, scales: Tensor, rows: slice | Tensor) -> Tensor:
    n, k = w.shape
    values = w.qweight[rows].float()
    if scales.numel() == 1:
        return values * scales.view(1, 1)
    if scales.shape == (n, 1):
        return values * scales[rows]
    index = torch.arange(n, device=values.device)[rows] // FP8_BLOCK
    return values * scales[index].repeat_interleave(FP8_BLOCK, 1)[:, :k]


# form -> (weight, its scales, rows) -> float32 [rows, K]
_SCALED_FORMS = {
    "int4g": _int4g,
    "int8": lambda w, scales, rows: _scaled(w.qweight[rows].float(), scales[rows].float()),
    "fp4g16": _fp4g16,
    "fp4g32": lambda w, scales, rows: _scaled(_fp4(w.qweight[rows]) * 2, exp2_e8m0(scales[rows])),
    "fp8": _fp8,
    "fp8mx": lambda w, scales, rows: _scaled(w.qweight[rows].float() * 2, exp2_e8m0(scales[rows])),
}


def stored_rows(weight: Weight, rows: slice | Tensor) -> Tensor:
    """float32 [len(rows), K] in stored column order, before `perm` and `pre_scale`: multiplies `gathered` x."""
    if weight.form == "dense":
        return weight.qweight[rows].float()
    if weight.form == "gguf":
        return dequantize_blocks(weight.qweight[rows], weight.block_type)
    if weight.form not in _SCALED_FORMS or weight.scales is None:
        raise ValueError(f"unknown weight form {weight.form!r}")
    return _SCALED_FORMS[weight.form](weight, weight.scales, rows)


def dequantize_rows(weight: Weight, rows: slice | Tensor) -> Tensor:
    """float32 [len(rows), K] of the rows selected by a slice or an index tensor; also the embedding lookup."""
    return natural(stored_rows(weight, rows), weight.perm, weight.pre_scale)


def natural(rows: Tensor, perm: Tensor | None, pre_scale: Tensor | None) -> Tensor:
    """Undo `perm` and fold in `pre_scale`: stored rows with columns in natural order."""
    if perm is not None:
        rows = rows[:, torch.argsort(perm)]
    return rows if pre_scale is None else rows * pre_scale.float()


def dequantize(weight: Weight) -> Tensor:
    """float32 [N, K] of the whole weight, decoded chunk by chunk."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=torch.float32, device=weight.qweight.device)
    step = row_chunk(k)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        out[rows] = dequantize_rows(weight, rows)
    return out
