"""Small files of /proc and /sys; what cannot be read is empty."""

from __future__ import annotations

from pathlib import Path


def read(path: Path) -> str:
    """A file's text without the space around it; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
