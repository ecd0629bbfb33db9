"""Memory bandwidth of NVIDIA GPUs by the name the driver gives, for cards whose driver does not tell clock and width.

GB/s as published by NVIDIA. The first pattern that is found wins, so longer names stand before shorter ones.
"""

from __future__ import annotations

import re

TABLE: tuple[tuple[str, float], ...] = (
    (r"GB10", 273),
    (r"Thor", 273),
    (r"Orin", 204),
    (r"B[23]00", 8000),
    (r"H200", 4800),
    (r"H100.*PCIe", 2039),
    (r"H100", 3350),
    (r"A100.*80GB.*PCIe|A100.*PCIe.*80GB", 1935),
    (r"A100.*80GB", 2039),
    (r"A100", 1555),
    (r"L40", 864),
    (r"\bL4\b", 300),
    (r"\bA40\b", 696),
    (r"\bA10\b", 600),
    (r"\bT4\b", 320),
    (r"RTX PRO 6000.*Server", 1597),
    (r"RTX PRO 6000", 1792),
    (r"RTX PRO 5000", 1344),
    (r"RTX PRO 4500", 896),
    (r"RTX PRO 4000", 672),
    (r"RTX PRO 2000", 288),
    (r"RTX A6000", 768),
    (r"RTX A5000", 768),
    (r"RTX A4000", 448),
    (r"RTX 6000 Ada", 960),
    (r"RTX 5000 Ada", 576),
    (r"Quadro RTX 8000|TITAN RTX", 672),
    (r"5090.*Laptop", 896),
    (r"RTX 5090", 1792),
    (r"RTX 5080", 960),
    (r"RTX 5070 Ti", 896),
    (r"RTX 5070", 672),
    (r"RTX 5060", 448),
    (r"RTX 5050", 320),
    (r"RTX 4090", 1008),
    (r"RTX 4080 SUPER", 736),
    (r"RTX 4080", 717),
    (r"RTX 4070 Ti SUPER", 672),
    (r"RTX 4070", 504),
    (r"RTX 4060 Ti", 288),
    (r"RTX 4060", 272),
    (r"RTX 3090 Ti", 1008),
    (r"RTX 3090", 936),
    (r"RTX 3080 Ti", 912),
    (r"RTX 3080", 760),
    (r"RTX 3070 Ti", 608),
    (r"RTX 3070|RTX 3060 Ti", 448),
    (r"RTX 3060", 360),
    (r"RTX 2080 Ti", 616),
    (r"RTX 2080 SUPER", 496),
    (r"RTX 20[78]0", 448),
    (r"RTX 2060", 336),
    (r"GTX 16[56]0", 128),
)

MIN_DRIVER: tuple[tuple[int, int], ...] = (
    (121, 580),
    (110, 580),
    (103, 575),
    (100, 570),
    (90, 525),
    (89, 520),
    (80, 450),
    (75, 418),
)
"""(compute capability, oldest Linux driver for it), newest first; 12.0 needs 570 as 10.0 does."""


def table_bandwidth(name: str) -> float:
    """Bytes per second of a card by name, 0.0 when it is not in the table."""
    return next((speed * 1e9 for pattern, speed in TABLE if re.search(pattern, name, re.IGNORECASE)), 0.0)


def min_driver(capability: int) -> int:
    """The oldest driver branch that knows this compute capability; 0 below 7.5."""
    if capability == 120:
        return 570
    return next((driver for least, driver in MIN_DRIVER if capability >= least), 0)
