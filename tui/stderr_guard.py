"""Redirects file descriptor 2 to the log, so that output of libraries and drivers does not end up on the screen.

Textual draws on `sys.__stderr__`. While the guard is active, that is a copy of the terminal under another number, and
descriptor 2 is the log file, which keeps a driver's messages.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localllm.terminal import locale_encoding


class Terminal(io.FileIO):
    """Drops output once the terminal is gone: an exception would leave Textual's threads running."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(data)


@contextmanager
def stderr_to(log: Path) -> Iterator[None]:
    """Redirect descriptor 2 to `log` (or /dev/null when the log cannot be written) until the block ends."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        target = os.open(os.devnull, os.O_WRONLY)
    sys.stderr.flush()
    screen = os.dup(2)
    os.dup2(target, 2)
    os.close(target)
    before = sys.__stderr__, sys.stderr
    raw = io.BufferedWriter(Terminal(os.dup(screen), "w"))
    terminal = io.TextIOWrapper(raw, encoding=locale_encoding(), errors="replace", newline="", line_buffering=True)
    sys.__stderr__ = sys.stderr = terminal  # type: ignore[misc]
    try:
        yield
    finally:
        sys.__stderr__, sys.stderr = before  # type: ignore[misc]
        terminal.close()
        os.dup2(screen, 2)
        os.close(screen)
