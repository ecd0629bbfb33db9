"""GPU architectures that kernels are compiled for, and their properties. Imports neither torch nor Triton."""

from __future__ import annotations

from typing import NamedTuple


class CardClass(NamedTuple):
    """GPUs of one compute capability."""

    num_sms: int  # streaming multiprocessors, or compute units, of a typical one
    shared_bytes: int  # maximum shared memory per program
    lanes: int = 32  # threads per warp


AMD = 900  # capabilities from here on are AMD architectures: 942 for gfx942
# by compute capability; GPUs not listed use the next lower entry
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
    """Name of a capability: sm_90 or gfx942."""
    return f"sm_{capability}" if capability < AMD else f"gfx{capability}"


class Card(NamedTuple):
    """One GPU."""

    capability: int
    num_sms: int

    @property
    def family(self) -> int:
        """The capability that tiles are chosen for: 10.3 and 11.0 have the tensor memory of 10.0."""
        return 100 if 100 <= self.capability < 120 else self.capability

    @property
    def shared_bytes(self) -> int:
        """Maximum shared memory per program, from its class."""
        return CLASSES[max(c for c in CLASSES if c <= max(self.capability, min(CLASSES)))].shared_bytes
