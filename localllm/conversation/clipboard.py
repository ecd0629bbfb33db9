"""Copying text out of a terminal by every available way, reporting which one worked."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence

from localllm.terminal import gib

from .attention import through_tmux

OSC52_LIMIT = 100_000  # bytes; many terminals silently drop a longer sequence
_COPY = (
    ("WAYLAND_DISPLAY", ("wl-copy",)),
    ("DISPLAY", ("xclip", "-selection", "clipboard")),
    ("DISPLAY", ("xsel", "-b", "-i")),
    ("", ("pbcopy",)),
    ("WSL_DISTRO_NAME", ("clip.exe",)),
)
_PASTE = (
    ("WAYLAND_DISPLAY", ("wl-paste", "-n")),
    ("DISPLAY", ("xclip", "-selection", "clipboard", "-o")),
    ("DISPLAY", ("xsel", "-b", "-o")),
    ("", ("pbpaste",)),
)


def osc52(text: str) -> str:
    """The escape sequence that makes a terminal copy `text`, wrapped so that tmux passes it on."""
    return through_tmux(f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode()}\x07")


def copy(text: str, write: Callable[[str], None]) -> str:
    """Copy `text` with a system tool and through the terminal (`write`). Returns what to tell the user."""
    data = text.encode("utf-8", "replace")
    tool, _ = _with_tool(_COPY, data)
    ways = [f"with {tool}"] if tool else []
    if len(data) <= OSC52_LIMIT:
        write(osc52(text))
        ways.append("through the terminal (OSC 52)")
    if not ways:
        return f"{gib(len(data))} is too much for the terminal, and wl-copy, xclip, xsel and pbcopy are missing"
    return f"copied {len(text):,} characters {' and '.join(ways)}"


def paste() -> str:
    """The clipboard's contents as text; empty when no tool can read it."""
    return _with_tool(_PASTE)[1].decode("utf-8", "replace")


def _with_tool(tools: Sequence[tuple[str, Sequence[str]]], given: bytes = b"") -> tuple[str, bytes]:
    """(name, output) of the first (required variable, command) pair that works; ("", b"") when none does."""
    for variable, command in tools:
        if (not variable or os.environ.get(variable)) and shutil.which(command[0]):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                done = subprocess.run(command, input=given, timeout=2, capture_output=True, check=False)
                if done.returncode == 0:
                    return command[0], done.stdout
    return "", b""
