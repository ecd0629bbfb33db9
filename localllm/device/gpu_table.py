"""GPUs by the name the driver gives: for cards whose driver does not tell, and for cards that are not here.

Sizes and bandwidth that the driver tells at run time count more than this table, gpus.toml, which explains each field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from localllm.paths import toml_beside


class GpuModel(NamedTuple):
    """One row: what a card of this name has."""

    pattern: str
    name: str
    capability: int
    memory_gib: float
    bandwidth_gbs: float
    tflops: float = 0.0
    also_gib: Sequence[float] = ()
    knee_w: int = 0  # 0 where nobody measured it


class ForeignModel(NamedTuple):
    """A card of AMD or Intel, which nothing here runs on."""

    pattern: str
    name: str
    target: str  # AMD's architecture, as gfx1100
    memory_gib: float
    bandwidth_gbs: float


class Generation(NamedTuple):
    """What cards of a compute capability, and of later ones up to the next row, need."""

    capability: int
    min_driver: int
    min_cuda: str


_DATA = toml_beside(__file__, "gpus.toml")
TABLE = tuple(GpuModel(**row) for row in _DATA["model"])
FOREIGN = tuple(ForeignModel(**row) for row in _DATA["foreign"])
_GENERATIONS = tuple(Generation(**row) for row in _DATA["generation"])


def generation(capability: int) -> Generation:
    """What a card of this compute capability needs; 0 and "" below 7.5, which nothing here runs on."""
    return next(row for row in _GENERATIONS if capability >= row.capability)


def min_torch_cuda(capability: int) -> str:
    """The oldest CUDA that a torch may be built with for such a card: code for sm_120 runs on sm_121, too."""
    return generation(120 if capability == 121 else capability).min_cuda


@cache
def table_row(name: str) -> GpuModel | None:
    """The row of a card by the driver's name."""
    return next((row for row in TABLE if re.search(row.pattern, name, re.IGNORECASE)), None)


def foreign_gpu(text: str) -> ForeignModel | None:
    """The card of AMD or Intel that somebody means by "7900 XTX" or "mi300x"."""
    return next((row for row in FOREIGN if re.search(row.pattern, text, re.IGNORECASE)), None)


def named_gpu(text: str) -> GpuModel | None:
    """The row that somebody means by "3090", "rtx4090" or "RTX 5070 Ti"."""
    wanted = _plain(text)
    exact = [row for row in TABLE if wanted in (_plain(row.name), _plain(row.name).removeprefix("rtx"))]
    return exact[0] if exact else table_row(text)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower().removeprefix("nvidia").removeprefix(" geforce"))
