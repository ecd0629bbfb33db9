"""8-bit numbers in kernels: E4M3 written and read by its bits, and two neighbouring codes widened at once.

No E4M3 type appears, so the same code compiles below sm_89 and is right in Triton's interpreter, whose casts are not.
`e4m3_bits` is `kv_codes.encode_e4m3` bit for bit. `widen_*` turn an int16 of two codes (the even dimension in the
low byte) into two float16 numbers; that is what attention reads pages with: half as many elements to address, and a
transposed tile that matrix instructions can load, which single bytes are not. NaN codes (0x7F, 0xFF) widen to ±480.

Instructions per 4 codes, from the inline assembly: E4M3 7, int8 5; Triton's own casts take about 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

_E4M3_PAIR = tl.constexpr(
    "{ .reg .b32 u, t, s;"
    " shl.b32 u, $2, 8; and.b32 s, u, 0x80008000; shr.u32 t, u, 1; lop3.b32 $0, t, 0x3f803f80, s, 0xea;"
    " and.b32 s, $2, 0x80008000; shr.u32 t, $2, 1; lop3.b32 $1, t, 0x3f803f80, s, 0xea; }"
)
# byte ^ 0x80 in the low bits of 1024.0 is 1152 + code; 0x6480 is 1152.0
_INT8_PAIR = tl.constexpr(
    "{ .reg .b32 u, c;"
    " mov.b32 c, 0x64806480; lop3.b32 $0, $2, 0x00ff00ff, c, 0x6a; shr.u32 u, $2, 8;"
    " lop3.b32 $1, u, 0x00ff00ff, c, 0x6a;"
    " mov.b32 c, 0x64806480; sub.rn.f16x2 $0, $0, c; sub.rn.f16x2 $1, $1, c; }"
)


@triton.jit
def e4m3_bits(x):
    """float32 -> int32 bytes: the nearest E4M3 number, ties to even, at most ±448; NaN is 0x7F or 0xFF."""
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
    """int16 of two E4M3 codes -> (even, odd), each number / 256: `operand`, which is float16 where there is PTX.

    Divided so, float16 holds the small ones as subnormals, exactly.
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
def widen_int8(pairs, operand: tl.constexpr, PTX: tl.constexpr):
    """int16 of two int8 codes -> (even, odd): `operand`, which is float16 where there is PTX."""
    if not PTX:
        wide = pairs.to(tl.int32)
        return ((wide << 24) >> 24).to(operand), ((wide << 16) >> 24).to(operand)
    else:
        return tl.inline_asm_elementwise(
            _INT8_PAIR, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def round_even(x):
    """The nearest integer of |x| < 2^22, ties to even, as float32."""
    return (x + 12582912.0) - 12582912.0
