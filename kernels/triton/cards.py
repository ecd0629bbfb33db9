"""The cards that kernels are compiled for, and what is known of their classes. No torch, no Triton."""

from __future__ import annotations

from typing import NamedTuple


class CardClass(NamedTuple):
    """All cards of one compute capability."""

    num_sms: int  # streaming multiprocessors, or compute units, of a common one
    shared_bytes: int  # shared memory one program may have
    lanes: int = 32  # threads of a warp


AMD = 900  # from here on a capability is the number of an AMD architecture: 942 for gfx942
# by compute capability as 90, 120; a card between two has what the lower one has
CLASSES = {
    75: CardClass(40, 65_536),
    80: CardClass(108, 166_912),
    86: CardClass(82, 101_376),
    89: CardClass(128, 101_376),
    90: CardClass(132, 232_448),
    100: CardClass(148, 232_448),
    120: CardClass(170, 101_376),
    121: CardClass(48, 101_376),
    942: CardClass(304, 65_536, 64),
    1100: CardClass(96, 65_536),
    1201: CardClass(64, 65_536),
}


def name_of(capability: int) -> str:
    """sm_90, or gfx942."""
    return f"sm_{capability}" if capability < AMD else f"gfx{capability}"


class Card(NamedTuple):
    """One card."""

    capability: int
    num_sms: int

    @property
    def shared_bytes(self) -> int:
        """Of its class."""
        return CLASSES[max(c for c in CLASSES if c <= max(self.capability, min(CLASSES)))].shared_bytes
