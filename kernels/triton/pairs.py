"""Packed decoding of two neighbouring codes of a plane, in the 16x2 registers that matrix instructions read.

Inline assembly, because the compiler unpacks 16-bit integers: two halves in register `$1` become two values in `$0`.
Instructions per weight on sm_90, with and without the assembly: int4 1.5 and 2.8, e2m1 2.4 and 7, e4m3 2.5 and 7, int8
2 and 4. Triton's interpreter has no inline assembly and uses `codes.half_value` instead; the tests run the assembly
below over all codes.

Integer codes are masked and ORed into the mantissa of a constant whose last mantissa bit is worth 1: 0x4300 is 128 in
bfloat16, 0x6400 is 1024 in float16. FP4 and FP8 codes are shifted into the bit fields of a bfloat16, which gives the
value times 2^-126 or 2^-120 (possibly subnormal); a bfloat16 multiplication restores the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TWICE = 0x00010001  # replicates a 16-bit constant in both halves of a register
_ONE = 0x3F80 * _TWICE  # 1 in bfloat16: below sm_90 the only packed bfloat16 arithmetic is FMA


@triton.constexpr_function
def int4_text(plane: int, zero: int, operand: str) -> str:
    """(nibble `plane`) - zero, exact for zero up to 16: float16 if operand is f16, else bfloat16."""
    if operand == "f16":
        return (
            f"{{ .reg .b32 t, z; shr.u32 t, $1, {4 * plane}; lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA;"
            f" mov.b32 z, {(0x6400 + zero) * _TWICE}; sub.rn.f16x2 $0, t, z; }}"
        )
    return (
        f"{{ .reg .b32 t, o, z; shr.u32 t, $1, {4 * plane}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;"
        f" mov.b32 o, {_ONE}; mov.b32 z, {(0xC300 + zero) * _TWICE}; fma.rn.bf16x2 $0, t, o, z; }}"
    )


@triton.constexpr_function
def int8_text(plane: int) -> str:
    """(byte `plane`) - 128 as bfloat16, exact: (128 + low 7 bits) minus 128 if the top bit is set, else 256."""
    return (
        f"{{ .reg .b32 t, u, o; shr.u32 t, $1, {8 * plane}; lop3.b32 u, t, 0x00800080, 0xC380C380, 0x6A;"
        f" lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA; mov.b32 o, {_ONE}; fma.rn.bf16x2 $0, t, o, u; }}"
    )


@triton.constexpr_function
def e2m1_text(plane: int) -> str:
    """e2m1(nibble `plane`) * 2^-126 as bfloat16."""
    return (
        f"{{ .reg .b32 t, u; shl.b32 t, $1, {12 - 4 * plane}; shr.u32 u, t, 6; and.b32 u, u, 0x01C001C0;"
        " lop3.b32 $0, t, 0x80008000, u, 0xEA; }"
    )


@triton.constexpr_function
def e4m3_text(plane: int) -> str:
    """e4m3(byte `plane`) * 2^-120 as bfloat16."""
    return (
        f"{{ .reg .b32 t, u; shl.b32 t, $1, {8 - 8 * plane}; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0;"
        " lop3.b32 $0, t, 0x80008000, u, 0xEA; }"
    )


@triton.constexpr_function
def _bf16_text(code: str, plane: int) -> str:
    return int8_text(plane) if code == "int8" else e2m1_text(plane) if code == "e2m1" else e4m3_text(plane)


@triton.jit
def int4_pairs(h, PLANE: tl.constexpr, ZERO: tl.constexpr, OPERAND: tl.constexpr):
    """int16 halves -> a plane of nibbles minus ZERO in bfloat16 or float16 (OPERAND bf16 | f16)."""
    if OPERAND == "f16":
        value = tl.inline_asm_elementwise(int4_text(PLANE, ZERO, "f16"), "=r,r", [h], tl.float16, True, 2)
    else:
        value = tl.inline_asm_elementwise(int4_text(PLANE, ZERO, "bf16"), "=r,r", [h], tl.bfloat16, True, 2)
    return value


@triton.jit
def bf16_pairs(h, PLANE: tl.constexpr, CODE: tl.constexpr):
    """int16 halves -> a plane in bfloat16: bytes minus 128, E2M1 values · 2^-126, or E4M3 values · 2^-120."""
    return tl.inline_asm_elementwise(_bf16_text(CODE, PLANE), "=r,r", [h], tl.bfloat16, True, 2)
