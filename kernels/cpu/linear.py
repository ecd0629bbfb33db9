"""`linear` in C for the CPU."""

from __future__ import annotations

from .. import Impl

IMPLS: tuple[Impl, ...] = ()
