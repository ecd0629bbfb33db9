"""Number of threads for the kernels: the physical cores this process may run on.

Hyper-threads of a core share its vector units, so there is one thread per core. A container's CPU quota is respected.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> int:
    """Return the number of physical cores within the affinity mask and the cgroup quota, at least 1."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return max(1, os.cpu_count() or 1)
    cores = {_core_of(sys_root, cpu) for cpu in allowed}
    quota = _cgroup_quota(sys_root, proc_root)
    return max(1, min(len(cores), math.floor(quota) if quota else len(cores)))


def _core_of(sys_root: Path, cpu: int) -> str:
    """An identifier shared by the hyper-threads of a core."""
    try:
        return (sys_root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return f"cpu{cpu}"


def _cgroup_quota(sys_root: Path, proc_root: Path) -> float | None:
    """CPU limit of the most restrictive cgroup above this process; None if there is no limit."""
    try:
        lines = (proc_root / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = sys_root / "fs/cgroup" / (controllers and "cpu" or "")
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if base not in (place, *place.parents):
                break
            quota = _quota_of(place)
            if quota:
                quotas.append(quota)
    return min(quotas, default=None)


def _quota_of(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()  # cgroup v2
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int((folder / "cpu.cfs_quota_us").read_text())  # cgroup v1
        period_us = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return limit_us / period_us if limit_us > 0 and period_us > 0 else None
