"""RMSNorm and LayerNorm: one row per program, held in registers (rows beyond 16,384, which no model has, spill to local
memory).

Memory-bound: 2 x 16 KB for a row of 8,192 bf16. In decode one program of eight warps has all its loads in flight; if a
product follows, it usually fuses the norm instead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layer_weights import Norm
from .launch import launch, power_of_2

HEAD_ROWS = 256  # elements per tile of short rows, such as the heads of QK-norm


@triton.jit(do_not_specialize=["num_rows"])
def _norm_rows(
    x, weight, bias, out, eps, factor, num_rows, inner, outer_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STREAMS: tl.constexpr, CENTRED: tl.constexpr,
    ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows of DIM; row r is at (r // inner) * outer_stride + (r % inner) * DIM.

    STREAMS   row r is multiplied by row r % STREAMS of the weight
    CENTRED   LayerNorm: the mean is subtracted, and the bias added
    ADDS      add what `out` holds, and multiply the sum by `factor`
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    ok = (row < num_rows)[:, None] & (d < DIM)[None, :]
    # 2-d like x: a 1-d load would be converted through shared memory (8 KB for 4,096, and a spill on sm_120)
    if STREAMS == 1:
        gain = tl.load(weight + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(tl.float32)
    else:
        own = weight + (row % STREAMS).to(tl.int32)[:, None] * DIM
        gain = tl.load(own + d[None, :], mask=ok, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = ((row // inner) * outer_stride + (row % inner) * DIM)[:, None] + d[None, :]
    wide = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    if CENTRED:
        wide = tl.where(ok, wide - (tl.sum(wide, 1) * (1.0 / DIM))[:, None], 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) * (1.0 / DIM) + eps)
    result = wide * scale[:, None] * gain
    if CENTRED:
        result += tl.load(bias + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(tl.float32)
    to = out + row[:, None] * DIM + d[None, :]
    if ADDS:
        result = (tl.load(to, mask=ok, other=0.0).to(tl.float32) + result) * factor
    tl.store(to, result.to(out.dtype.element_ty), mask=ok)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`; tokens of x may be strided."""
    dim = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == dim:
        inner, outer_stride = x.shape[1], x.stride(0)
    else:
        x = x.contiguous()
        inner, outer_stride = 1, dim
    _launch(x, weight, None, out, eps, dim, inner, outer_stride, 1)
    return out


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    """RMSNorm, also of groups, or LayerNorm of rows [num_rows, dim]: `mixers.norm_rows`."""
    if norm is None:
        return x
    if norm.groups > 1:
        return norm_streams(x.contiguous(), norm.weight, norm.eps, norm.groups)
    if norm.bias is None:
        return rms_norm(x, norm.weight, norm.eps)
    x, dim = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    _launch(x, norm.weight, norm.bias.contiguous(), out, norm.eps, dim, 1, dim, 1)
    return out


def add_normed(x: Tensor, rows: Tensor, norm: Norm | None, factor: float = 1.0) -> Tensor:
    """(x + norm(rows)) * factor, in place: [num_rows, dim]; with an RMSNorm one launch, which rounds once."""
    if norm is None or norm.groups > 1 or norm.bias is not None or not x.is_contiguous():
        x.add_(normed(rows, norm))
        return x if factor == 1.0 else x.mul_(factor)
    rows, dim = rows.contiguous(), x.shape[1]
    _launch(rows, norm.weight, None, x, norm.eps, dim, 1, dim, 1, factor)
    return x


def norm_streams(x: Tensor, weight: Tensor, eps: float, count: int) -> Tensor:
    """RMSNorm of each of `count` streams side by side, with a weight of its own: the shape of x.

    x, weight   [num_tokens, count * dim], contiguous; [count * dim]
    """
    out, dim = torch.empty_like(x), x.shape[1] // count
    _launch(x, weight, None, out, eps, dim, 1, dim, count)
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, eps: float, dim: int, inner: int, outer_stride: int,
    streams: int, factor: float | None = None,
) -> None:  # fmt: skip
    num_rows, padded = x.numel() // dim if dim else 0, power_of_2(dim)
    # from the width alone, so that a row is always summed in the same order
    rows, warps = max(1, HEAD_ROWS // padded), min(max(padded // 512, 2), 16)
    gains = weight.contiguous(), weight if bias is None else bias
    numbers = eps, 1.0 if factor is None else factor, num_rows, inner, outer_stride
    kinds: dict[str, Any] = {"STREAMS": streams, "CENTRED": bias is not None, "ADDS": factor is not None}
    kinds |= {"DIM": dim, "PADDED": padded, "ROWS": rows}
    launch(_norm_rows, (-(-num_rows // rows),), x, *gains, out, *numbers, num_warps=warps, **kinds)
