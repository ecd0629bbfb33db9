"""The cache: which layers keep what together (`CacheGroup`, `StateGroup`), and the tensors themselves (`KVCache`).

Who owns which page and which slot is the engine's business; here are only tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from localllm.kernels.kv_pages import KV_DTYPES, SCALED_FORMATS, KVPages
from localllm.kernels.state_slots import StateSlots

from .architectures.facts import ModelFacts, state_layers
from .architectures.mixers import Paged, Stateful


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same tokens: one set of pages and one block table for all of them."""

    name: str  # "full" or "window-512"
    window: int | None  # a layer sees its last `window` tokens only, the present one included; None sees all
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int  # of keys
    value_dim: int
    # layer -> what the checkpoint says codes of its keys and values are multiplied with (fp8 only)
    scales: Mapping[int, tuple[float, float]] = field(default_factory=dict, hash=False)
    # layers that keep nothing -> the one of `layers` whose keys and values they read
    readers: Mapping[int, int] = field(default_factory=dict, hash=False)


def cache_groups(facts: ModelFacts, scales: Mapping[int, tuple[float, float]] | None = None) -> tuple[CacheGroup, ...]:
    """The groups of a model: full attention first (if any layer has it), then windows, widest first.

    scales   of `kv_scales.read_kv_scales`
    """
    groups = []
    for layers in facts.cache_layers:
        mixer = facts.layers[layers[0]].mixer
        assert isinstance(mixer, Paged)
        name = "full" if mixer.window is None else f"window-{mixer.window}"
        fixed = {layer: pair for layer, pair in (scales or {}).items() if layer in layers}
        shared = (
            (index, getattr(layer.mixer, "shares_kv_with", None)) for index, layer in enumerate(facts.keeping_layers)
        )
        readers = {index: source for index, source in shared if source in layers}
        groups.append(CacheGroup(name, mixer.window, layers, *mixer.kept, fixed, readers))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers that keep states of the same shapes."""

    layers: tuple[int, ...]
    conv_shape: tuple[int, ...]  # channels, width - 1
    state_shape: tuple[int, ...]  # () where there is only a convolution


def state_groups(facts: ModelFacts) -> tuple[StateGroup, ...]:
    """Of the layers that keep a state; () for a model without any."""
    groups = []
    for layers in state_layers(facts):
        mixer = facts.layers[layers[0]].mixer
        assert isinstance(mixer, Stateful)
        groups.append(StateGroup(layers, mixer.conv_shape, mixer.state_shape))
    return tuple(groups)


# What is used first lies in small pages: 2 MiB for the keys and the values of each layer of a 4B model would be 150 MB.
SMALL_PAGES = 2 << 20


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU untouched memory of an anonymous private map, aligned to a system page.

    Behind its first 2 MiB it is backed by pages of 2 MiB where the system has them: attention over 8,192 tokens reads
    25 GB/s instead of 22 (two Zen 4 cores of a virtual machine, where plain reading gives 31).
    """
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if len(memory) > SMALL_PAGES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, SMALL_PAGES, len(memory) - SMALL_PAGES)
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


def _rows(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """The bytes of each part, a row for each page or slot."""
    return (part.view(len(part), -1).view(torch.uint8) for part in parts if part.numel())


def _read(parts: Iterable[Tensor], index: int) -> memoryview:
    return memoryview(torch.cat([rows[index] for rows in _rows(parts)]).cpu().numpy())


def _write(parts: Iterable[Tensor], index: int, data: bytearray) -> None:
    rows = list(_rows(parts))
    pieces = torch.frombuffer(data, dtype=torch.uint8).to(rows[0].device).split([row.shape[1] for row in rows])
    for row, piece in zip(rows, pieces, strict=True):
        row[index].copy_(piece)


class KVCache:
    """What all layers keep: keys and values in pages, one `KVPages` a layer, or a state a sequence in `StateSlots`.

    Pages and slots start as zeros. On the CPU the system hands memory out when one is first written: it grows with use.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_pages: Sequence[int],
        page_size: int = 16,
        kv_format: str = "f32",
        device: str | torch.device = "cpu",
        states: Sequence[StateGroup] = (),
        num_slots: int = 0,
        num_layers: int = 0,
    ) -> None:
        """`num_pages` per group; `num_slots` of each of `states`; `num_layers` counts those that keep nothing, too, and
        not that of a head that predicts.
        """
        self.groups = tuple(groups)
        self.num_pages = tuple(num_pages)
        self.page_size = page_size
        self.format = kv_format
        self.device = torch.device(device)
        layers: dict[int, KVPages | StateSlots] = {}
        for group, pages in zip(self.groups, self.num_pages, strict=True):
            rows = (pages, group.num_kv_heads, page_size)
            shapes = (*rows, group.head_dim), (*rows, group.value_dim)
            layers |= {layer: self._pages(shapes, group.scales.get(layer)) for layer in group.layers}
            layers |= {layer: layers[source] for layer, source in group.readers.items()}
        self.num_slots = num_slots if states else 0
        self.states: list[Tensor] = []  # [num_slots, layers of the group, ...]: a slot of all layers is copied at once
        for state in states:
            parts = [shape for shape in (state.conv_shape, state.state_shape) if shape]
            kept = [_zeros((num_slots, len(state.layers), *shape), torch.float32, self.device) for shape in parts]
            for at, layer in enumerate(state.layers):
                conv, *rest = (part[:, at] for part in kept)
                layers[layer] = StateSlots(conv, rest[0] if rest else None)
            self.states += kept
        count = max(num_layers, 1 + max(layers, default=-1))
        self._all = tuple(layers.get(layer) for layer in range(count))
        self.layers = self._all[: num_layers or count]  # what every layer keeps or reads, in order
        self.predictor = self._all[num_layers or count :]  # the same of a head that predicts, if there is one

    def _pages(self, shapes: tuple[tuple[int, ...], ...], fixed: tuple[float, float] | None) -> KVPages:
        k, v = (_zeros(shape, KV_DTYPES[self.format], self.device) for shape in shapes)
        if self.format not in SCALED_FORMATS:
            return KVPages(k, v)
        if fixed is not None and self.format == "fp8":
            return KVPages(k, v, *(torch.tensor([scale], device=self.device) for scale in fixed))
        return KVPages(k, v, *(_zeros(shape[:3], torch.float32, self.device) for shape in shapes))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and slots, used or not."""
        pages = (self._all[layer] or () for group in self.groups for layer in group.layers)
        return sum(part.nbytes for kept in (*pages, self.states) for part in kept if part is not None)

    def forget(self, group_index: int, pages: Sequence[int]) -> None:
        """Give the system back the memory of pages that hold nothing (CPU only); they are zeros afterwards."""
        if self.device.type != "cpu":
            return
        runs = list(_runs(pages))
        for part in self.parts(group_index):
            for first, last in runs:
                _give_back(part[first:last])

    def touch(self, group_index: int, pages: Sequence[int]) -> None:
        """Write to pages that hold nothing, so that they take the memory that they have."""
        rows = torch.tensor(pages, device=self.device)
        for part in self.parts(group_index):
            part[rows] = 1

    def copy_page(self, group_index: int, src: int, dst: int) -> None:
        """Copy what page `src` holds into page `dst`, in every layer of the group (copy on write)."""
        for part in self.parts(group_index):
            part[dst].copy_(part[src])

    def page_bytes(self, group_index: int) -> int:
        """Bytes of one page in all layers of a group."""
        return sum(part[0].nbytes for part in self.parts(group_index))

    def read_page(self, group_index: int, page: int) -> memoryview:
        """A copy of what a page holds, in the order of the layers."""
        return _read(self.parts(group_index), page)

    def write_page(self, group_index: int, page: int, data: bytearray) -> None:
        """As `read_page` gave it."""
        _write(self.parts(group_index), page, data)

    def slot_bytes(self) -> int:
        return sum(part[0].nbytes for part in self.states)

    def read_slot(self, slot: int) -> memoryview:
        """As `read_page`, of a slot."""
        return _read(self.states, slot)

    def write_slot(self, slot: int, data: bytearray) -> None:
        _write(self.states, slot, data)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy the states in slot `src` into slot `dst`, in every layer; zeros where `src` is -1."""
        for part in self.states:
            if src < 0:
                part[dst].zero_()
            else:
                part[dst].copy_(part[src])

    def forget_slots(self, slots: Sequence[int]) -> None:
        """As `forget`, of slots."""
        if self.device.type == "cpu":
            for part in self.states:
                for first, last in _runs(slots):
                    _give_back(part[first:last])

    def parts(self, group_index: int) -> Iterator[Tensor]:
        """What a group's layers keep in pages; a scale of a whole layer belongs to no page."""
        for layer in self.groups[group_index].layers:
            yield from (part for part in self._all[layer] or () if part is not None and part.dim() > 1)
