"""The implementations of `linear` in PyTorch alone, preferred first; the last is the twin and always fits."""

from __future__ import annotations

from . import Impl
from .dense_linear import DENSE, DENSE_BF16, DENSE_TILED, TWIN
from .int4pack import INT4PACK

IMPLS: tuple[Impl, ...] = (INT4PACK, DENSE_BF16, DENSE, DENSE_TILED, TWIN)
