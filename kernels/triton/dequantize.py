"""Dequantize weights of every form to a dense matrix on the GPU, for long prompts and embedding rows.

Threads own columns, not halves: neighbouring threads write contiguous 16-byte pieces (whole sectors), and read the same
halves for different planes.
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
    GATHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Decode num_rows rows from first_row on, or with GATHER those in row_ptr (int64), to out [num_rows, K].

    A program decodes ROWS rows x COLUMNS columns, exactly, in the order of operations of `kernels/weight.py`."""
    PLANES: tl.constexpr = 16 // LOW
    CHUNK: tl.constexpr = 8 * PLANES
    H: tl.constexpr = (K + CHUNK - 1) // CHUNK * 8
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = first_row + tl.minimum(local, num_rows - 1).to(tl.int64)
    if GATHER:
        row = tl.load(row_ptr + row)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    half = k // (RUN * PLANES) * RUN + k % RUN
    plane = (k // RUN % PLANES)[None, :]
    h = tl.load(low_ptr + (row * H)[:, None] + half[None, :], mask=(k < K)[None, :], other=0).to(tl.int32)
    high = load_high(high_ptr, row, half, H, CODE, HIGH)
    value = half_value(h, high, plane, CODE, LOW, HIGH, ZERO)
    if SCALE != "none":
        scale, least = group_terms(  # per eight columns, which are always in one group
            scale_ptr, min_ptr, super_ptr, super_min_ptr, row, tl.program_id(1) * COLUMNS,
            K, 1, SCALE, "float" if MIN == "zero" else MIN, GROUP, 8, SCALE_ROWS, COLUMNS,
        )  # fmt: skip
        if ROW_SCALE:
            scale *= tl.load(row_scale_ptr + row)[:, None]
        if MIN == "zero":
            value -= spread(least, ROWS, COLUMNS, 8)
        value *= spread(scale, ROWS, COLUMNS, 8)
        if MIN != "none" and MIN != "zero":
            value += spread(least, ROWS, COLUMNS, 8)
    elif ROW_SCALE:
        value *= tl.load(row_scale_ptr + row)[:, None]
    spot = (local.to(tl.int64) * K)[:, None] + k[None, :]
    tl.store(out_ptr + spot, value.to(out_ptr.dtype.element_ty), mask=(local < num_rows)[:, None] & (k < K)[None, :])
