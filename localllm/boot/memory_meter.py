"""How much memory something took: torch's allocator on a GPU, the process's anonymous memory on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from localllm.device import rss_anon_bytes

WATCH_S = 0.002


class Meter:
    """Notes what torch's allocator took between two moments on a GPU; on the CPU it notes nothing."""

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
        """Give back what the allocator keeps for later, and count from here.

        A capture gives it back when it begins: counted from before that, a graph would seem to take less than nothing.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._allocated, self._reserved = self._read()

    def note(self, name: str, reserved: bool = False) -> None:
        """What was taken since the last note; `reserved` counts what the allocator keeps for itself, too."""
        allocated, held = self._read()
        if self._device.type == "cuda":
            self.found[name] = held - self._reserved if reserved else allocated - self._allocated
        self._allocated, self._reserved = allocated, held


def gpu_peak(device: torch.device, call: Callable[[], None]) -> int:
    """Bytes beyond what is allocated now that `call()` held at most."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_of(device: torch.device, call: Callable[[], None]) -> int:
    """Of a call: on a GPU as `gpu_peak`; on the CPU all anonymous memory of the process."""
    if device.type == "cuda":
        return gpu_peak(device, call)
    with Peak() as peak:
        call()
    return peak.highest


class Peak:
    """The highest `rss_anon_bytes` while a block runs."""

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
