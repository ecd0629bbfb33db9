"""Activations in 16-bit block fixed point, computed once for all programs of a product; operand of `fixed.fixed_part`.

Each chunk of 32 elements is scaled by a power of two so that its largest magnitude is between 2^14 and 2^15, and
rounded to 16-bit integers. A bfloat16 within 2^7 of its chunk's maximum keeps all its bits; the error of smaller ones
is at most 2^-15 of the maximum. RMSNorm is fused: its weight multiplies x before, 1/rms goes into the chunk's unit.

Layout per row of x with C chunks, int32: low bytes for the codes of part 0 of a word [C, 4], low bytes for part 1, high
bytes for both, in the order of `fixed._code_bytes`; then units, float32 [C]; then sums of the integers [C, RUNS].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layer_weights import Norm
from .fixed import dot, gathered, largest
from .gemv import gemv_kernel, load_plane
from .launch import has_ptx, is_last, launch, power_of_2, wait_for_previous
from .layout import CODES, HALVES

# 1.5 * 2^23: adding it rounds x to an integer in the low mantissa bits, in two's complement
MAGIC = tl.constexpr(12582912.0)
# (2 * 127 + 14) << 23 as int32: minus a number's exponent bits, this is the power of two that scales it to >= 2^14
UNITS = tl.constexpr(-2046820352)
CHUNKS = 128  # per program
WARPS = 16  # of programs that also normalize


@triton.jit
def _halves(x, up, CHUNKS: tl.constexpr):
    """round(x * up) in the low 16 bits of int32, for even and odd halves separately: [CHUNKS, 4] each."""
    whole = (x * up[:, None] + MAGIC).to(tl.int32, bitcast=True)
    return tl.split(tl.reshape(whole, (CHUNKS, 4, 2)))


@triton.jit
def convert(
    x_row, norm_ptr, out, chunk, eps,
    K: tl.constexpr, CODE: tl.constexpr, RUN: tl.constexpr, NORM: tl.constexpr, PADDED: tl.constexpr,
    CHUNKS: tl.constexpr, CACHE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Convert CHUNKS chunks of one row of x; chunks with non-finite values get a NaN unit.

    CACHE   cache modifier of loads of x: ".cg" if other programs of this kernel wrote it
    PADDED  K as a power of two, for the sum of squares
    """
    C: tl.constexpr = (K + 31) // 32
    RUNS: tl.constexpr = 8 // RUN
    ok = chunk < C
    x0 = load_plane(x_row, chunk, 0, K, C, 32, RUN, CHUNKS, CACHE)
    x1 = load_plane(x_row, chunk, 1, K, C, 32, RUN, CHUNKS, CACHE)
    x2 = load_plane(x_row, chunk, 2, K, C, 32, RUN, CHUNKS, CACHE)
    x3 = load_plane(x_row, chunk, 3, K, C, 32, RUN, CHUNKS, CACHE)
    factor = 1.0
    if NORM:
        x0 *= load_plane(norm_ptr, chunk, 0, K, C, 32, RUN, CHUNKS, "")
        x1 *= load_plane(norm_ptr, chunk, 1, K, C, 32, RUN, CHUNKS, "")
        x2 *= load_plane(norm_ptr, chunk, 2, K, C, 32, RUN, CHUNKS, "")
        x3 *= load_plane(norm_ptr, chunk, 3, K, C, 32, RUN, CHUNKS, "")
        k = tl.arange(0, PADDED)
        wide = tl.load(x_row + k, mask=k < K, other=0.0, cache_modifier=CACHE).to(tl.float32)
        factor = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / K + eps)

    top = largest(largest(tl.abs(x0), tl.abs(x1)), largest(tl.abs(x2), tl.abs(x3)))
    top = tl.reduce(top, 1, largest)
    # slightly enlarged, so that mantissa bits beyond 15 cannot round up to 2^15; zeros stay zeros
    power = (largest(top, 1e-30) * 1.0001).to(tl.int32, bitcast=True) & 0x7F800000
    up = (0 - power + UNITS).to(tl.float32, bitcast=True)
    unit = ((power - (14 << 23)).to(tl.float32, bitcast=True) + top * 0.0) * factor
    e0, o0 = _halves(x0, up, CHUNKS)
    e1, o1 = _halves(x1, up, CHUNKS)
    e2, o2 = _halves(x2, up, CHUNKS)
    e3, o3 = _halves(x3, up, CHUNKS)
    if CODE == "int4":
        low_a, high_a = gathered(e0, e2, o0, o2, 0, ASSEMBLY), gathered(e0, e2, o0, o2, 1, ASSEMBLY)
        low_b, high_b = gathered(e1, e3, o1, o3, 0, ASSEMBLY), gathered(e1, e3, o1, o3, 1, ASSEMBLY)
    else:
        low_a, high_a = gathered(e0, e1, e2, e3, 0, ASSEMBLY), gathered(e0, e1, e2, e3, 1, ASSEMBLY)
        low_b, high_b = gathered(o0, o1, o2, o3, 0, ASSEMBLY), gathered(o0, o1, o2, o3, 1, ASSEMBLY)
    none = tl.zeros((CHUNKS, 4), tl.int32)
    ones = none + 0x01010101
    x_low = dot(ones, low_b, dot(ones, low_a, none, False, ASSEMBLY), False, ASSEMBLY)
    x_high = dot(ones, high_b, dot(ones, high_a, none, True, ASSEMBLY), True, ASSEMBLY)
    sums = tl.sum(tl.reshape(x_high * 256 + x_low, (CHUNKS, RUNS, 4 // RUNS)), 2)

    word = (chunk * 4)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(out + word, low_a, mask=ok[:, None])
    tl.store(out + 4 * C + word, low_b, mask=ok[:, None])
    tl.store(out + 8 * C + word, high_a, mask=ok[:, None])
    tl.store(out + 12 * C + word, high_b, mask=ok[:, None])
    tl.store(out + 16 * C + chunk, unit.to(tl.int32, bitcast=True), mask=ok)
    tl.store(out + 17 * C + (chunk * RUNS)[:, None] + tl.arange(0, RUNS)[None, :], sums, mask=ok[:, None])


@triton.jit
def digits_kernel(
    x_ptr, norm_ptr, out_ptr, eps,
    K: tl.constexpr, CODE: tl.constexpr, RUN: tl.constexpr, NORM: tl.constexpr, PADDED: tl.constexpr,
    CHUNKS: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convert CHUNKS chunks of row `program_id(1)` of x."""
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    out = out_ptr + row * ((17 + 8 // RUN) * ((K + 31) // 32))
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    convert(x_ptr + row * K, norm_ptr, out, chunk, eps, K, CODE, RUN, NORM, PADDED, CHUNKS, "", ASSEMBLY)


@triton.jit
def gemv_digits_kernel(
    x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
    residual_ptr, expert_ptr, out_ptr, n, eps, digits_ptr, counter_ptr,
    K: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, MIN: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, FIXED: tl.constexpr,
    LATE: tl.constexpr, NEXT_N: tl.constexpr, NEXT_CODE: tl.constexpr, NEXT_RUN: tl.constexpr, ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`gemv_kernel`; the last program to finish outputs of a chunk also converts the chunk for the next product.

    NEXT_N, NEXT_CODE, NEXT_RUN   outputs per row, and the code and runs of the next product's weight
    """
    gemv_kernel(
        x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
        residual_ptr, expert_ptr, out_ptr, n, eps,
        K, CODE, LOW, HIGH, SCALE, MIN, ZERO, GROUP, RUN, SCALE_ROWS, ROW_SCALE, BIAS, NORM, RESIDUAL, GATE, LIMIT,
        SHARE, ROWS, CHUNKS, TOKENS, FIXED, LATE, PDL,
    )  # fmt: skip
    C: tl.constexpr = NEXT_N // 32
    PARTS: tl.constexpr = 32 // (ROWS // 2 if GATE != "" else ROWS)  # programs per chunk
    spot = tl.program_id(0) // PARTS
    if is_last(counter_ptr + tl.program_id(1) * C + spot, PARTS):
        for i in tl.static_range(TOKENS):
            row = (tl.program_id(1) * TOKENS + i).to(tl.int64)
            out = digits_ptr + row * ((17 + 8 // NEXT_RUN) * C)
            chunk = spot + tl.arange(0, 1)
            convert(
                out_ptr + row * NEXT_N, out_ptr, out, chunk, 0.0,
                NEXT_N, NEXT_CODE, NEXT_RUN, False, 1, 1, ".cg", ASSEMBLY,
            )  # fmt: skip


def empty_digits(tokens: int, k: int, run: int, device: torch.device) -> Tensor:
    """Uninitialized fixed-point rows: int32 [tokens, C * (17 + 8 / run)]."""
    return torch.empty(tokens, -(-k // CODES["int4"].chunk) * (17 + HALVES // run), dtype=torch.int32, device=device)


def digits(x: Tensor, code: str, run: int, norm: Norm | None) -> Tensor:
    """x [num_tokens, K], normalized if there is a norm -> int32 [num_tokens, C * (17 + 8 / run)]."""
    tokens, k = x.shape
    chunks = -(-k // CODES[code].chunk)
    out = empty_digits(tokens, k, run, x.device)
    launch(
        digits_kernel,
        (-(-chunks // CHUNKS), tokens),
        *(x, x if norm is None else norm.weight, out, 0.0 if norm is None else float(norm.eps)),
        K=k,
        CODE=code,
        RUN=run,
        NORM=norm is not None,
        PADDED=power_of_2(k),
        CHUNKS=CHUNKS,
        ASSEMBLY=has_ptx(x.device),
        num_warps=CHUNKS // 32 if norm is None else WARPS,
        subnormals=True,
    )
    return out
