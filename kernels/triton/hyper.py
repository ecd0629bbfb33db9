"""Hyper-connections as in `kernels.hyper`, around the products of their two matrices, which run by themselves.

Memory-bound, or rather launch-bound: a token's four streams of 2,560 are 20 KB in bf16, read and written within about a
microsecond. Values are rounded once where the composed segments round twice. Batch-invariant: a program computes part
of one token, in tiles that depend on shapes alone, and adds streams in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layer_weights import FUSED_STREAMS, HyperWeights, has_only
from .launch import launch, wait_for_previous
from .recurrent import _sigmoid
from .rms_norm import norm_streams

BLOCK = 512  # elements per program


@triton.jit
def _split(
    low, hidden, gains,
    RANK: tl.constexpr, COUNT: tl.constexpr, GAINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of `down`, over COUNT: silu of RANK values, and twice the sigmoid of the GAINS after them."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(low + token * (RANK + GAINS) + i, mask=i < RANK + GAINS, other=0.0).to(tl.float32) * (1.0 / COUNT)
    factor = _sigmoid(wide)
    tl.store(hidden + token * RANK + i, (wide * factor).to(hidden.dtype.element_ty), mask=i < RANK)
    if GAINS > 0:
        tl.store(gains + token * GAINS + (i - RANK), factor * 2.0, mask=(i >= RANK) & (i < RANK + GAINS))


@triton.jit
def _mean(
    gates, normed, out, COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The mean over streams of sigmoid(gate) · normed."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(COUNT):
        at = token * (COUNT * DIM) + (stream * DIM + i)
        gate = tl.load(gates + at, mask=i < DIM, other=0.0).to(tl.float32)
        total += _sigmoid(gate) * tl.load(normed + at, mask=i < DIM, other=0.0).to(tl.float32)
    tl.store(out + token * DIM + i, (total * (1.0 / COUNT)).to(out.dtype.element_ty), mask=i < DIM)


@triton.jit
def _spread(
    x, output, gains, COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Add the output, times the gain of each stream, to a part of all streams."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < COUNT * DIM
    gain = tl.load(gains + token * COUNT + i // DIM, mask=ok, other=0.0)
    given = tl.load(output + token * DIM + i % DIM, mask=ok, other=0.0).to(tl.float32)
    at = x + token * (COUNT * DIM) + i
    wide = tl.load(at, mask=ok, other=0.0).to(tl.float32) + given * gain
    tl.store(at, wide.to(x.dtype.element_ty), mask=ok)


def hyper_in(composed: Callable[..., Any], x: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor]:
    """`hyper.hyper_in` in three launches and two products, of weights of any back end."""
    if not has_only(weights, FUSED_STREAMS) or not x.is_contiguous():
        found: tuple[Tensor, Tensor] = composed(x, weights)
        return found
    (tokens, wide), count, rank = x.shape, weights.count, weights.rank
    normed = norm_streams(x, weights.norm.weight, weights.norm.eps, count)
    low = weights.down(normed).contiguous()
    num_gains, dim = low.shape[1] - rank, wide // count
    hidden = torch.empty((tokens, rank), dtype=x.dtype, device=x.device)
    gains = torch.empty((tokens, num_gains), dtype=torch.float32, device=x.device)
    sizes = {"RANK": rank, "COUNT": count, "GAINS": num_gains, "BLOCK": BLOCK}
    launch(_split, (tokens, -(-low.shape[1] // BLOCK)), low, hidden, gains if num_gains else low, **sizes)
    gates = weights.up(hidden).contiguous()
    mixed = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    launch(_mean, (tokens, -(-dim // BLOCK)), gates, normed, mixed, COUNT=count, DIM=dim, BLOCK=BLOCK)
    return mixed, gains


def hyper_out(composed: Callable[..., Tensor], x: Tensor, output: Tensor, gains: Tensor) -> Tensor:
    """`hyper.hyper_out` in one launch."""
    if not (x.is_contiguous() and output.is_contiguous() and gains.is_contiguous()):
        return composed(x, output, gains)
    (tokens, dim), count = output.shape, gains.shape[1]
    grid = tokens, -(-count * dim // BLOCK)
    launch(_spread, grid, x, output, gains, COUNT=count, DIM=dim, BLOCK=BLOCK)
    return x
