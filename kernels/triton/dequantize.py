"""Weights of every form to a dense matrix on the card: what long prompts multiply with, and the rows of an embedding.

A slab of rows is small enough to stay in the L2 cache between the kernel that writes it and the product that reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import group_terms, half_value, load_high, spread


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def dequantize_kernel(
    low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, row_ptr, out_ptr, first_row,
    num_rows,
    K: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, MIN: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr,
    GATHER: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """num_rows rows from first_row on, or those of row_ptr int64 where GATHER -> out [num_rows, K].

    A program takes ROWS of them, HALVES halves of each; exact, in the order of operations of `kernels/weight.py`.
    """
    PLANES: tl.constexpr = 16 // LOW
    CHUNK: tl.constexpr = 8 * PLANES
    H: tl.constexpr = (K + CHUNK - 1) // CHUNK * 8
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = first_row + tl.minimum(local, num_rows - 1).to(tl.int64)
    if GATHER:
        row = tl.load(row_ptr + row)
    half = tl.program_id(1) * HALVES + tl.arange(0, HALVES)
    inside = (half < H)[None, :]
    h = tl.load(low_ptr + (row * H)[:, None] + half[None, :], mask=inside, other=0).to(tl.int32)
    high = load_high(high_ptr, row, half, H, CODE, HIGH)
    if SCALE != "none":
        scale, least = group_terms(
            scale_ptr, min_ptr, super_ptr, super_min_ptr, row, tl.program_id(1) * HALVES,
            K, PLANES, SCALE, "float" if MIN == "zero" else MIN, GROUP, RUN, SCALE_ROWS, HALVES,
        )  # fmt: skip
        if ROW_SCALE:
            scale *= tl.load(row_scale_ptr + row)[:, None]
        factor = spread(scale, ROWS, HALVES, RUN)
        if MIN != "none":
            offset = spread(least, ROWS, HALVES, RUN)
    place = half // RUN * (RUN * PLANES) + half % RUN
    for i in tl.static_range(PLANES):
        k = place + i * RUN
        value = half_value(h, high, i, CODE, LOW, HIGH, ZERO)
        if SCALE != "none":
            if MIN == "zero":
                value -= offset
            value *= factor
            if MIN != "none" and MIN != "zero":
                value += offset
        elif ROW_SCALE:
            value *= tl.load(row_scale_ptr + row)[:, None]
        spot = (local.to(tl.int64) * K)[:, None] + k[None, :]
        tl.store(
            out_ptr + spot, value.to(out_ptr.dtype.element_ty), mask=(local < num_rows)[:, None] & (k < K)[None, :]
        )
