"""The KV cache: groups of layers that share pages (`CacheGroup`) or states (`StateGroup`), and the tensors (`KVCache`).

The engine assigns pages and slots to sequences; this module only holds the tensors.
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

from localllm.kernels.kv_pages import KV_DTYPES, SCALED_FORMATS, CompressedPages, KVPages
from localllm.kernels.layer_weights import LayerCache
from localllm.kernels.state_slots import PagesAndSlots, StateSlots

from .architectures.facts import ModelFacts, state_layers
from .architectures.layers import NGrams
from .architectures.mixers import Paged


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same tokens, with one set of pages and one block table for all of them."""

    name: str  # "full" or "window-512"
    window: int | None  # a layer sees only the last `window` tokens, including the current one; None: all tokens
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int  # of keys
    value_dim: int
    # layer -> (key scale, value scale) from the checkpoint, which multiply the codes (fp8 only)
    scales: Mapping[int, tuple[float, float]] = field(default_factory=dict, hash=False)
    # layer without a KV cache of its own -> the one of `layers` whose keys and values it reads
    readers: Mapping[int, int] = field(default_factory=dict, hash=False)
    beside: tuple[int, int, int] | None = None  # as in `mixers.Attention`


def cache_groups(facts: ModelFacts, scales: Mapping[int, tuple[float, float]] | None = None) -> tuple[CacheGroup, ...]:
    """The cache groups of a model: full attention first (if any layer has it), then windows, widest first.

    scales   from `kv_scales.read_kv_scales`
    """
    groups = []
    for layers in facts.cache_layers:
        mixer = facts.keeping_layers[layers[0]].mixer
        assert isinstance(mixer, Paged)
        name = "full" if mixer.window is None else f"window-{mixer.window}"
        fixed = {layer: pair for layer, pair in (scales or {}).items() if layer in layers}
        shared = (
            (index, getattr(layer.mixer, "shares_kv_with", None)) for index, layer in enumerate(facts.keeping_layers)
        )
        readers = {index: source for index, source in shared if source in layers}
        groups.append(CacheGroup(name, mixer.window, layers, *mixer.kept, fixed, readers, mixer.beside))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers that keep states of the same shapes."""

    layers: tuple[int, ...]
    conv_shape: tuple[int, ...]  # channels, width - 1
    state_shape: tuple[int, ...]  # () if there is only a convolution
    ngrams: bool = False  # whether it is that of n-gram embeddings, beside the mixers' own


def state_groups(facts: ModelFacts) -> tuple[StateGroup, ...]:
    """The state groups of a model; () if no layer keeps a state."""
    groups = []
    for layers, part in state_layers(facts):
        groups.append(StateGroup(layers, part.conv_shape, part.state_shape, isinstance(part, NGrams)))
    return tuple(sorted(groups, key=lambda group: group.ngrams))


# The first 2 MiB use small system pages: one huge page each for keys and values of all layers of a 4B model is 150 MB.
SMALL_PAGES = 2 << 20


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU untouched memory of a private anonymous mapping, aligned to a system page.

    After the first 2 MiB it uses huge pages if the system has them: attention over 8,192 tokens reads 25 GB/s instead
    of 22 (two Zen 4 cores of a virtual machine, where a plain read gives 31).
    """
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if len(memory) > SMALL_PAGES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, SMALL_PAGES, len(memory) - SMALL_PAGES)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Merge consecutive page numbers into half-open ranges."""
    for _, run in groupby(enumerate(sorted(pages)), key=lambda pair: pair[1] - pair[0]):
        numbers = [page for _, page in run]
        yield numbers[0], numbers[-1] + 1


def _give_back(memory: Tensor) -> None:
    """Return the whole system pages in a contiguous piece of an anonymous mapping to the system."""
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _rows(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """The bytes of each part, with one row per page or slot."""
    return (part.view(len(part), -1).view(torch.uint8) for part in parts if part.numel())


def _read(parts: Iterable[Tensor], index: int) -> memoryview:
    return memoryview(torch.cat([rows[index] for rows in _rows(parts)]).cpu().numpy())


def _write(parts: Iterable[Tensor], index: int, data: bytearray) -> None:
    rows = list(_rows(parts))
    pieces = torch.frombuffer(data, dtype=torch.uint8).to(rows[0].device).split([row.shape[1] for row in rows])
    for row, piece in zip(rows, pieces, strict=True):
        row[index].copy_(piece)


class KVCache:
    """The cache of all layers: one `KVPages` per layer with keys and values, or one `StateSlots` per stateful layer.

    Pages and slots start as zeros. On the CPU the system allocates memory on the first write, so usage grows over time.
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
        num_drafting: int = 0,
        entries: Sequence[int] = (),
    ) -> None:
        """`num_pages` is per group, `num_slots` per item of `states`. `num_layers` includes layers that keep nothing,
        but neither the MTP layer, nor the compressed entries of the layers `entries`, nor the last `num_drafting` ones,
        which are those of a drafter.
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
            layers |= {layer: self._pages(shapes, group.scales.get(layer), group.beside) for layer in group.layers}
            layers |= {layer: layers[source] for layer, source in group.readers.items()}
        self.num_slots = num_slots if states else 0
        second: dict[int, StateSlots] = {}  # of layers that have pages, too
        self.states: list[Tensor] = []  # [num_slots, layers of the group, ...]: one copy moves a slot of all layers
        for state in states:
            parts = [shape for shape in (state.conv_shape, state.state_shape) if shape]
            kept = [_zeros((num_slots, len(state.layers), *shape), torch.float32, self.device) for shape in parts]
            for at, layer in enumerate(state.layers):
                conv, *rest = (part[:, at] for part in kept)
                own, before = StateSlots(conv, rest[0] if rest else None), layers.get(layer)
                if isinstance(before, KVPages):
                    second[layer] = own
                else:
                    layers[layer] = own if before is None else before._replace(ngrams=own)
            self.states += kept
        count = max(num_layers, 1 + max(layers, default=-1))
        self._all = tuple(layers.get(layer) for layer in range(count))
        first = count - num_drafting - len(entries)
        stored = dict(zip(entries, self._all[first : count - num_drafting], strict=True))

        def whole(layer: int, kept: KVPages | StateSlots | None) -> LayerCache:
            if not isinstance(kept, KVPages):
                return kept
            other = stored.get(layer)
            kept_entries = CompressedPages(kept, other) if isinstance(other, KVPages) else kept
            return PagesAndSlots(kept, second[layer]) if layer in second else kept_entries

        # the cache that each layer reads, in order
        self.layers = tuple(whole(*one) for one in enumerate(self._all[: num_layers or count]))
        self.predictor = self._all[num_layers or count : first]  # that of the MTP layer, if there is one
        self.drafting = self._all[count - num_drafting :]  # those of a drafter's layers

    def _pages(
        self,
        shapes: tuple[tuple[int, ...], ...],
        fixed: tuple[float, float] | None,
        beside: tuple[int, int, int] | None,
    ) -> KVPages:
        k, v = (_zeros(shape, KV_DTYPES[self.format], self.device) for shape in shapes)
        scales: tuple[Tensor | None, ...] = (None, None)
        if fixed is not None and self.format == "fp8":
            scales = tuple(torch.tensor([scale], device=self.device) for scale in fixed)
        elif self.format in SCALED_FORMATS:
            scales = tuple(_zeros(shape[:3], torch.float32, self.device) for shape in shapes)
        if beside is None:
            return KVPages(k, v, *scales)
        token, block, ratio = beside
        dtype = torch.float32 if self.format == "f32" else torch.bfloat16
        rows = ((len(k), self.page_size, token), (len(k), self.page_size // ratio, block))
        return KVPages(k, v, *scales, *(_zeros(shape, dtype, self.device) for shape in rows))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and slots, used or not."""
        pages = (self._all[layer] or () for group in self.groups for layer in group.layers)
        return sum(part.nbytes for kept in (*pages, self.states) for part in kept if part is not None)

    def forget(self, group_index: int, pages: Sequence[int]) -> None:
        """Return the memory of unused pages to the system (CPU only); they read as zeros afterwards."""
        if self.device.type != "cpu":
            return
        runs = list(_runs(pages))
        for part in self.parts(group_index):
            for first, last in runs:
                _give_back(part[first:last])

    def touch(self, group_index: int, pages: Sequence[int]) -> None:
        """Write to unused pages, so the system allocates their memory."""
        rows = torch.tensor(pages, device=self.device)
        for part in self.parts(group_index):
            part[rows] = 1

    def copy_page(self, group_index: int, src: int, dst: int) -> None:
        """Copy page `src` to page `dst` in every layer of the group (copy on write)."""
        for part in self.parts(group_index):
            part[dst].copy_(part[src])

    def page_bytes(self, group_index: int) -> int:
        """Bytes of one page in all layers of a group."""
        return sum(part[0].nbytes for part in self.parts(group_index))

    def read_page(self, group_index: int, page: int) -> memoryview:
        """A copy of a page's bytes, layer by layer."""
        return _read(self.parts(group_index), page)

    def write_page(self, group_index: int, page: int, data: bytearray) -> None:
        """Write the bytes that `read_page` returned."""
        _write(self.parts(group_index), page, data)

    def slot_bytes(self) -> int:
        return sum(part[0].nbytes for part in self.states)

    def read_slot(self, slot: int) -> memoryview:
        """A copy of a slot's bytes, layer by layer."""
        return _read(self.states, slot)

    def write_slot(self, slot: int, data: bytearray) -> None:
        _write(self.states, slot, data)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy the states in slot `src` to slot `dst` in every layer; a `src` of -1 writes zeros."""
        for part in self.states:
            if src < 0:
                part[dst].zero_()
            else:
                part[dst].copy_(part[src])

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Like `forget`, for slots."""
        if self.device.type == "cpu":
            for part in self.states:
                for first, last in _runs(slots):
                    _give_back(part[first:last])

    def parts(self, group_index: int) -> Iterator[Tensor]:
        """The paged tensors of a group's layers; a scale for a whole layer is not part of any page."""
        for layer in self.groups[group_index].layers:
            yield from (part for part in self._all[layer] or () if part is not None and part.dim() > 1)
