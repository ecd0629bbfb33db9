"""8-bit formats in kernels: E4M3 encoding with integer operations, and decoding of two neighbouring codes at a time.

Does not use the E4M3 type, so the same code compiles below sm_89 and is correct in Triton's interpreter, whose casts
are not. `e4m3_bits` is bit-identical to `kv_codes.encode_e4m3`. `widen_*` convert an int16 with two codes (the even
dimension in the low byte) to two float16 values. Attention reads pages this way: it halves the number of addresses, and
unlike single bytes, 16-bit tiles can be loaded transposed by matrix instructions. NaN codes (0x7F, 0xFF) become ±480,
and NaN by `widen_e4m3_natively`.

Instructions per 4 codes, from the inline assembly: E4M3 7, or 4 from sm_89 with its conversion instruction, whose rate
is not measured; int8 5; Triton's own casts take about 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

_E4M3_PAIR = tl.constexpr(
    "{ .reg .b32 u, t, s;"
    " shl.b32 u, $2, 8; and.b32 s, u, 0x80008000; shr.u32 t, u, 1; lop3.b32 $0, t, 0x3f803f80, s, 0xea;"
    " and.b32 s, $2, 0x80008000; shr.u32 t, $2, 1; lop3.b32 $1, t, 0x3f803f80, s, 0xea; }"
)
_E4M3_NATIVE = tl.constexpr(
    "{ .reg .b16 a, b; .reg .b32 c, d; mov.b32 {a, b}, $2;"
    " cvt.rn.f16x2.e4m3x2 c, a; cvt.rn.f16x2.e4m3x2 d, b;"
    " prmt.b32 $0, c, d, 0x5410; prmt.b32 $1, c, d, 0x7632; }"
)
# byte ^ 0x80 in the low mantissa bits of 1024.0 is 1152 + code; 0x6480 is 1152.0
_INT8_PAIR = tl.constexpr(
    "{ .reg .b32 u, c;"
    " mov.b32 c, 0x64806480; lop3.b32 $0, $2, 0x00ff00ff, c, 0x6a; shr.u32 u, $2, 8;"
    " lop3.b32 $1, u, 0x00ff00ff, c, 0x6a;"
    " mov.b32 c, 0x64806480; sub.rn.f16x2 $0, $0, c; sub.rn.f16x2 $1, $1, c; }"
)


@triton.jit
def e4m3_bits(x):
    """float32 -> E4M3 bytes in int32: round to nearest even, saturate at ±448; NaN becomes 0x7F or 0xFF."""
    bits = x.to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size >= 0x3C800000, normal, small)
    return tl.where(nan, 0x7F, code) | sign


@triton.jit
def widen_e4m3(pairs, operand: tl.constexpr, PTX: tl.constexpr):
    """int16 with two E4M3 codes -> (even, odd), each value / 256, as `operand` (with PTX always float16).

    Divided by 256, the bits of an E4M3 number are a float16, and small ones are exact subnormals.
    """
    if not PTX:
        wide = pairs.to(tl.int32)
        even = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
        odd = ((wide & 0x8000) | ((wide >> 1) & 0x3F80)).to(tl.uint16).to(tl.float16, bitcast=True)
        return even.to(operand), odd.to(operand)
    else:
        return tl.inline_asm_elementwise(
            _E4M3_PAIR, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def widen_e4m3_natively(pairs):
    """int16 with two E4M3 codes -> (even, odd) as float16, by the instruction that GPUs have from sm_89."""
    return tl.inline_asm_elementwise(
        _E4M3_NATIVE, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def widen_int8(pairs, operand: tl.constexpr, PTX: tl.constexpr):
    """int16 with two int8 codes -> (even, odd) as `operand` (with PTX always float16)."""
    if not PTX:
        wide = pairs.to(tl.int32)
        return ((wide << 24) >> 24).to(operand), ((wide << 16) >> 24).to(operand)
    else:
        return tl.inline_asm_elementwise(
            _INT8_PAIR, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def widen_pairs(pairs, FORMAT: tl.constexpr, operand: tl.constexpr, PTX: tl.constexpr):
    """`widen_e4m3` or `widen_int8`, by the format of the pages."""
    if FORMAT == "fp8":
        even, odd = widen_e4m3(pairs, operand, PTX)
    else:
        even, odd = widen_int8(pairs, operand, PTX)
    return even, odd


@triton.jit
def round_even(x):
    """Round |x| < 2^22 to the nearest integer, ties to even, as float32."""
    return (x + 12582912.0) - 12582912.0
