"""The CPU: its name, its instruction sets, and how many cores this process may keep busy."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

from .cgroup import cpu_quota
from .facts import CpuFacts
from .procfs import read

X86_FLAGS = ("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8")
ARM_FLAGS = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2")
PARTS = {"0x41": "ARM", "0xc0": "Ampere", "0x61": "Apple", "0x4e": "NVIDIA", "0x51": "Qualcomm", "0x48": "HiSilicon"}


def cpu_facts(root: Path = Path("/")) -> CpuFacts:
    """Read from /proc/cpuinfo, /sys and the affinity mask; unknown parts keep their defaults."""
    info = _cpuinfo(root)
    found = frozenset((info.get("flags") or info.get("features") or "").split())
    flags = tuple(f for f in (*X86_FLAGS, *ARM_FLAGS) if f in found)
    allowed = _allowed()
    quota = cpu_quota(root)
    cores = len({_core_of(root, cpu) for cpu in allowed})
    whole = max(1, math.floor(quota)) if quota else len(allowed)
    return CpuFacts(
        name=_name(info),
        isa=_isa(frozenset(flags)),
        flags=flags,
        cores_usable=max(1, min(cores, whole)),
        cpus_usable=max(1, min(len(allowed), whole)),
        cpus_total=os.cpu_count() or 1,
        quota=quota,
        cache_bytes=_last_cache(root),
    )


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first processor's lines, keys in lower case."""
    pairs = (line.partition(":") for line in read(root / "proc/cpuinfo").split("\n\n")[0].splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def _name(info: dict[str, str]) -> str:
    if info.get("model name"):
        return " ".join(info["model name"].replace("(R)", "").replace("(TM)", "").split())
    if info.get("cpu implementer"):
        return f"{PARTS.get(info['cpu implementer'], 'Arm')} core {info.get('cpu part', '')}".strip()
    return platform.processor() or platform.machine()


def _isa(flags: frozenset[str]) -> str:
    if {"avx512f", "avx512bw"} <= flags:
        return "avx512_vnni" if "avx512_vnni" in flags else "avx512"
    if {"avx2", "fma", "f16c"} <= flags:
        return "avx2"
    if "asimd" in flags:
        return "neon_dotprod" if "asimddp" in flags else "neon"
    return "generic"


def _allowed() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _core_of(root: Path, cpu: int) -> tuple[str, ...]:
    """Names the physical core of a logical CPU; the CPU itself where /sys does not say."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    package, core = read(topology / "physical_package_id"), read(topology / "core_id")
    return (package, core) if package and core else (f"cpu{cpu}",)


def _last_cache(root: Path) -> int:
    """Bytes of the highest-level cache of the first CPU, 0 when /sys does not say."""
    sizes: dict[int, int] = {}
    for index in root.glob("sys/devices/system/cpu/cpu0/cache/index*"):
        try:
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
            sizes[level] = int(size.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1], 1)
        except (OSError, ValueError):
            continue
    return sizes[max(sizes)] if sizes else 0
