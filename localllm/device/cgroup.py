"""CPU and memory limits of the control groups (v1 and v2) around this process.

Any group from the process's own up to the root may set a limit; the smallest counts. In a container, the process's
path may point outside the mounted tree; then the mount itself is its group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .procfs import read

UNLIMITED = 1 << 60  # version 1 reports about 2^63 for "no limit"


def cpu_quota(root: Path = Path("/")) -> float:
    """The allowed CPU time in CPUs; 0 if unlimited."""
    pairs = [read(folder / "cpu.max").partition(" ")[::2] for folder in _groups(root, "", "cpu")]
    pairs += [(read(f / "cpu.cfs_quota_us"), read(f / "cpu.cfs_period_us")) for f in _groups(root, "cpu", "cpu")]
    limits = (int(a) / int(b) for a, b in pairs if a.isdigit() and b.isdigit() and int(b))
    return min(limits, default=0.0)


def memory_groups(root: Path = Path("/")) -> list[tuple[int, int]]:
    """(limit, free bytes below it) of each group with a memory limit.

    Cached files count as free, as in MemAvailable, including active ones: a model's files become active after a run.
    """
    found = []
    for controller, limited, in_use, total in (
        ("", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        for folder in _groups(root, controller, "memory"):
            limit = _number(read(folder / limited))
            if 0 < limit < UNLIMITED:
                stat = dict(line.split(" ", 1) for line in read(folder / "memory.stat").splitlines() if " " in line)
                cached = sum(_number(stat.get(f"{total}{kind}_file", "")) for kind in ("inactive", "active"))
                used = _number(read(folder / in_use)) - cached
                found.append((limit, max(0, limit - max(0, used))))
    return found


def _groups(root: Path, controller: str, mount: str) -> Iterator[Path]:
    """Folders of this process's group and its ancestors. `controller` "" selects the unified tree of version 2."""
    own = None
    for line in read(root / "proc/self/cgroup").splitlines():
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


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
