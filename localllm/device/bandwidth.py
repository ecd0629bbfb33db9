"""How fast the CPU reads memory: a guess from the cores, or a short measurement."""

from __future__ import annotations

import time
from functools import cache

from .facts import CpuFacts

CORE_BYTES_S = 10e9  # What one core reads on its own, cautiously: 10 to 15 GB/s on current machines.
SOCKET_BYTES_S = 40e9  # Two channels of DDR4-3200 give 51 GB/s at best.
MIN_BYTES = 64 << 20
MAX_BYTES = 512 << 20


def guessed_bandwidth(cpu: CpuFacts) -> float:
    """Bytes per second, on the low side."""
    return min(cpu.cores_usable * CORE_BYTES_S, SOCKET_BYTES_S)


@cache
def read_bandwidth(cores: int, cache_bytes: int) -> float:
    """Bytes per second that `cores` threads read together, the best of three passes over buffers no cache holds.

    Each thread sums its slice as 64-bit words: reading is what decoding does. 50 to 150 ms once numpy is loaded.
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
