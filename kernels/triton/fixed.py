"""Sums of four-bit codes times x in whole numbers, for one row: x as 16-bit fixed point, four products an instruction.

A thread owns chunks of 32 elements. It takes x of a chunk times a power of two as 16-bit integers, the largest between
2^14 and 2^15: a bfloat16 that is not more than 2^7 times smaller than the largest of its chunk keeps all its bits, what
is smaller is off by at most 2^-15 of the largest. High and low bytes go apart through `dp4a`, four codes at a time, and
the sums are exact; so is what the codes stand for, four bits being whole numbers (E2M1: halves).

Instructions a weight for sm_90: int4 1.5 and e2m1 2.5 instead of 3 and 4.6 in float32, and 9 for each element of x,
which the eight rows of a program share. Triton's interpreter has no assembly; ASSEMBLY is false there, and the tests
run the assembly below over all codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 1.5 * 2^23: a float32 near it has whole numbers in its last bits, negative ones in two's complement
MAGIC = tl.constexpr(12582912.0)
# (2 * 127 + 14) << 23 as int32: less the exponent of a number, the power of two that makes it 2^14 and more
UNITS = tl.constexpr(-2046820352)
E2M1_OFFSET = tl.constexpr(192)  # makes all of twice an E2M1 number, -12 to 12, bytes whose top bit is set
# 192 and twice the magnitude, by the three bits of the code; and less it
E2M1_TABLES = (0xC3C2C1C0, 0xCCC8C6C4, 0xBDBEBFC0, 0xB4B8BABC)


@triton.constexpr_function
def dot_text(signed: bool) -> str:
    """$3 and the four unsigned bytes of $1 times those of $2, which are signed or not."""
    return f"dp4a.u32.{'s32' if signed else 'u32'} $0, $1, $2, $3;"


@triton.constexpr_function
def gather_text(place: int) -> str:
    """Byte `place` of four words as one word, the first lowest."""
    pick = 0x0040 + 0x11 * place
    return f"{{ .reg .b32 t, u; prmt.b32 t, $1, $2, {pick}; prmt.b32 u, $3, $4, {pick}; prmt.b32 $0, t, u, 0x5410; }}"


@triton.constexpr_function
def e2m1_bytes_text(part: int) -> str:
    """The four codes of half `part` of a word ($1) as unsigned bytes: 192 + twice the number; $2 to $5: `E2M1_TABLES`.

    `prmt` picks a byte by three bits and, where the fourth is set, repeats its top bit instead, which makes 255: of
    the table for each sign one is 255, and the other what is left by an AND.
    """
    return (
        f"{{ .reg .b32 t, u, a; shr.u32 t, $1, {16 * part}; xor.b32 u, t, 0x8888;"
        " prmt.b32 a, $2, $3, t; prmt.b32 u, $4, $5, u; and.b32 $0, a, u; }"
    )


@triton.constexpr_function
def table_text(index: int) -> str:
    """One of `E2M1_TABLES` that the compiler takes for a variable, one bit being never below itself.

    `prmt` wants it in a register. As a constant it is copied into one anew for each, a tenth of all instructions.
    """
    return (
        "{ .reg .b32 t, u; mov.u32 t, %lanemask_eq; mov.u32 u, %lanemask_lt; and.b32 t, t, u;"
        f" or.b32 $0, t, {E2M1_TABLES[index]}; }}"
    )


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gathered(a, b, c, d, PLACE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Byte PLACE of four int32 as one int32, the first lowest."""
    if ASSEMBLY:
        word = tl.inline_asm_elementwise(gather_text(PLACE), "=r,r,r,r,r", [a, b, c, d], tl.int32, True, 1)
    else:
        at: tl.constexpr = 8 * PLACE
        word = (a >> at) & 255 | ((b >> at) & 255) << 8 | ((c >> at) & 255) << 16 | ((d >> at) & 255) << 24
    return word


@triton.jit
def _dot(codes, x, c, SIGNED: tl.constexpr, ASSEMBLY: tl.constexpr):
    """c + the four unsigned bytes of `codes` times those of x, all int32."""
    if ASSEMBLY:
        c = tl.inline_asm_elementwise(dot_text(SIGNED), "=r,r,r,r", [codes, x, c], tl.int32, True, 1)
    else:
        for i in tl.static_range(4):
            byte = (x << (24 - 8 * i)) >> 24 if SIGNED else (x >> (8 * i)) & 255
            c = c + ((codes >> (8 * i)) & 255) * byte
    return c


@triton.jit
def _table(like, INDEX: tl.constexpr, ASSEMBLY: tl.constexpr):
    """One of `E2M1_TABLES`, int32 [1, CHUNKS, 1]; where there is no assembly, what nobody reads."""
    table = like
    if ASSEMBLY:
        table = tl.inline_asm_elementwise(table_text(INDEX), "=r,r", [like], tl.int32, True, 1)
    return table[None, :, None]


@triton.jit
def _code_bytes(w, tables, PART: tl.constexpr, CODE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Four of the eight codes of each word as unsigned bytes.

    int4   PART 0: planes 0 and 2 of the first half, then of the second; PART 1: planes 1 and 3
    e2m1   planes 0 to 3 of half PART; 192 + twice the number
    """
    if CODE == "int4":
        codes = (w >> (4 * PART)) & 0x0F0F0F0F
    elif ASSEMBLY:
        given = [w, tables[0], tables[1], tables[2], tables[3]]
        codes = tl.inline_asm_elementwise(e2m1_bytes_text(PART), "=r,r,r,r,r,r", given, tl.int32, True, 1)
    else:
        codes = w & 0
        for i in tl.static_range(4):
            code = (w >> (16 * PART + 4 * i)) & 15
            size = code & 7
            size = tl.where(size < 4, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0))
            codes |= (192 + tl.where(code < 8, size, -size)) << (8 * i)
    return codes


@triton.jit
def _whole(x, up):
    """int32 whose low 16 bits are x * up, rounded."""
    return (x * up[:, None] + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def _halves(x, up, CHUNKS: tl.constexpr):
    """`_whole`, those of even and of odd halves: int32 [CHUNKS, 4] each."""
    return tl.split(tl.reshape(_whole(x, up), (CHUNKS, 4, 2)))


@triton.jit
def _words(x, CHUNKS: tl.constexpr):
    """[CHUNKS, 4] -> words 0 and 2, and 1 and 3: [1, CHUNKS, 2] each."""
    even, odd = tl.split(tl.reshape(x, (CHUNKS, 2, 2)))
    return even[None, :, :], odd[None, :, :]


@triton.jit
def _sums(
    even, odd, tables, x_a, x_b, less, CODE: tl.constexpr, CHUNKS: tl.constexpr, SIGNED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Codes of words 0, 2 and 1, 3 [ROWS, CHUNKS, 2] times bytes of x [CHUNKS, 4]; minus `less`: [ROWS, CHUNKS, 2]."""
    a_even, a_odd = _words(x_a, CHUNKS)
    b_even, b_odd = _words(x_b, CHUNKS)
    less_even, less_odd = _words(less, CHUNKS)
    total = tl.zeros_like(even) - (less_even + less_odd)
    total = _dot(_code_bytes(even, tables, 0, CODE, ASSEMBLY), a_even, total, SIGNED, ASSEMBLY)
    total = _dot(_code_bytes(even, tables, 1, CODE, ASSEMBLY), b_even, total, SIGNED, ASSEMBLY)
    total = _dot(_code_bytes(odd, tables, 0, CODE, ASSEMBLY), a_odd, total, SIGNED, ASSEMBLY)
    return _dot(_code_bytes(odd, tables, 1, CODE, ASSEMBLY), b_odd, total, SIGNED, ASSEMBLY)


@triton.jit
def fixed_part(
    w, x0, x1, x2, x3, ROWS: tl.constexpr, CHUNKS: tl.constexpr, RUNS: tl.constexpr, CODE: tl.constexpr,
    ZERO: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Σ (code - ZERO) * x of each run, float32 [ROWS, CHUNKS, RUNS], and Σ x of each run, [CHUNKS, RUNS]; RUNS 1 or 2.

    w        int32 [ROWS, CHUNKS, 4], of int4 or e2m1 codes        x0..3   float32 [CHUNKS, 8], plane by plane

    NaN for a chunk of x that is not finite.
    """
    top = _largest(_largest(tl.abs(x0), tl.abs(x1)), _largest(tl.abs(x2), tl.abs(x3)))
    top = tl.reduce(top, 1, _largest)
    # a little more, so that what float32 holds beyond 15 bits does not round up to 2^15; zeros stay zeros
    power = (_largest(top, 1e-30) * 1.0001).to(tl.int32, bitcast=True) & 0x7F800000
    up = (0 - power + UNITS).to(tl.float32, bitcast=True)
    unit = (power - (14 << 23)).to(tl.float32, bitcast=True) + top * 0.0
    e0, o0 = _halves(x0, up, CHUNKS)
    e1, o1 = _halves(x1, up, CHUNKS)
    e2, o2 = _halves(x2, up, CHUNKS)
    e3, o3 = _halves(x3, up, CHUNKS)
    if CODE == "int4":
        low_a, high_a = _gathered(e0, e2, o0, o2, 0, ASSEMBLY), _gathered(e0, e2, o0, o2, 1, ASSEMBLY)
        low_b, high_b = _gathered(e1, e3, o1, o3, 0, ASSEMBLY), _gathered(e1, e3, o1, o3, 1, ASSEMBLY)
        offset: tl.constexpr = ZERO
        factor: tl.constexpr = 1.0
    else:
        low_a, high_a = _gathered(e0, e1, e2, e3, 0, ASSEMBLY), _gathered(e0, e1, e2, e3, 1, ASSEMBLY)
        low_b, high_b = _gathered(o0, o1, o2, o3, 0, ASSEMBLY), _gathered(o0, o1, o2, o3, 1, ASSEMBLY)
        offset: tl.constexpr = E2M1_OFFSET
        factor: tl.constexpr = 0.5
    none = tl.zeros((CHUNKS, 4), tl.int32)
    ones = none + 0x01010101
    x_low = _dot(ones, low_b, _dot(ones, low_a, none, False, ASSEMBLY), False, ASSEMBLY)
    x_high = _dot(ones, high_b, _dot(ones, high_a, none, True, ASSEMBLY), True, ASSEMBLY)

    even, odd = tl.split(tl.reshape(w, (ROWS, CHUNKS, 2, 2)))
    tables = (
        _table(power, 0, ASSEMBLY), _table(power, 1, ASSEMBLY), _table(power, 2, ASSEMBLY), _table(power, 3, ASSEMBLY),
    )  # fmt: skip
    low = _sums(even, odd, tables, low_a, low_b, x_low * offset, CODE, CHUNKS, False, ASSEMBLY)
    high = _sums(even, odd, tables, high_a, high_b, x_high * offset, CODE, CHUNKS, True, ASSEMBLY)
    total = tl.sum(tl.reshape(high * 256 + low, (ROWS, CHUNKS, RUNS, 2 // RUNS)), 3)
    x_total = tl.sum(tl.reshape(x_high * 256 + x_low, (CHUNKS, RUNS, 4 // RUNS)), 2)
    part = total.to(tl.float32) * (unit * factor)[None, :, None]
    return part, x_total.to(tl.float32) * unit[:, None]
