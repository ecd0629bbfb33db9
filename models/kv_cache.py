"""The paged KV cache: which layers keep what together (`CacheGroup`), and the pages themselves (`KVCache`).

Who owns which page is the engine's business; here are only tensors.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from localllm.kernels.kv_pages import KV_DTYPES, SCALED_FORMATS, KVPages

from .architectures.facts import ModelFacts, cache_layers


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same tokens: one set of pages and one block table for all of them."""

    name: str  # "full" or "window-512"
    window: int | None  # a layer sees its last `window` tokens only, the present one included; None sees all
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    # layer -> what the checkpoint says codes of its keys and values are multiplied with (fp8 only)
    scales: Mapping[int, tuple[float, float]] = field(default_factory=dict, hash=False)


def cache_groups(facts: ModelFacts, scales: Mapping[int, tuple[float, float]] | None = None) -> tuple[CacheGroup, ...]:
    """The groups of a model: full attention first (if any layer has it), then windows, widest first.

    scales   of `kv_scales.read_kv_scales`
    """
    groups = []
    for layers in cache_layers(facts):
        mixer = facts.layers[layers[0]].mixer
        name = "full" if mixer.window is None else f"window-{mixer.window}"
        fixed = {layer: pair for layer, pair in (scales or {}).items() if layer in layers}
        groups.append(CacheGroup(name, mixer.window, layers, mixer.num_kv_heads, mixer.head_dim, fixed))
    return tuple(groups)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU untouched memory of an anonymous private map, aligned to a system page."""
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring numbers together: half-open ranges."""
    for _, run in groupby(enumerate(sorted(pages)), key=lambda pair: pair[1] - pair[0]):
        numbers = [page for _, page in run]
        yield numbers[0], numbers[-1] + 1


def _give_back(memory: Tensor) -> None:
    """Let the system take back whole system pages of a contiguous piece of an anonymous map."""
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


class KVCache:
    """Keys and values of all layers, in pages: one `KVPages` a layer.

    Pages start as zeros. On the CPU the system hands memory out when a page is first written: it grows with use.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_pages: Sequence[int],
        page_size: int = 16,
        kv_format: str = "f32",
        device: str | torch.device = "cpu",
    ) -> None:
        """`num_pages` per group."""
        self.groups = tuple(groups)
        self.num_pages = tuple(num_pages)
        self.page_size = page_size
        self.format = kv_format
        self.device = torch.device(device)
        layers: dict[int, KVPages] = {}
        for group, pages in zip(self.groups, self.num_pages, strict=True):
            shape = (pages, group.num_kv_heads, page_size, group.head_dim)
            layers |= {layer: self._pages(shape, group.scales.get(layer)) for layer in group.layers}
        self.layers = tuple(layers[layer] for layer in sorted(layers))  # what every layer keeps, in order

    def _pages(self, shape: tuple[int, ...], fixed: tuple[float, float] | None) -> KVPages:
        k, v = (_zeros(shape, KV_DTYPES[self.format], self.device) for _ in range(2))
        if self.format not in SCALED_FORMATS:
            return KVPages(k, v)
        if fixed is not None and self.format == "fp8":
            return KVPages(k, v, *(torch.tensor([scale], device=self.device) for scale in fixed))
        return KVPages(k, v, *(_zeros(shape[:3], torch.float32, self.device) for _ in range(2)))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, used or not."""
        return sum(part.nbytes for pages in self.layers for part in pages if part is not None)

    def forget(self, group_index: int, pages: Sequence[int]) -> None:
        """Give the system back the memory of pages that hold nothing (CPU only); they are zeros afterwards."""
        if self.device.type != "cpu":
            return
        runs = list(_runs(pages))
        for part in self._parts(group_index):
            for first, last in runs:
                _give_back(part[first:last])

    def copy_page(self, group_index: int, src: int, dst: int) -> None:
        """Copy what page `src` holds into page `dst`, in every layer of the group (copy on write)."""
        for part in self._parts(group_index):
            part[dst].copy_(part[src])

    def _parts(self, group_index: int) -> Iterator[Tensor]:
        """What a group's layers keep in pages; a scale of a whole layer belongs to no page."""
        for layer in self.groups[group_index].layers:
            yield from (part for part in self.layers[layer] if part is not None and part.dim() > 1)
