"""What must hold after every step, checked with `--debug-invariants` and in tests, under `python -O` as well."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

EXIT_CODE = 3

_exits = False


class InvariantViolated(AssertionError):
    """A page or a count that nobody accounts for: our own fault, and everything after it is doubtful."""


def exit_on_violation() -> None:
    """From now on a violation ends the process with EXIT_CODE, as its command was told."""
    global _exits
    _exits = True


def violated(what: str) -> NoReturn:
    """Raise InvariantViolated, or end the process if that was asked for, whichever thread this is."""
    if not _exits:
        raise InvariantViolated(what)
    print(f"invariant violated: {what}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)
