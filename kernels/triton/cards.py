"""The NVIDIA cards that kernels are compiled for, and what is known of their classes. No torch, no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class CardClass(NamedTuple):
    """All cards of one compute capability.

    num_sms       streaming multiprocessors of a common one
    shared_bytes  shared memory one program may have
    threads       resident threads of a multiprocessor
    bytes_per_us  share of the memory bandwidth of one multiprocessor, of the fastest common card
    """

    num_sms: int
    shared_bytes: int
    threads: int
    bytes_per_us: float


# by compute capability as 90, 120; a card between two has what the lower one has
CLASSES = {
    75: CardClass(40, 65_536, 1024, 8e3),
    80: CardClass(108, 166_912, 2048, 18e3),
    86: CardClass(82, 101_376, 1536, 11e3),
    89: CardClass(128, 101_376, 1536, 8e3),
    90: CardClass(132, 232_448, 2048, 25e3),
    100: CardClass(148, 232_448, 2048, 54e3),
    120: CardClass(170, 101_376, 1536, 10.5e3),
    121: CardClass(48, 101_376, 1536, 5.7e3),
}


@dataclass(frozen=True, slots=True)
class Card:
    """One card."""

    capability: int
    num_sms: int

    @property
    def known(self) -> CardClass:
        """Its class."""
        return CLASSES[max(c for c in CLASSES if c <= max(self.capability, min(CLASSES)))]


def ceil_power(number: int) -> int:
    """The next power of two, for tiles."""
    return 1 << max(number - 1, 0).bit_length()
