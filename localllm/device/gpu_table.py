"""Table of GPU models by driver name (gpus.toml), for facts that a driver does not report and for absent GPUs.

Sizes and bandwidth reported by the driver take precedence. gpus.toml explains each field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from localllm.paths import toml_beside


class GpuModel(NamedTuple):
    """One row of the table."""

    pattern: str
    name: str
    capability: int
    memory_gib: float
    bandwidth_gbs: float
    tflops: float = 0.0
    also_gib: Sequence[float] = ()
    knee_w: int = 0  # 0 if not measured


class ForeignModel(NamedTuple):
    """An AMD or Intel GPU, which is not supported."""

    pattern: str
    name: str
    target: str  # AMD's architecture, such as gfx1100
    memory_gib: float
    bandwidth_gbs: float


class Generation(NamedTuple):
    """Requirements of a compute capability, and of later ones up to the next row."""

    capability: int
    min_driver: int
    min_cuda: str


_DATA = toml_beside(__file__, "gpus.toml")
TABLE = tuple(GpuModel(**row) for row in _DATA["model"])
FOREIGN = tuple(ForeignModel(**row) for row in _DATA["foreign"])
_GENERATIONS = tuple(Generation(**row) for row in _DATA["generation"])


def generation(capability: int) -> Generation:
    """The requirements of a compute capability; 0 and "" below 7.5, which is not supported."""
    return next(row for row in _GENERATIONS if capability >= row.capability)


def min_torch_cuda(capability: int) -> str:
    """The oldest CUDA version of a torch build for this capability; code for sm_120 also runs on sm_121."""
    return generation(120 if capability == 121 else capability).min_cuda


@cache
def table_row(name: str) -> GpuModel | None:
    """The row for a driver name."""
    return next((row for row in TABLE if re.search(row.pattern, name, re.IGNORECASE)), None)


def foreign_gpu(text: str) -> ForeignModel | None:
    """The AMD or Intel GPU that a user means by "7900 XTX" or "mi300x"."""
    return next((row for row in FOREIGN if re.search(row.pattern, text, re.IGNORECASE)), None)


def named_gpu(text: str) -> GpuModel | None:
    """The row that a user means by "3090", "rtx4090" or "RTX 5070 Ti"."""
    wanted = _plain(text)
    exact = [row for row in TABLE if wanted in (_plain(row.name), _plain(row.name).removeprefix("rtx"))]
    return exact[0] if exact else table_row(text)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower().removeprefix("nvidia").removeprefix(" geforce"))
