"""Integer GEMV of 4-bit codes with 16-bit fixed-point activations: `dp4a`, four products per instruction.

A thread owns chunks of 32 elements of W and reads the chunks of x that `digits.py` wrote. `dp4a` multiplies four codes
at a time by the low bytes of x and by the high bytes separately. The sums are exact, and so are the code values: 4-bit
codes are integers, E2M1 values multiples of one half.

It takes half the instructions per weight of the float32 path (benchmarks/results/gpu-instructions.json). Triton's
interpreter has no inline assembly, so ASSEMBLY is false there; the tests run the assembly below over all codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

E2M1_OFFSET = tl.constexpr(192)  # added to twice an E2M1 value (-12 to 12), gives a byte with the top bit set
# bytes 192 + 2 |v| by the three magnitude bits (two words), and 192 - 2 |v| (two words)
E2M1_TABLES = (0xC3C2C1C0, 0xCCC8C6C4, 0xBDBEBFC0, 0xB4B8BABC)


@triton.constexpr_function
def dot_text(signed: bool) -> str:
    """$0 = $3 + dot product of the four unsigned bytes of $1 and the (un)signed bytes of $2."""
    return f"dp4a.u32.{'s32' if signed else 'u32'} $0, $1, $2, $3;"


@triton.constexpr_function
def gather_text(place: int) -> str:
    """$0 = byte `place` of each of four words, the first word's lowest."""
    pick = 0x0040 + 0x11 * place
    return f"{{ .reg .b32 t, u; prmt.b32 t, $1, $2, {pick}; prmt.b32 u, $3, $4, {pick}; prmt.b32 $0, t, u, 0x5410; }}"


@triton.constexpr_function
def e2m1_bytes_text(part: int) -> str:
    """The four codes of half `part` of word $1 as unsigned bytes 192 + 2 · value; $2 to $5 are `E2M1_TABLES`.

    `prmt` selects a byte by three bits; if the fourth bit is set it replicates the byte's sign bit instead, giving 255.
    So the lookup in the table of the wrong sign gives 255, and an AND of both lookups leaves the right one.
    """
    return (
        f"{{ .reg .b32 t, u, a; shr.u32 t, $1, {16 * part}; xor.b32 u, t, 0x8888;"
        " prmt.b32 a, $2, $3, t; prmt.b32 u, $4, $5, u; and.b32 $0, a, u; }"
    )


@triton.constexpr_function
def table_text(index: int) -> str:
    """Load one of `E2M1_TABLES` in a way the compiler cannot fold: lanemask_eq & lanemask_lt is always 0.

    `prmt` needs the table in a register. A known constant is copied into one for each use, a tenth of all instructions.
    """
    return (
        "{ .reg .b32 t, u; mov.u32 t, %lanemask_eq; mov.u32 u, %lanemask_lt; and.b32 t, t, u;"
        f" or.b32 $0, t, {E2M1_TABLES[index]}; }}"
    )


@triton.jit
def largest(a, b):
    """Maximum that propagates NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gathered(a, b, c, d, PLACE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Byte PLACE of each of four int32 as one int32, the first operand's lowest."""
    if ASSEMBLY:
        word = tl.inline_asm_elementwise(gather_text(PLACE), "=r,r,r,r,r", [a, b, c, d], tl.int32, True, 1)
    else:
        at: tl.constexpr = 8 * PLACE
        word = (a >> at) & 255 | ((b >> at) & 255) << 8 | ((c >> at) & 255) << 16 | ((d >> at) & 255) << 24
    return word


@triton.jit
def dot(codes, x, c, SIGNED: tl.constexpr, ASSEMBLY: tl.constexpr):
    """c + dot product of the four unsigned bytes of `codes` and the four bytes of x, all int32 (`dp4a`)."""
    if ASSEMBLY:
        c = tl.inline_asm_elementwise(dot_text(SIGNED), "=r,r,r,r", [codes, x, c], tl.int32, True, 1)
    else:
        for i in tl.static_range(4):
            byte = (x << (24 - 8 * i)) >> 24 if SIGNED else (x >> (8 * i)) & 255
            c = c + ((codes >> (8 * i)) & 255) * byte
    return c


@triton.jit
def _table(like, INDEX: tl.constexpr, ASSEMBLY: tl.constexpr):
    """One of `E2M1_TABLES`, int32 [1, CHUNKS]; without assembly a placeholder that is not read."""
    table = like
    if ASSEMBLY:
        table = tl.inline_asm_elementwise(table_text(INDEX), "=r,r", [like], tl.int32, True, 1)
    return table[None, :]


@triton.jit
def _code_bytes(w, tables, PART: tl.constexpr, CODE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Four of the eight codes of each word as unsigned bytes.

    int4   PART 0: planes 0 and 2 of the first half, then of the second; PART 1: planes 1 and 3
    e2m1   planes 0 to 3 of half PART, as 192 + 2 · value
    """
    if CODE == "int4":
        codes = (w >> (4 * PART)) & 0x0F0F0F0F
    elif ASSEMBLY:
        operands = [w, tables[0], tables[1], tables[2], tables[3]]
        codes = tl.inline_asm_elementwise(e2m1_bytes_text(PART), "=r,r,r,r,r,r", operands, tl.int32, True, 1)
    else:
        codes = w & 0
        for i in tl.static_range(4):
            code = (w >> (16 * PART + 4 * i)) & 15
            size = code & 7
            size = tl.where(size < 4, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0))
            codes |= (192 + tl.where(code < 8, size, -size)) << (8 * i)
    return codes


@triton.jit
def _four(t):
    """Split [.., 4] into its four columns."""
    even, odd = tl.split(tl.reshape(t, (t.shape[0], t.shape[1], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _sum(words, bytes_a, bytes_b, tables, start, CODE: tl.constexpr, SIGNED: tl.constexpr, ASSEMBLY: tl.constexpr):
    """start + dot products of codes and bytes of x: tuples of [ROWS, CHUNKS] and [1, CHUNKS] -> [ROWS, CHUNKS]."""
    total = start
    for i in tl.static_range(len(words)):
        total = dot(_code_bytes(words[i], tables, 0, CODE, ASSEMBLY), bytes_a[i], total, SIGNED, ASSEMBLY)
        total = dot(_code_bytes(words[i], tables, 1, CODE, ASSEMBLY), bytes_b[i], total, SIGNED, ASSEMBLY)
    return total


@triton.jit
def _run(words, low_a, low_b, high_a, high_b, tables, less, CODE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Dot products over one run of halves minus `less` [1, CHUNKS]: int32 [ROWS, CHUNKS]."""
    none = words[0] & 0
    low = _sum(words, low_a, low_b, tables, none - less, CODE, False, ASSEMBLY)
    high = _sum(words, high_a, high_b, tables, none, CODE, True, ASSEMBLY)
    return high * 256 + low


@triton.jit
def fixed_part(
    w, x_ptr, first, C: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, RUNS: tl.constexpr, CODE: tl.constexpr,
    ZERO: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Σ (code - ZERO) * x of each run, float32 [ROWS, CHUNKS, RUNS], and Σ x of each run, [CHUNKS, RUNS]; RUNS 1 or 2.

    w   int32 [ROWS, CHUNKS, 4], int4 or e2m1 codes of chunks first..         x_ptr   output of `digits.digits_kernel`
    """
    chunk = first + tl.arange(0, CHUNKS)
    word = first * 4 + tl.arange(0, 4 * CHUNKS)[None, :]
    inside = word < 4 * C
    la0, la1, la2, la3 = _four(tl.reshape(tl.load(x_ptr + word, mask=inside, other=0), (1, CHUNKS, 4)))
    lb0, lb1, lb2, lb3 = _four(tl.reshape(tl.load(x_ptr + 4 * C + word, mask=inside, other=0), (1, CHUNKS, 4)))
    ha0, ha1, ha2, ha3 = _four(tl.reshape(tl.load(x_ptr + 8 * C + word, mask=inside, other=0), (1, CHUNKS, 4)))
    hb0, hb1, hb2, hb3 = _four(tl.reshape(tl.load(x_ptr + 12 * C + word, mask=inside, other=0), (1, CHUNKS, 4)))
    unit = tl.load(x_ptr + 16 * C + chunk, mask=chunk < C, other=0).to(tl.float32, bitcast=True)
    place = (chunk * RUNS)[:, None] + tl.arange(0, RUNS)[None, :]
    sums = tl.load(x_ptr + 17 * C + place, mask=(chunk < C)[:, None], other=0)
    offset: tl.constexpr = ZERO if CODE == "int4" else E2M1_OFFSET
    factor: tl.constexpr = 1.0 if CODE == "int4" else 0.5
    w0, w1, w2, w3 = _four(w)
    tables = (
        _table(chunk, 0, ASSEMBLY), _table(chunk, 1, ASSEMBLY), _table(chunk, 2, ASSEMBLY), _table(chunk, 3, ASSEMBLY),
    )  # fmt: skip
    if RUNS == 1:
        less = tl.reshape(sums, (1, CHUNKS)) * offset
        words, low_a, low_b = (w0, w1, w2, w3), (la0, la1, la2, la3), (lb0, lb1, lb2, lb3)
        total = _run(words, low_a, low_b, (ha0, ha1, ha2, ha3), (hb0, hb1, hb2, hb3), tables, less, CODE, ASSEMBLY)
        total = total[:, :, None]
    else:
        less_0, less_1 = tl.split(sums[None] * offset)
        one = _run((w0, w1), (la0, la1), (lb0, lb1), (ha0, ha1), (hb0, hb1), tables, less_0, CODE, ASSEMBLY)
        two = _run((w2, w3), (la2, la3), (lb2, lb3), (ha2, ha3), (hb2, hb3), tables, less_1, CODE, ASSEMBLY)
        total = tl.join(one, two)
    part = total.to(tl.float32) * (unit * factor)[None, :, None]
    return part, sums.to(tl.float32) * unit[:, None]
