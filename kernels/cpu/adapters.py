"""Adapter updates in C (adapters.h): packs LoRA matrices and builds the structs that C reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..adapters import MOST_ADAPTERS, AdapterRows, Additions, LowRank
from .build import lib
from .interface import CAdapters, CLowRank

_WIDE = 16  # outputs stored contiguously
_LINE, _HUGE = 64, 2 << 20  # bytes of a cache line and of a huge page
_FLOAT, _BF16, _INT8 = range(3)  # storage formats of matrices


class Room:
    """A buffer backed by huge pages, like the weights; tensors are placed in the order in which they are read."""

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes + 2 * _HUGE, dtype=torch.uint8)  # untouched pages take no memory
        lib().ll_advise(self._memory.data_ptr(), self._memory.nbytes)
        self._at = -self._memory.data_ptr() % _HUGE

    def moved(self, tensor: Tensor | None) -> Tensor | None:
        """Copy a tensor into the buffer; return the tensor itself if the buffer is full."""
        if tensor is None or self._at + tensor.nbytes > self._memory.nbytes:
            return tensor
        place = self._memory[self._at : self._at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._at += -(-tensor.nbytes // _LINE) * _LINE
        return place.copy_(tensor)


class CpuAdditions(Additions):
    """`Additions` in C: `add` for single linear layers; fused segments read the struct at `address`.

    exact   keep matrices in float32; otherwise in bfloat16, or in int8 if `coarse`
    """

    def __init__(
        self, rows: AdapterRows, shape: tuple[int, int], bias: Tensor | None, *, exact: bool, coarse: bool = False
    ) -> None:
        super().__init__(rows, shape, bias, coarse=coarse)
        self._form = _FLOAT if exact else _INT8 if coarse else _BF16
        self.struct = CAdapters(k=shape[1], n=shape[0], form=self._form, rows=rows.address)
        self.address = ctypes.addressof(self.struct)
        self._kept: list[list[Any]] = [[] for _ in range(MOST_ADAPTERS)]  # keeps alive what C reads
        self._sizes = [(0, 0, 0, 0)] * MOST_ADAPTERS  # per place: pieces, sum of ranks, unaligned pieces, gains
        # cache of `segments`: a layer's weights and its C struct
        self.layer: tuple[Any, Any] | None = None
        self.decoder: Any = None

    def forget(self, pages_only: bool = False) -> None:
        self.decoder = None
        if not pages_only:
            self.layer = None

    @staticmethod
    def room(nbytes: int) -> Room:
        return Room(nbytes)

    def put(self, place: int, pieces: Sequence[LowRank], room: Room | None = None) -> None:
        kept: list[Any] = []
        structs = (CLowRank * max(1, len(pieces)))()
        at = 0
        for struct, piece in zip(structs, pieces, strict=False):
            rank, n = -(-piece.down.shape[0] // _WIDE) * _WIDE, piece.up.shape[0]
            down, down_scale = self._columns(piece.down.T)
            up, up_scale = self._columns(F.pad(piece.up.T, (0, 0, 0, rank - piece.up.shape[1])))
            gain = None if piece.gain is None else _padded(piece.gain.float() - 1)
            bias = None if gain is None or self.bias is None else _padded(self.bias[piece.first : piece.first + n])
            tensors: tuple[Tensor | None, ...] = (down, up, down_scale, up_scale, gain, bias)
            if room is not None:
                tensors = tuple(room.moved(tensor) for tensor in tensors)
            kept += tensors
            struct.rank, struct.at, struct.first, struct.n = rank, at, piece.first, n
            for name, tensor in zip(("down", "up", "down_scale", "up_scale", "gain", "bias"), tensors, strict=True):
                setattr(struct, name, None if tensor is None else tensor.data_ptr())
            at += rank
        self._kept[place] = [structs, *kept]
        uneven = sum(piece.first % _WIDE != 0 for piece in pieces)
        self._sizes[place] = len(pieces), at, uneven, sum(piece.gain is not None for piece in pieces)
        self.struct.count[place], self.struct.pieces[place] = len(pieces), ctypes.addressof(structs)
        most = (max(sizes) for sizes in zip(*self._sizes, strict=True))
        self.struct.most, self.struct.ranks, self.struct.uneven, self.struct.gains = most

    def _columns(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """[inputs, outputs] -> [ceil(outputs / _WIDE), inputs, _WIDE], zero-padded, and the int8 scales, if any."""
        inputs, outputs = matrix.shape
        wide, scale = F.pad(matrix, (0, -outputs % _WIDE)), None
        if self._form == _INT8:
            scale = wide.abs().amax(0) / 127
            wide = (wide / scale.clamp(min=1e-30)).round()
        dtype = {_FLOAT: torch.float32, _BF16: torch.bfloat16, _INT8: torch.int8}[self._form]
        return wide.view(inputs, -1, _WIDE).transpose(0, 1).to(dtype).contiguous(), scale

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for kept in self._kept for one in kept if isinstance(one, Tensor))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        given, wide = x.float().contiguous(), y.float().contiguous()
        if lib().ll_adapt(self.address, given.data_ptr(), given.shape[0], wide.data_ptr()):
            raise MemoryError(f"out of memory for an adapter's product of {x.shape[0]} rows")
        return wide.to(y.dtype)


def _padded(vector: Tensor) -> Tensor:
    return F.pad(vector.float(), (0, -vector.shape[0] % _WIDE)).contiguous()
