"""Rotary positions on all heads of a token, halves or neighbours as pairs; dimensions beyond them pass through."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, wait_for_previous

TILE = 1024  # elements of a program: so many heads of one token


@triton.jit
def rotate(own, other, cosine, sine, d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The turned dimensions `d` of vectors, from themselves and their partners; others unchanged. All float32."""
    if INTERLEAVED:
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        sign = tl.where(d < HALF, -1.0, 1.0)
    return tl.where(d < 2 * HALF, own * cosine + other * (sine * sign), own)


@triton.jit
def partner(d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The dimension that is turned together with `d`; itself beyond the turned ones."""
    if INTERLEAVED:
        other = d ^ 1
    else:
        other = tl.where(d < HALF, d + HALF, d - HALF)
    return tl.where(d < 2 * HALF, other, d)


@triton.jit
def angle(d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Which cosine and sine turn dimension `d`; 0 for those that none does."""
    if INTERLEAVED:
        place = d // 2
    else:
        place = tl.where(d < HALF, d, d - HALF)
    return tl.where(d < 2 * HALF, place, 0)


@triton.jit
def _rope(
    x, cosines, sines, out, heads, token_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    ok = (head < heads) & (d < DIM)
    wait_for_previous(PDL)
    row = x + token * token_stride + head * DIM
    own = tl.load(row + d, mask=ok, other=0.0).to(tl.float32)
    other = tl.load(row + partner(d, HALF, INTERLEAVED), mask=ok, other=0.0).to(tl.float32)
    place = token * HALF + angle(d, HALF, INTERLEAVED)
    cosine = tl.load(cosines + place, mask=d < 2 * HALF, other=1.0)
    sine = tl.load(sines + place, mask=d < 2 * HALF, other=0.0)
    result = rotate(own, other, cosine, sine, d, HALF, INTERLEAVED)
    tl.store(out + (token * heads + head) * DIM + d, result.to(out.dtype.element_ty), mask=ok)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """As `reference.rope`: x [num_tokens, heads, head_dim], tokens may be strided; cos, sin float32 [num_tokens, half].

    Returns a contiguous tensor like x.
    """
    num_tokens, heads, dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != dim:
        x = x.contiguous()
    out = torch.empty((num_tokens, heads, dim), dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(dim)
    rows = max(1, TILE // padded)
    tensors = (x, cos.contiguous(), sin.contiguous(), out)
    sizes = {"DIM": dim, "PADDED": padded, "HALF": cos.shape[-1], "ROWS": rows}
    grid = (num_tokens, triton.cdiv(heads, rows))
    launch(_rope, grid, *tensors, heads, x.stride(0), INTERLEAVED=interleaved, **sizes)
    return out
