"""Copying text out of a terminal: every way there is, and the truth about which was taken."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Callable

from localllm.terminal import gib

from .attention import through_tmux

OSC52_LIMIT = 100_000  # bytes; many terminals drop a longer sequence without a word
_TOOLS = (
    ("WAYLAND_DISPLAY", ("wl-copy",)),
    ("DISPLAY", ("xclip", "-selection", "clipboard")),
    ("DISPLAY", ("xsel", "-b", "-i")),
    ("", ("pbcopy",)),
    ("WSL_DISTRO_NAME", ("clip.exe",)),
)


def osc52(text: str) -> str:
    """The escape sequence that asks a terminal to copy; wrapped so that tmux hands it on."""
    return through_tmux(f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode()}\x07")


def copy(text: str, write: Callable[[str], None]) -> str:
    """Copy `text` with the system's tool and through the terminal (`write`). Returns what to tell the user."""
    size = len(text.encode("utf-8", "replace"))
    ways = []
    if tool := _with_tool(text):
        ways.append(f"with {tool}")
    if size <= OSC52_LIMIT:
        write(osc52(text))
        ways.append("through the terminal (OSC 52)")
    if not ways:
        return f"{gib(size)} is too much for the terminal, and no wl-copy, xclip, xsel or pbcopy was found"
    return f"{len(text):,} characters copied {' and '.join(ways)}"


def _with_tool(text: str) -> str | None:
    for variable, tool in _TOOLS:
        if (not variable or os.environ.get(variable)) and shutil.which(tool[0]):
            try:
                done = subprocess.run(
                    tool, input=text.encode("utf-8", "replace"), timeout=2, capture_output=True, check=False
                )
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0:
                return tool[0]
    return None


def paste() -> str:
    """What the system's clipboard holds as text; empty when no tool can tell."""
    for variable, tool in (
        ("WAYLAND_DISPLAY", ("wl-paste", "-n")),
        ("DISPLAY", ("xclip", "-selection", "clipboard", "-o")),
        ("DISPLAY", ("xsel", "-b", "-o")),
        ("", ("pbpaste",)),
    ):
        if (not variable or os.environ.get(variable)) and shutil.which(tool[0]):
            try:
                done = subprocess.run(tool, timeout=2, capture_output=True, check=False)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0:
                return done.stdout.decode("utf-8", "replace")
    return ""
