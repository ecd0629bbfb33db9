"""Decoding of the codes and scales of `layout.Prepared` inside kernels, with integer operations only.

Uses no E4M3 type and no lookup tables in memory, so the same instructions run on every GPU. Code bits masked in place
and read as float32 are the value times a power of two (possibly subnormal); that factor is folded into the activation
and into the end of the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

E2M1_MASK = tl.constexpr(-0x7E400000)  # 0x81C00000: sign, and three bits from bit 22: e2m1 value · 2^-126
E4M3_MASK = tl.constexpr(-0x78100000)  # 0x87F00000: sign, and seven bits from bit 20: e4m3 value · 2^-120
MAGIC = tl.constexpr(0x4B000000)  # 2^23: ORing an integer q < 2^23 into the mantissa gives 2^23 + q
IQ4_WORDS = (tl.constexpr(-1079142271), tl.constexpr(-152379953), tl.constexpr(639175937), tl.constexpr(1901675829))
IQ4_A, IQ4_B, IQ4_C, IQ4_D = IQ4_WORDS


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _field(w, x, POS: tl.constexpr, BITS: tl.constexpr, UP: tl.constexpr):
    """(bits POS.. of the words) * x * 2^(UP - 74); bits in place, read as float32, are worth 2^(position - 149)."""
    if POS + BITS <= 24:
        value = _as_float(w & (((1 << BITS) - 1) << POS)) * (x * (2.0 ** (75 + UP - POS)))
    else:
        value = _as_float((w >> 8) & (((1 << BITS) - 1) << (POS - 8))) * (x * (2.0 ** (83 + UP - POS)))
    return value


@triton.jit
def _iq4(code):
    """int32 codes 0..15 -> float32 values of the IQ4 table, which is packed in four words."""
    low = tl.where((code & 4) == 0, IQ4_A, IQ4_B)
    high = tl.where((code & 4) == 0, IQ4_C, IQ4_D)
    word = tl.where((code & 8) == 0, low, high)
    return ((word << (24 - 8 * (code & 3))) >> 24).to(tl.float32)


@triton.jit
def add_part(
    p, w, high, x, PLANE: tl.constexpr, HALF: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):
    """p + (values of one plane in one half of the words) * x / end_factor(CODE).

    w     int32, two halves per word        high  int32, high bits of these two halves
    x     float32, broadcast over the words
    """
    if CODE == "bf16":
        if HALF == 0:
            p += _as_float(w << 16) * x
        else:
            p += _as_float(w & -65536) * x
    elif CODE == "f16":
        p += (w >> (16 * HALF)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * x
    elif CODE == "e4m3":
        p += _as_float(((w << (24 - 8 * PLANE - 16 * HALF)) >> 4) & E4M3_MASK) * (x * (2.0**60))
    elif CODE == "e2m1":
        p += _as_float(((w << (28 - 4 * PLANE - 16 * HALF)) >> 6) & E2M1_MASK) * (x * (2.0**63))
    elif CODE == "iq4":
        p += _iq4((w >> (4 * PLANE + 16 * HALF)) & 15) * x
    else:
        p += _field(w, x, LOW * PLANE + 16 * HALF, LOW, 0)
        if HIGH > 0:
            p += _field(high, x, HIGH * PLANE + (4 if CODE == "int5" else 8) * HALF, HIGH, LOW)
    return p


@triton.jit
def end_factor(CODE: tl.constexpr):
    """The factor for a finished sum of `add_part`."""
    if CODE == "bf16" or CODE == "f16" or CODE == "iq4":
        factor: tl.constexpr = 1.0
    elif CODE == "e4m3":
        factor: tl.constexpr = 2.0**60
    elif CODE == "e2m1":
        factor: tl.constexpr = 2.0**63
    else:
        factor: tl.constexpr = 2.0**74
    return factor


@triton.jit
def load_high(high_ptr, row, half, H: tl.constexpr, CODE: tl.constexpr, HIGH: tl.constexpr):
    """Load the high bits of halves [HALVES] of rows [ROWS], int32 [ROWS, HALVES]; 0 if the code has none."""
    inside = (half < H)[None, :]
    if HIGH == 0:
        high = 0
    elif CODE == "int5":
        shared = tl.load(high_ptr + (row * (H // 2))[:, None] + (half // 2)[None, :], mask=inside, other=0)
        high = shared.to(tl.int32) >> (4 * (half % 2))[None, :]
    else:
        high = tl.load(high_ptr + (row * H)[:, None] + half[None, :], mask=inside, other=0).to(tl.int32)
    return high


@triton.jit
def half_value(h, high, plane, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr):
    """float32 values of a plane of halves (int32, upper 16 bits ignored) minus ZERO; exact.

    plane   a constant, or one per half
    """
    if CODE == "bf16":
        value = _as_float(h << 16)
    elif CODE == "f16":
        value = h.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif CODE == "e4m3":
        value = _as_float(((h << (24 - 8 * plane)) >> 4) & E4M3_MASK) * (2.0**120)
    elif CODE == "e2m1":
        value = _as_float(((h << (28 - 4 * plane)) >> 6) & E2M1_MASK) * (2.0**126)
    elif CODE == "iq4":
        value = _iq4((h >> (4 * plane)) & 15)
    else:
        q = (h >> (LOW * plane)) & ((1 << LOW) - 1)
        if HIGH > 0:
            q |= ((high >> (HIGH * plane)) & ((1 << HIGH) - 1)) << LOW
        value = _as_float(q | MAGIC) - (8388608.0 + ZERO)
    return value


@triton.jit
def e4m3_value(bits):
    """E4M3 bytes in int32 -> float32, exact; NaN becomes 480."""
    return _as_float(((bits << 24) >> 4) & E4M3_MASK) * (2.0**120)


@triton.jit
def e8m0_value(bits):
    """E8M0 bytes e in int32 -> 2^(e - 127) in float32, exact."""
    return _as_float(tl.where(bits == 0, 0x00400000, bits << 23))


@triton.jit
def group_scale(scale_ptr, super_ptr, index, super_index, mask, KIND: tl.constexpr):
    """float32 group scales at `index`, times super-block scales at `super_index`; 0 outside the mask."""
    stored = tl.load(scale_ptr + index, mask=mask, other=0)
    if KIND == "e4m3":
        scale = e4m3_value(stored.to(tl.int32))
    elif KIND == "e8m0":
        scale = e8m0_value(stored.to(tl.int32))
    elif KIND == "sub":
        scale = stored.to(tl.float32) * tl.load(super_ptr + super_index, mask=mask, other=0.0).to(tl.float32)
    elif KIND == "nibble":
        parent = tl.load(super_ptr + super_index, mask=mask, other=0.0).to(tl.float32)
        scale = (stored.to(tl.int32) & 15).to(tl.float32) * parent
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def group_min(min_ptr, scale_ptr, super_ptr, index, super_index, mask, scale, KIND: tl.constexpr):
    """The offset of a group's values, float32: the minimum, or -scale · zero."""
    if KIND == "nibble":
        stored = tl.load(scale_ptr + index, mask=mask, other=0).to(tl.int32) >> 4
        parent = tl.load(super_ptr + super_index, mask=mask, other=0.0).to(tl.float32)
        value = -stored.to(tl.float32) * parent
    elif KIND == "sub":
        parent = tl.load(super_ptr + super_index, mask=mask, other=0.0).to(tl.float32)
        value = -tl.load(min_ptr + index, mask=mask, other=0).to(tl.float32) * parent
    elif KIND == "zero":
        value = -tl.load(min_ptr + index, mask=mask, other=0).to(tl.float32) * scale
    else:
        value = tl.load(min_ptr + index, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def spread(groups, ROWS: tl.constexpr, HALVES: tl.constexpr, RUN: tl.constexpr):
    """Repeat per-run values [ROWS, HALVES / RUN] for each half -> [ROWS, HALVES]."""
    return tl.reshape(tl.broadcast_to(groups[:, :, None], (ROWS, HALVES // RUN, RUN)), (ROWS, HALVES))


@triton.jit
def group_terms(
    scale_ptr, min_ptr, super_ptr, super_min_ptr, row, first_half, K: tl.constexpr, PLANES: tl.constexpr,
    SCALE: tl.constexpr, MIN: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SCALE_ROWS: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Scales and offsets of the groups of a tile: two float32 [ROWS, HALVES / RUN].

    row   int64 [ROWS]       first_half   the tile's first half, a multiple of 8
    """
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    SUPERS: tl.constexpr = K // 256
    first_k = (first_half + tl.arange(0, HALVES // RUN) * RUN) * PLANES
    index = (row // SCALE_ROWS * GROUPS)[:, None] + (first_k // GROUP)[None, :]
    above = (row * SUPERS)[:, None] + (first_k // 256)[None, :]
    ok = (first_k < K)[None, :]
    scale = group_scale(scale_ptr, super_ptr, index, above, ok, SCALE)
    if MIN != "none":
        least = group_min(min_ptr, scale_ptr, super_min_ptr, index, above, ok, scale, MIN)
    else:
        least = scale
    return scale, least
