"""The disk of a folder: free space, kind and file system, read from /proc and /sys. Nothing is written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from localllm.paths import existing

from .facts import DiskFacts
from .procfs import read

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "drvfs", "virtiofs")
MEMORY = ("tmpfs", "ramfs")


def disk_facts(folder: Path, root: Path = Path("/")) -> DiskFacts:
    """Facts about the disk of a folder, which need not exist yet. Unknown facts stay empty."""
    place = existing(folder)
    try:
        usage = shutil.disk_usage(place)
        device = place.stat().st_dev
    except OSError:
        return DiskFacts(str(folder))
    filesystem, source = _mount(root, place.resolve())
    return DiskFacts(
        path=str(folder),
        free_bytes=usage.free,
        total_bytes=usage.total,
        kind=_kind(root, filesystem, source, device),
        filesystem=filesystem,
        writable=os.access(place, os.W_OK | os.X_OK),
    )


def _mount(root: Path, place: Path) -> tuple[str, str]:
    """(file system, device) of the deepest mount that holds `place`."""
    best: tuple[int, str, str] = (-1, "", "")
    for line in read(root / "proc/self/mounts").splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        source, where, filesystem = parts[0], parts[1].replace("\\040", " "), parts[2]
        inside = where == "/" or str(place) == where or str(place).startswith(where + "/")
        if inside and len(where) >= best[0]:
            best = (len(where), filesystem, source)
    return best[1], best[2]


def _kind(root: Path, filesystem: str, source: str, device: int) -> str:
    if filesystem in NETWORK or filesystem.startswith("fuse.") and ":" in source:
        return "network"
    if filesystem in MEMORY:
        return "memory"
    block = root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    if not block.exists() and source.startswith("/dev/"):
        block = root / "sys/class/block" / Path(source).name
    try:
        folder = block.resolve()
        if folder.name.startswith(("vd", "xvd")):
            return ""  # virtual disks always report that they are rotational
        if "nvme" in folder.name or "nvme" in folder.parent.name:
            return "nvme"
        for place in (folder, folder.parent):  # a partition's queue belongs to its disk
            rotational = place / "queue/rotational"
            if rotational.exists():
                return "hdd" if rotational.read_text().strip() == "1" else "ssd"
    except OSError:
        return ""
    return ""
