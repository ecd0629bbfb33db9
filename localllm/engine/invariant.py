"""Invariant checks after every step, for `--debug-invariants` and tests. They also run under `python -O`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

EXIT_CODE = 3

_exits = False


class InvariantViolated(AssertionError):
    """A page or count is inconsistent: a bug in the engine, after which results cannot be trusted."""


def exit_on_violation() -> None:
    """Make every later violation exit the process with EXIT_CODE (`--debug-invariants`)."""
    global _exits
    _exits = True


def violated(what: str) -> NoReturn:
    """Raise InvariantViolated, or exit the process from any thread after `exit_on_violation`."""
    if not _exits:
        raise InvariantViolated(what)
    print(f"invariant violated: {what}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)
