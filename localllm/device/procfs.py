"""Small files of /proc and /sys; what cannot be read is empty."""

from __future__ import annotations

from pathlib import Path


def read(path: Path) -> str:
    """A file's text without the space around it; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def statm(root: Path, column: int) -> int:
    """Bytes in a column of this process's /proc/self/statm; 0 where unknown."""
    import resource

    parts = read(root / "proc/self/statm").split()
    return int(parts[column]) * resource.getpagesize() if len(parts) > column and parts[column].isdigit() else 0
