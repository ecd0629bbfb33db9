"""RMSNorm: a row a program, held in registers; wide rows in pieces, read twice.

Bytes decide: 2 x 16 KB for a row of 8,192 bf16. Decoding runs one program of eight warps, all of its loads under way
at once; where a product follows, that kernel's prologue does this work instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, wait_for_previous

WIDEST = 16_384  # elements of a row that one program holds
LONGEST = 65_536
HEAD_ROWS = 256  # elements of a tile of short rows, as the heads of QK-norm are


@triton.jit(do_not_specialize=["num_rows"])
def _norm_rows(
    x, weight, out, eps, offset, num_rows, inner, outer_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of DIM; row r lies at (r // inner) * outer_stride + (r % inner) * DIM."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    ok = (row < num_rows)[:, None] & (d < DIM)[None, :]
    # in two dimensions, as x is: one would go through shared memory (4,096: 8 KB, and a spill on sm_120)
    gain = tl.load(weight + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(tl.float32) + offset
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = ((row // inner) * outer_stride + (row % inner) * DIM)[:, None] + d[None, :]
    wide = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) * (1.0 / DIM) + eps)
    result = wide * scale[:, None] * gain
    tl.store(out + row[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _norm_wide(
    x, weight, out, eps, offset, stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of any length, in blocks."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, DIM, BLOCK):
        d = start + tl.arange(0, BLOCK)
        wide = tl.load(x + row * stride + d, mask=d < DIM, other=0.0).to(tl.float32)
        squares += wide * wide
    scale = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) * (1.0 / DIM) + eps)
    for start in range(0, DIM, BLOCK):
        d = start + tl.arange(0, BLOCK)
        wide = tl.load(x + row * stride + d, mask=d < DIM, other=0.0).to(tl.float32)
        gain = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32) + offset
        tl.store(out + row * DIM + d, (wide * scale * gain).to(out.dtype.element_ty), mask=d < DIM)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """As `reference.rms_norm`: x [..., dim] f32 | bf16 | f16, tokens may be strided; weight [dim] any float type.

    Raises ValueError for rows of more than 65,536.
    """
    dim = x.shape[-1]
    if dim > LONGEST:
        raise ValueError(f"rows of {dim}, at most {LONGEST}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == dim:
        inner, outer_stride = x.shape[1], x.stride(0)
    else:
        x = x.contiguous()
        inner, outer_stride = 1, dim
    num_rows = x.numel() // dim if dim else 0
    given = (x, weight.contiguous(), out, eps, offset)
    if dim <= WIDEST:
        rows, warps = _tile(dim)
        grid, padded = (triton.cdiv(num_rows, rows),), triton.next_power_of_2(dim)
        sizes = {"DIM": dim, "PADDED": padded, "ROWS": rows}
        launch(_norm_rows, grid, *given, num_rows, inner, outer_stride, num_warps=warps, **sizes)
    else:
        launch(_norm_wide, (num_rows,), *given, dim, num_warps=16, DIM=dim, BLOCK=8192)
    return out


def _tile(dim: int) -> tuple[int, int]:
    """(rows, warps) of a program: of the width alone, so that a row's sum has one order."""
    padded = triton.next_power_of_2(dim)
    return max(1, HEAD_ROWS // padded), min(max(padded // 512, 2), 16)
