"""Ops other than `linear`, and fused segments, in C for the CPU: looked up by `kernels.ops.op_impls`."""

from __future__ import annotations

from collections.abc import Mapping

from ..ops import OpImpl

IMPLS: Mapping[str, tuple[OpImpl, ...]] = {}
