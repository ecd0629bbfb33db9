"""Limits of the control groups around this process, versions 1 and 2: CPU time and memory.

A limit may be set on any group from the process's own up to the root; the smallest counts. Inside a container the own
path may point outside the mounted tree; then the mount itself is the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 60  # Version 1 writes about 2^63 for "none".


def cpu_quota(root: Path = Path("/")) -> float:
    """CPUs' worth of time allowed, 0 when unlimited."""
    limits = []
    for folder in _groups(root, "", "cpu"):
        limit, _, period = _read(folder / "cpu.max").partition(" ")
        if limit.isdigit() and period.isdigit() and int(period):
            limits.append(int(limit) / int(period))
    for folder in _groups(root, "cpu", "cpu"):
        limit, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit() and int(period):
            limits.append(int(limit) / int(period))
    return min(limits, default=0.0)


def memory_groups(root: Path = Path("/")) -> list[tuple[int, int]]:
    """(limit, free below it) in bytes for each group that has a memory limit."""
    found = []
    for folder in _groups(root, "", "memory"):
        limit = _number(folder / "memory.max")
        if 0 < limit < UNLIMITED:
            used = _number(folder / "memory.current") - _stat(folder, "inactive_file")
            found.append((limit, max(0, limit - max(0, used))))
    for folder in _groups(root, "memory", "memory"):
        limit = _number(folder / "memory.limit_in_bytes")
        if 0 < limit < UNLIMITED:
            used = _number(folder / "memory.usage_in_bytes") - _stat(folder, "total_inactive_file")
            found.append((limit, max(0, limit - max(0, used))))
    return found


def _groups(root: Path, controller: str, mount: str) -> Iterator[Path]:
    """Folders of this process's group and those above it; `controller` "" is the single tree of version 2."""
    own = None
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (controller in names.split(",")) if controller else (number == "0" and not names):
            own = path
    if own is None:
        return
    bases = [root / "sys/fs/cgroup" / mount] if controller else [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
    for base in bases:
        inner = base / own.strip("/")
        folder = inner if inner.is_dir() and ".." not in own else base
        while True:
            yield folder
            if folder == base:
                break
            folder = folder.parent


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _read(path)
    return int(text) if text.isdigit() else 0


def _stat(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0
