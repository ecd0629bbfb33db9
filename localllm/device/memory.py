"""RAM and swap: what there is, and what this process may still take."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import NamedTuple

from .cgroup import memory_groups
from .procfs import read, statm


class MemoryLimits(NamedTuple):
    """Bytes. `limit` names what makes the total smaller than the RAM: cgroup, ulimit, or nothing."""

    total_bytes: int
    available_bytes: int
    limit: str
    swap_total_bytes: int
    swap_free_bytes: int


def memory_limits(root: Path = Path("/")) -> MemoryLimits:
    """The smallest of installed RAM, each cgroup's limit, and the address space a `ulimit -v` leaves."""
    info = _meminfo(root)
    total = info.get("MemTotal", 0)
    free = info.get("MemAvailable", info.get("MemFree", 0) + info.get("Cached", 0))
    limit = ""
    for bound, left in memory_groups(root):
        if bound < total:
            total, limit = bound, "cgroup"
        free = min(free, left)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        if space < total:
            total, limit = space, "ulimit"
        free = min(free, max(0, space - statm(root, 0)))
    return MemoryLimits(total, free, limit, info.get("SwapTotal", 0), info.get("SwapFree", 0))


def _meminfo(root: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            found[name] = int(parts[0]) * (1024 if parts[-1] == "kB" else 1)
    return found


def rss_anon_bytes() -> int:
    """Anonymous memory of this process: what it really takes, without mapped files; 0 where the system does not say."""
    lines = read(Path("/proc/self/status")).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def resident_bytes(root: Path = Path("/")) -> int:
    """Memory of this process that is its own (a model file mapped into it is not); 0 when unknown."""
    return statm(root, 1) - statm(root, 2)
