"""Sleeping weights: every tensor of a model is copied to host memory, and its device memory freed.

Tensors keep their identity, and only the storage behind them is swapped. Layers, prepared kernels and closures that
hold one can use it again after `SleepingWeights.wake`.
"""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from localllm.kernels.host_experts import HostExperts

# types that the walk does not enter; experts in host memory stay where they are
_STOP = (HostExperts, type, types.ModuleType, str, bytes, int, float, complex, torch.dtype, torch.device)


class SleepingWeights:
    """Storages copied to host memory."""

    def __init__(self, pairs: list[tuple[UntypedStorage, UntypedStorage]]) -> None:
        self._pairs = pairs  # (emptied storage on the device, its copy on the host)

    @property
    def nbytes(self) -> int:
        return sum(host.nbytes() for _, host in self._pairs)

    def wake(self) -> None:
        """Allocate the device memory again and copy everything back. Raises torch's out-of-memory error."""
        try:
            for storage, host in self._pairs:
                storage.resize_(host.nbytes())
                storage.copy_(host, non_blocking=host.is_pinned())
        except torch.OutOfMemoryError:  # stay asleep, for another attempt
            for storage, _ in self._pairs:
                storage.resize_(0)
            free_cached()
            raise
        for device in {storage.device for storage, _ in self._pairs if storage.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        self._pairs = []
        free_cached()


def put_to_sleep(holder: Any) -> SleepingWeights:
    """Copy the storage of every tensor reachable from `holder` to the host, then empty it."""
    storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, tensors_of(holder))}
    pairs: list[tuple[UntypedStorage, UntypedStorage]] = []
    for storage in (storage for storage in storages.values() if storage.nbytes()):
        host = UntypedStorage(storage.nbytes())
        if storage.device.type == "cuda":
            host = host.pin_memory()
        host.copy_(storage)
        pairs.append((storage, host))
    for storage, _ in pairs:
        storage.resize_(0)
    free_cached()
    return SleepingWeights(pairs)


def tensors_of(holder: Any) -> Iterator[Tensor]:
    """Yield every tensor reachable from an object through attributes, containers and closures, once."""
    waiting: deque[Any] = deque([holder])
    seen: set[int] = set()
    while waiting:
        item = waiting.popleft()
        if id(item) in seen or isinstance(item, _STOP):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, types.FunctionType):  # skip its globals, which belong to the module
            waiting.extend(item.__closure__ or ())
            waiting.extend(item.__defaults__ or ())
            waiting.extend((item.__kwdefaults__ or {}).values())
        else:
            waiting.extend(gc.get_referents(item))


def free_cached() -> None:
    """Release memory that torch caches: device memory, and the pinned host memory of sleeping weights."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        release = getattr(torch.accelerator, "empty_host_cache", None)  # missing in older supported torch versions
        if release is not None:
            release()
