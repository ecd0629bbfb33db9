"""The paged KV cache: which layers keep what together (`CacheGroup`), and the pages themselves (`KVCache`).

Who owns which page is the engine's business; here are only tensors.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from localllm.checkpoint.facts import ModelFacts


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same tokens: one set of pages and one block table for all of them."""

    name: str
    """"full" or "window-512\""""
    window: int | None
    """a layer sees its last `window` tokens only, the present one included; None sees all"""
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int


def cache_groups(facts: ModelFacts) -> tuple[CacheGroup, ...]:
    """The groups of a model: full attention first (if any layer has it), then windows, widest first."""
    found: dict[int | None, list[int]] = {}
    for layer, window in enumerate(facts.windows):
        found.setdefault(window, []).append(layer)
    ordered = sorted(found, key=lambda window: (window is not None, -(window or 0)))
    return tuple(
        CacheGroup(
            name="full" if window is None else f"window-{window}",
            window=window,
            layers=tuple(found[window]),
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
        )
        for window in ordered
    )


def kv_bytes_per_page(group: CacheGroup, dtype: torch.dtype, page_size: int) -> int:
    """Bytes of one page of a group: keys and values of all its layers."""
    return 2 * len(group.layers) * group.num_kv_heads * group.head_dim * page_size * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU untouched memory of an anonymous private map, aligned to a system page."""
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVCache:
    """Keys and values of all layers, in pages.

    k, v per layer   [num_pages, num_kv_heads, page_size, head_dim]  float32 | bfloat16 | float16

    Pages start as zeros. On the CPU the system hands memory out when a page is first written: it grows with use.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_pages: Sequence[int],
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        """`num_pages` per group."""
        self.groups = tuple(groups)
        self.num_pages = tuple(num_pages)
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._group_of: dict[int, int] = {}
        for index, (group, pages) in enumerate(zip(self.groups, self.num_pages, strict=True)):
            shape = (pages, group.num_kv_heads, page_size, group.head_dim)
            for layer in group.layers:
                k, v = (_zeros(shape, dtype, self.device) for _ in range(2))
                self._layers[layer] = (k, v)
                self._group_of[layer] = index

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(k, v) of a layer."""
        return self._layers[layer]

    def group_of(self, layer: int) -> int:
        """Index of the group a layer belongs to."""
        return self._group_of[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, used or not."""
        return sum(k.nbytes + v.nbytes for k, v in self._layers.values())

    def copy_page(self, group_index: int, src: int, dst: int) -> None:
        """Copy what page `src` holds into page `dst`, in every layer of the group (copy on write)."""
        for layer in self.groups[group_index].layers:
            for pages in self._layers[layer]:
                pages[dst].copy_(pages[src])
