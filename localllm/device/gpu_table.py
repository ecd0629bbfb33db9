"""NVIDIA GPUs by the name the driver gives: for cards whose driver does not tell, and for cards that are not here.

As published by NVIDIA. The first pattern that is found wins, so longer names stand before shorter ones. Sizes and
bandwidth that the driver tells at run time count more than this table.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class GpuModel(NamedTuple):
    """One row: what a card of this name has."""

    pattern: str  # a regular expression, found anywhere in the driver's name whatever the case
    name: str  # as one would type it
    capability: int  # 89 for 8.9
    memory_gib: float  # its memory, or the smallest it is sold with
    bandwidth_gbs: float  # GB/s
    knee_w: int = 0  # power limit below which decoding slows down by more than 5 %, where somebody measured it; else 0


_ROWS: tuple[tuple[str, str, int, float, float] | tuple[str, str, int, float, float, int], ...] = (
    (r"GB10", "GB10", 121, 121.7, 273),
    (r"Thor", "Thor", 110, 122, 273),
    (r"Orin", "Orin", 87, 61, 204),
    (r"B300", "B300", 103, 268, 8000),
    (r"B200", "B200", 100, 180, 8000),
    (r"H200", "H200", 90, 141, 4800),
    (r"H100.*PCIe", "H100 PCIe", 90, 80, 2039),
    (r"H100", "H100", 90, 80, 3350),
    (r"A100.*80GB.*PCIe|A100.*PCIe.*80GB", "A100 80GB PCIe", 80, 80, 1935),
    (r"A100.*80GB", "A100 80GB", 80, 80, 2039),
    (r"A100", "A100", 80, 40, 1555),
    (r"\bA30\b", "A30", 80, 24, 933),
    (r"L40", "L40S", 89, 48, 864),
    (r"\bL4\b", "L4", 89, 24, 300),
    (r"\bA40\b", "A40", 86, 48, 696),
    (r"\bA10\b", "A10", 86, 24, 600),
    (r"\bT4\b", "T4", 75, 16, 320),
    (r"RTX PRO 6000.*Server", "RTX PRO 6000 Server", 120, 96, 1597),
    (r"RTX PRO 6000", "RTX PRO 6000", 120, 96, 1792),
    (r"RTX PRO 5000", "RTX PRO 5000", 120, 48, 1344),
    (r"RTX PRO 4500", "RTX PRO 4500", 120, 32, 896),
    (r"RTX PRO 4000", "RTX PRO 4000", 120, 24, 672),
    (r"RTX PRO 2000", "RTX PRO 2000", 120, 16, 288),
    (r"RTX A6000", "RTX A6000", 86, 48, 768),
    (r"RTX A5000", "RTX A5000", 86, 24, 768),
    (r"RTX A4000", "RTX A4000", 86, 16, 448),
    (r"RTX 6000 Ada", "RTX 6000 Ada", 89, 48, 960),
    (r"RTX 5000 Ada", "RTX 5000 Ada", 89, 32, 576),
    (r"Quadro RTX 8000", "Quadro RTX 8000", 75, 48, 672),
    (r"TITAN RTX", "TITAN RTX", 75, 24, 672),
    (r"5090.*Laptop", "RTX 5090 Laptop", 120, 24, 896),
    (r"RTX 5090", "RTX 5090", 120, 32, 1792, 400),
    (r"RTX 5080", "RTX 5080", 120, 16, 960),
    (r"RTX 5070 Ti", "RTX 5070 Ti", 120, 16, 896),
    (r"RTX 5070", "RTX 5070", 120, 12, 672),
    (r"RTX 5060 Ti", "RTX 5060 Ti", 120, 8, 448),
    (r"RTX 5060", "RTX 5060", 120, 8, 448),
    (r"RTX 5050", "RTX 5050", 120, 8, 320),
    (r"RTX 4090", "RTX 4090", 89, 24, 1008, 260),
    (r"RTX 4080 SUPER", "RTX 4080 SUPER", 89, 16, 736),
    (r"RTX 4080", "RTX 4080", 89, 16, 717),
    (r"RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER", 89, 16, 672),
    (r"RTX 4070 Ti", "RTX 4070 Ti", 89, 12, 504),
    (r"RTX 4070 SUPER", "RTX 4070 SUPER", 89, 12, 504),
    (r"RTX 4070", "RTX 4070", 89, 12, 504),
    (r"RTX 4060 Ti", "RTX 4060 Ti", 89, 8, 288),
    (r"RTX 4060", "RTX 4060", 89, 8, 272),
    (r"RTX 3090 Ti", "RTX 3090 Ti", 86, 24, 1008),
    (r"RTX 3090", "RTX 3090", 86, 24, 936, 290),
    (r"RTX 3080 Ti", "RTX 3080 Ti", 86, 12, 912),
    (r"RTX 3080", "RTX 3080", 86, 10, 760),
    (r"RTX 3070 Ti", "RTX 3070 Ti", 86, 8, 608),
    (r"RTX 3070", "RTX 3070", 86, 8, 448),
    (r"RTX 3060 Ti", "RTX 3060 Ti", 86, 8, 448),
    (r"RTX 3060", "RTX 3060", 86, 12, 360),
    (r"RTX 2080 Ti", "RTX 2080 Ti", 75, 11, 616),
    (r"RTX 2080 SUPER", "RTX 2080 SUPER", 75, 8, 496),
    (r"RTX 2080", "RTX 2080", 75, 8, 448),
    (r"RTX 2070", "RTX 2070", 75, 8, 448),
    (r"RTX 2060", "RTX 2060", 75, 6, 336),
    (r"GTX 16[56]0", "GTX 1660", 75, 4, 128),
)
TABLE = tuple(GpuModel(*row) for row in _ROWS)


class Generation(NamedTuple):
    """What cards of a compute capability, and of later ones up to the next row, need and have."""

    capability: int
    min_driver: int  # oldest Linux driver branch for it
    min_cuda: str  # oldest CUDA whose builds hold code for it
    shared_bytes: int  # most shared memory of a block


_GENERATIONS = (
    Generation(121, 580, "12.9", 101_376),
    Generation(120, 570, "12.8", 101_376),
    Generation(110, 580, "13.0", 232_448),
    Generation(103, 575, "12.9", 232_448),
    Generation(100, 570, "12.8", 232_448),
    Generation(90, 525, "11.8", 232_448),
    Generation(89, 520, "11.8", 101_376),
    Generation(87, 450, "11.1", 166_912),
    Generation(86, 450, "11.1", 101_376),
    Generation(80, 450, "11.0", 166_912),
    Generation(75, 418, "10.0", 65_536),
    Generation(0, 0, "", 0),
)


def _generation(capability: int) -> Generation:
    return next(row for row in _GENERATIONS if capability >= row.capability)


def table_bandwidth(name: str) -> float:
    """Bytes per second of a card by the driver's name, 0.0 when it is not in the table."""
    found = table_row(name)
    return found.bandwidth_gbs * 1e9 if found else 0.0


def table_row(name: str) -> GpuModel | None:
    """The row of a card by the driver's name."""
    return next((row for row in TABLE if re.search(row.pattern, name, re.IGNORECASE)), None)


def named_gpu(text: str) -> GpuModel | None:
    """The row that somebody means by "3090", "rtx4090" or "RTX 5070 Ti"."""
    wanted = _plain(text)
    exact = [row for row in TABLE if wanted in (_plain(row.name), _plain(row.name).removeprefix("rtx"))]
    return exact[0] if exact else table_row(text)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower().removeprefix("nvidia").removeprefix(" geforce"))


def min_driver(capability: int) -> int:
    """The oldest driver branch that knows this compute capability; 0 below 7.5."""
    return _generation(capability).min_driver


def min_cuda(capability: int) -> str:
    """The oldest CUDA whose builds hold code for this compute capability; "" below 7.5."""
    return _generation(capability).min_cuda


def min_torch_cuda(capability: int) -> str:
    """The oldest CUDA that a torch may be built with for such a card: code for sm_120 runs on sm_121, too."""
    return min_cuda(120 if capability == 121 else capability)


def shared_bytes(capability: int) -> int:
    """The most shared memory a block may have; 0 below 7.5."""
    return _generation(capability).shared_bytes
