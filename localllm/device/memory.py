"""RAM and swap: totals, limits, and what this process can still use."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import NamedTuple

from .cgroup import memory_groups
from .procfs import read


class MemoryLimits(NamedTuple):
    """The memory fields of `MachineFacts`."""

    ram_total_bytes: int
    ram_available_bytes: int
    ram_limit: str
    swap_total_bytes: int
    swap_free_bytes: int


def memory_limits(root: Path = Path("/")) -> MemoryLimits:
    """Memory limits: the smallest of installed RAM, cgroup limits and the address space of `ulimit -v`."""
    info = sizes(root / "proc/meminfo")
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
        free = min(free, max(0, space - sizes(root / "proc/self/status").get("VmSize", 0)))
    return MemoryLimits(total, free, limit, info.get("SwapTotal", 0), info.get("SwapFree", 0))


def rss_anon_bytes() -> int:
    """Anonymous memory of this process, without mapped files; 0 if the system does not report it."""
    return sizes(Path("/proc/self/status")).get("RssAnon", 0)


def sizes(path: Path) -> dict[str, int]:
    """The sizes in a /proc file, from lines such as `Name:  123 kB`, in bytes."""
    lines = (line.split() for line in read(path).splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}
