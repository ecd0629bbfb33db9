"""Quantize activations row by row to E4M3 or NVFP4 (E2M1 with an E4M3 scale per 16), in the byte order of `layout`.

Scales are dynamic, from the maximum magnitude of a row or of each 128 elements, so a row's codes do not depend on other
rows. Encoding uses integer operations, because emulated float formats and Triton's interpreter round incorrectly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import e4m3_value
from .e4m3 import e4m3_bits
from .launch import wait_for_previous


@triton.jit
def e2m1_bits(x):
    """float32 -> E2M1 codes in int32: round to nearest even, saturate at 6."""
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return sign | code


@triton.jit
def quantize_e4m3(
    x_ptr, code_ptr, scale_ptr, K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Quantize BLOCK elements of a row to E4M3 bytes in [PADDED] and one scale."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    spot = part * BLOCK + tl.arange(0, BLOCK)
    # byte 2h + i of a chunk of 16 holds element 8i + h
    k = spot // 16 * 16 + spot % 2 * 8 + spot % 16 // 2
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-10) / 448.0
    tl.store(code_ptr + row * PADDED + spot, e4m3_bits(x / scale).to(tl.uint8), mask=spot < PADDED)
    tl.store(scale_ptr + row * tl.num_programs(1) + part, scale)


@triton.jit
def quantize_nvfp4(
    x_ptr, code_ptr, scale_ptr, row_scale_ptr, K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantize a row to E2M1 pairs [PADDED / 2], E4M3 scales [PADDED / 16] and one float32 row scale."""
    row = tl.program_id(0).to(tl.int64)
    # byte 2h + q of a group of 16 (halves h of a run of 4, planes 2q and 2q + 1) holds elements 8q + h and 8q + 4 + h
    group = tl.arange(0, BLOCK // 16)
    byte = tl.arange(0, 8)
    k = group[:, None] * 16 + (byte % 2 * 8 + byte // 2)[None, :]
    wait_for_previous(PDL)
    even = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + row * K + k + 4, mask=k + 4 < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    over_all = tl.maximum(tl.max(largest, 0), 1e-30) / 2688.0
    bits = e4m3_bits(tl.maximum(largest / (6.0 * over_all), 0.001953125))
    step = 1.0 / (e4m3_value(bits) * over_all)
    codes = e2m1_bits(even * step[:, None]) | (e2m1_bits(odd * step[:, None]) << 4)
    tl.store(code_ptr + row * (PADDED // 2) + group[:, None] * 8 + byte[None, :], codes.to(tl.uint8), mask=k < PADDED)
    tl.store(scale_ptr + row * (PADDED // 16) + group, bits.to(tl.uint8), mask=group < PADDED // 16)
    tl.store(row_scale_ptr + row, over_all)
