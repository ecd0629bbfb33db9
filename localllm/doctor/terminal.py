"""The terminal that the interface would be drawn in."""

from __future__ import annotations

import codecs
import os
import shutil
import sys
from collections.abc import Mapping

from localllm.device import MachineFacts
from localllm.request import Check

from .finding import TERMINAL, CheckFunction, found

LEAST_COLUMNS, LEAST_ROWS = 60, 16


def term(machine: MachineFacts) -> Check:
    """Whether full-screen chat can be shown."""
    name = os.environ.get("TERM", "")
    if not (sys.stdout.isatty() or sys.stderr.isatty()):
        return found("term", TERMINAL, "skip", "no terminal", term=name)
    if name in ("", "dumb"):
        return found(
            "term",
            TERMINAL,
            "warn",
            f"TERM={name or 'nothing'}: chat runs line by line",
            fix="export TERM=xterm-256color",
        )
    inside = next((n for n, v in (("tmux", "TMUX"), ("screen", "STY"), ("ssh", "SSH_TTY")) if os.environ.get(v)), "")
    return found("term", TERMINAL, "ok", name + (f" inside {inside}" if inside else ""), term=name, inside=inside)


def term_size(machine: MachineFacts) -> Check:
    """Whether there is room."""
    if not (sys.stdout.isatty() or sys.stderr.isatty()):
        return found("term.size", TERMINAL, "skip", "no terminal")
    columns, rows = shutil.get_terminal_size()
    title = f"{columns}×{rows}"
    if columns < LEAST_COLUMNS or rows < LEAST_ROWS:
        title += f": {LEAST_COLUMNS}×{LEAST_ROWS} is the smallest that reads well"
        return found("term.size", TERMINAL, "warn", title, fix="localllm chat --plain", columns=columns, rows=rows)
    return found("term.size", TERMINAL, "ok", title, columns=columns, rows=rows)


def term_utf8(machine: MachineFacts) -> Check:
    """Whether text in every script can be shown."""
    try:
        encoding = codecs.lookup(sys.stdout.encoding or "ascii").name
    except LookupError:
        encoding = "ascii"
    if encoding != "utf-8":
        return found(
            "term.utf8", TERMINAL, "warn", f"the encoding is {encoding}", fix="export LC_ALL=C.UTF-8", encoding=encoding
        )
    return found("term.utf8", TERMINAL, "ok", "UTF-8", encoding=encoding)


CHECKS: Mapping[str, CheckFunction] = {"term": term, "term.size": term_size, "term.utf8": term_utf8}
