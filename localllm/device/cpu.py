"""CPU facts: name, instruction sets, usable cores and memory bandwidth."""

from __future__ import annotations

import math
import os
import platform
import time
from functools import cache
from pathlib import Path

from .cgroup import cpu_quota
from .cores import cores, memory_nodes
from .facts import CpuFacts
from .procfs import read

X86_FLAGS = (
    *("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
)
ARM_FLAGS = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2")
CORE_BYTES_S = 10e9  # conservative read bandwidth of a single core: 10 to 15 GB/s on current machines
SOCKET_BYTES_S = 40e9  # two channels of DDR4-3200 reach 51 GB/s at best
MIN_BYTES, MAX_BYTES = 64 << 20, 512 << 20  # total buffer size of a bandwidth measurement
PARTS = {"0x41": "ARM", "0xc0": "Ampere", "0x61": "Apple", "0x4e": "NVIDIA", "0x51": "Qualcomm", "0x48": "HiSilicon"}


def cpu_facts(root: Path = Path("/")) -> CpuFacts:
    """Read CPU facts from /proc/cpuinfo, /sys and the affinity mask; unknown facts keep their defaults."""
    info = _cpuinfo(root)
    found = frozenset((info.get("flags") or info.get("features") or "").split())
    flags = tuple(f for f in (*X86_FLAGS, *ARM_FLAGS) if f in found)
    allowed = _allowed()
    quota = cpu_quota(root)
    whole = max(1, math.floor(quota)) if quota else len(allowed)
    physical = cores(allowed, root)
    usable = max(1, min(len(physical), whole))
    return CpuFacts(
        name=_name(info),
        isa=_isa(frozenset(flags)),
        flags=flags,
        cores_usable=usable,
        cpus_usable=max(1, min(len(allowed), whole)),
        cpus_total=os.cpu_count() or 1,
        cores=physical,
        nodes=memory_nodes(root),
        quota=quota,
        cache_bytes=_last_cache(root),
        bandwidth=min(usable * CORE_BYTES_S, SOCKET_BYTES_S),
    )


def _cpuinfo(root: Path) -> dict[str, str]:
    """The entry of the first processor, with keys in lower case."""
    pairs = (line.partition(":") for line in read(root / "proc/cpuinfo").split("\n\n")[0].splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def _name(info: dict[str, str]) -> str:
    if info.get("model name"):
        return " ".join(info["model name"].replace("(R)", "").replace("(TM)", "").split())
    if info.get("cpu implementer"):
        return f"{PARTS.get(info['cpu implementer'], 'Arm')} core {info.get('cpu part', '')}".strip()
    return platform.processor() or platform.machine()


def _isa(flags: frozenset[str]) -> str:
    if {"avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"} <= flags:
        return "amx"
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


def _last_cache(root: Path) -> int:
    """Bytes of the last-level cache of the first CPU; 0 if /sys does not say."""
    sizes: dict[int, int] = {}
    for index in root.glob("sys/devices/system/cpu/cpu0/cache/index*"):
        try:
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
            sizes[level] = int(size.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1], 1)
        except (OSError, ValueError):
            continue
    return sizes[max(sizes)] if sizes else 0


@cache
def read_bandwidth(cores: int, cache_bytes: int) -> float:
    """Bytes per second that `cores` threads read together: the best of three passes over buffers larger than the cache.

    Each thread sums its slice as 64-bit words, since decoding mostly reads. Takes 50 to 150 ms once numpy is loaded.
    """
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    threads = max(1, min(cores, 16))
    size = min(max(2 * cache_bytes, MIN_BYTES), MAX_BYTES) // threads
    slices = [np.ones(size // 8, dtype=np.int64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            start = time.perf_counter()
            list(pool.map(np.sum, slices))
            best = max(best, threads * size / (time.perf_counter() - start))
    return best
