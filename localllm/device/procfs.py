"""Reads small files of /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def read(path: Path) -> str:
    """The stripped text of a file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
