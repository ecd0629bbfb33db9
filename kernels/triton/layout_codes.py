"""How wide the codes of `layout` are: data alone, for the packing, for the model of a card and for the launcher."""

from __future__ import annotations

from typing import NamedTuple

HALVES = 8  # 16-bit halves in a chunk of 16 bytes


class Code(NamedTuple):
    """How one kind of code is stored."""

    low: int  # bits in the 16-bit halves
    high: int = 0  # bits in a plane of their own

    @property
    def planes(self) -> int:
        """Elements in a half."""
        return 16 // self.low

    @property
    def chunk(self) -> int:
        """Elements in 16 bytes of halves."""
        return HALVES * self.planes

    @property
    def high_bytes(self) -> int:
        """Bytes of high bits of a chunk."""
        return self.chunk * self.high // 8


CODES = {
    "bf16": Code(16),
    "f16": Code(16),
    "e4m3": Code(8),
    "int8": Code(8),
    "int4": Code(4),
    "e2m1": Code(4),
    "iq4": Code(4),
    "int5": Code(4, 1),
    "int6": Code(4, 2),
    "int2": Code(2),
    "int3": Code(2, 1),
}


def run_of(code: str, group: int) -> int:
    """Halves whose planes follow one another: all eight, or so many that they hold one scale group. 0: no groups."""
    chunk = CODES[code].chunk
    return HALVES if group == 0 or group >= chunk else HALVES * group // chunk
