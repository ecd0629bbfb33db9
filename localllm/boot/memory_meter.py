"""Memory measurements: torch's allocator on a GPU, the process's anonymous memory on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from localllm.device import rss_anon_bytes

WATCH_S = 0.002


class Meter:
    """Records what torch's allocator takes between two calls on a GPU; records nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.found: dict[str, int] = {}  # name -> bytes
        self._allocated, self._reserved = self._read()

    def _read(self) -> tuple[int, int]:
        if self._device.type != "cuda":
            return 0, 0
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)

    def settle(self) -> None:
        """Free the allocator's cache and count from here.

        A graph capture frees the cache when it begins, so without this a graph would seem to take negative memory.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._allocated, self._reserved = self._read()

    def note(self, name: str, reserved: bool = False) -> None:
        """Record the bytes taken since the last call; `reserved` includes memory cached by the allocator."""
        allocated, held = self._read()
        if self._device.type == "cuda":
            self.found[name] = held - self._reserved if reserved else allocated - self._allocated
        self._allocated, self._reserved = allocated, held


def gpu_peak(device: torch.device, call: Callable[[], None]) -> int:
    """Peak bytes that `call()` allocates on top of what is allocated now."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_of(device: torch.device, call: Callable[[], None]) -> int:
    """Peak memory of a call: `gpu_peak` on a GPU, all anonymous memory of the process on the CPU."""
    if device.type == "cuda":
        return gpu_peak(device, call)
    with Peak() as peak:
        call()
    return peak.highest


class Peak:
    """Context manager that records the highest `rss_anon_bytes` while a block runs."""

    def __enter__(self) -> Peak:
        self.highest = rss_anon_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(WATCH_S):
            self.highest = max(self.highest, rss_anon_bytes())

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.highest = max(self.highest, rss_anon_bytes())
