"""Hyper-connections as in `kernels.hyper`: around the products of their two matrices, which run by themselves, or (mHC)
with the product of one small matrix.

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

from ..layer_weights import FUSED_STREAMS, HyperWeights, MixedWeights, has_only
from .launch import launch, power_of_2, wait_for_previous
from .recurrent import _sigmoid
from .rms_norm import norm_streams

BLOCK = 512  # elements per program
SHARE, MIXED = 256, 256  # mHC: elements of all streams per program of the product; of each stream, where they are mixed
MOST_MIXED = 8  # streams


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


@triton.jit
def _mix_products(
    x, fn, parts, WIDE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A share of the products of ROWS rows of fn with one token's streams; after them that of the sum of squares."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, PADDED)
    factors = tl.load(
        fn + row[:, None] * WIDE + i[None, :], mask=(row < ROWS)[:, None] & (i < WIDE)[None, :], other=0.0
    )
    wait_for_previous(PDL)
    streams = tl.load(x + token * WIDE + i, mask=i < WIDE, other=0.0).to(tl.float32)
    made = tl.sum(tl.where((row == ROWS)[:, None], streams[None, :], factors) * streams[None, :], 1)
    tl.store(parts + (token * tl.num_programs(1) + tl.program_id(1)) * PADDED + row, made)


@triton.jit
def _mix_streams(
    x, parts, base, scale, mixed, gains, num_parts, eps, norm_eps,
    COUNT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weighted sum of a token's streams; the first program also writes the gains and the matrix."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    part, s, k = tl.arange(0, PARTS), tl.arange(0, COUNT), tl.arange(0, COUNT)
    of_part = parts + (token * num_parts + part) * PADDED
    real = part < num_parts
    squares = tl.sum(tl.load(of_part + (2 + COUNT) * COUNT, mask=real, other=0.0), 0)
    size = 1.0 / tl.sqrt_rn(squares * (1.0 / (COUNT * DIM)) + norm_eps)
    before = tl.sum(tl.load(of_part[:, None] + s[None, :], mask=real[:, None], other=0.0), 0) * size
    before = _sigmoid(before * tl.load(scale) + tl.load(base + s)) + eps
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x + token * (COUNT * DIM) + s[:, None] * DIM + i[None, :]
    streams = tl.load(at, mask=(i < DIM)[None, :], other=0.0).to(tl.float32)
    total = tl.sum(streams * before[:, None], 0)
    tl.store(mixed + token * DIM + i, total.to(mixed.dtype.element_ty), mask=i < DIM)
    if tl.program_id(1) == 0:
        after = tl.sum(tl.load(of_part[:, None] + (COUNT + s)[None, :], mask=real[:, None], other=0.0), 0) * size
        after = 2.0 * _sigmoid(after * tl.load(scale + 1) + tl.load(base + COUNT + s))
        gains += token * (COUNT + COUNT * COUNT)
        tl.store(gains + s, after)
        place = 2 * COUNT + s[:, None] * COUNT + k[None, :]
        matrix = tl.zeros([COUNT, COUNT], tl.float32)
        for p in range(num_parts):
            matrix += tl.load(parts + (token * num_parts + p) * PADDED + place)
        matrix = matrix * size * tl.load(scale + 2) + tl.load(base + place)
        matrix = tl.exp2((matrix - tl.max(matrix, 1, keep_dims=True)) * 1.4426950408889634)
        matrix = matrix / tl.sum(matrix, 1, keep_dims=True) + eps
        matrix = matrix / (tl.sum(matrix, 0, keep_dims=True) + eps)
        for _ in range(ROUNDS - 1):
            matrix = matrix / (tl.sum(matrix, 1, keep_dims=True) + eps)
            matrix = matrix / (tl.sum(matrix, 0, keep_dims=True) + eps)
        tl.store(gains + COUNT + s[:, None] * COUNT + k[None, :], matrix)


@triton.jit
def _mix_back(
    x, output, gains, COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Replace a part of all streams by its mixture, plus the output times the gain of each stream."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s, k = tl.arange(0, COUNT), tl.arange(0, COUNT)
    gains += token * (COUNT + COUNT * COUNT)
    given = tl.load(output + token * DIM + i, mask=i < DIM, other=0.0).to(tl.float32)
    total = given[None, :] * tl.load(gains + k)[:, None]
    at = x + token * (COUNT * DIM) + i
    for stream in tl.static_range(COUNT):
        old = tl.load(at + stream * DIM, mask=i < DIM, other=0.0).to(tl.float32)
        total += old[None, :] * tl.load(gains + COUNT + stream * COUNT + k)[:, None]
    tl.debug_barrier()  # all streams are read before one is replaced
    tl.store(at[None, :] + s[:, None] * DIM, total.to(x.dtype.element_ty), mask=(i < DIM)[None, :])


def _mixed_in(x: Tensor, weights: MixedWeights) -> tuple[Tensor, Tensor]:
    """`hyper.hyper_in` of `MixedWeights` in two launches."""
    (tokens, wide), count = x.shape, weights.count
    rows, shares, dim = weights.fn.shape[0], -(-wide // SHARE), wide // count
    padded = power_of_2(rows + 1)
    parts = torch.empty((tokens, shares, padded), dtype=torch.float32, device=x.device)
    sizes = {"WIDE": wide, "ROWS": rows, "PADDED": padded, "BLOCK": SHARE}
    launch(_mix_products, (tokens, shares), x, weights.fn, parts, **sizes)
    mixed = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    gains = torch.empty((tokens, count + count**2), dtype=torch.float32, device=x.device)
    given = x, parts, weights.base, weights.scale, mixed, gains, shares, weights.eps, weights.norm_eps
    sizes = {"COUNT": count, "DIM": dim, "PADDED": padded, "PARTS": power_of_2(shares), "ROUNDS": weights.rounds}
    launch(_mix_streams, (tokens, -(-dim // MIXED)), *given, **sizes, BLOCK=MIXED)
    return mixed, gains


def _mixes(count: int) -> bool:
    """Whether the kernels of mHC support this number of streams."""
    return 1 < count <= MOST_MIXED and power_of_2(count) == count


def hyper_in(composed: Callable[..., Any], x: Tensor, weights: HyperWeights | MixedWeights) -> tuple[Tensor, Tensor]:
    """`hyper.hyper_in` in three launches and two products, of weights of any back end; mHC in two launches."""
    if isinstance(weights, MixedWeights):
        fits = _mixes(weights.count) and x.is_contiguous()
        made: tuple[Tensor, Tensor] = _mixed_in(x, weights) if fits else composed(x, weights)
        return made
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
    (tokens, dim), count = output.shape, x.shape[1] // output.shape[1]
    if gains.shape[1] > count:
        if not _mixes(count):
            return composed(x, output, gains)
        launch(_mix_back, (tokens, -(-dim // MIXED)), x, output, gains, COUNT=count, DIM=dim, BLOCK=MIXED)
        return x
    grid = tokens, -(-count * dim // BLOCK)
    launch(_spread, grid, x, output, gains, COUNT=count, DIM=dim, BLOCK=BLOCK)
    return x
