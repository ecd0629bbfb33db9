"""Additions to products in C (adapters.h): their matrices packed, and what C needs to know of them."""

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

_WIDE = 16  # outputs that lie together


class CpuAdditions(Additions):
    """The same in C: single products by `add`, whole layers by their segments, which find `address` in them.

    is_half   matrices are kept in bfloat16
    """

    def __init__(self, rows: AdapterRows, shape: tuple[int, int], bias: Tensor | None, *, is_half: bool) -> None:
        super().__init__(rows, shape, bias)
        self.is_half = is_half
        self.struct = CAdapters(k=shape[1], n=shape[0], is_half=is_half, rows=rows.address)
        self.address = ctypes.addressof(self.struct)
        self._kept: list[list[Any]] = [[] for _ in range(MOST_ADAPTERS)]  # what C reads
        self._sizes = [(0, 0, 0, 0)] * MOST_ADAPTERS  # of each place: pieces, inner results, longest, gains
        # what `segments` keeps here: a layer's weights, and the layer as C knows it
        self.layer: tuple[Any, Any] | None = None
        self.decoder: Any = None

    def forget(self, pages_only: bool = False) -> None:
        self.decoder = None
        if not pages_only:
            self.layer = None

    def put(self, place: int, pieces: Sequence[LowRank]) -> None:
        kept: list[Any] = []
        structs = (CLowRank * max(1, len(pieces)))()
        at = 0
        for struct, piece in zip(structs, pieces, strict=False):
            rank, n = -(-piece.down.shape[0] // _WIDE) * _WIDE, piece.up.shape[0]
            packed = (
                self._columns(piece.down.T),
                self._columns(F.pad(piece.up.T, (0, 0, 0, rank - piece.up.shape[1]))),
            )
            gain = None if piece.gain is None else _padded(piece.gain.float() - 1)
            bias = None if gain is None or self.bias is None else _padded(self.bias[piece.first : piece.first + n])
            kept += (*packed, gain, bias)
            struct.rank, struct.at, struct.first, struct.n = rank, at, piece.first, n
            struct.down, struct.up = (matrix.data_ptr() for matrix in packed)
            struct.gain, struct.bias = (None if vector is None else vector.data_ptr() for vector in (gain, bias))
            at += rank
        self._kept[place] = [structs, *kept]
        longest = max((piece.up.shape[0] for piece in pieces), default=0)
        self._sizes[place] = len(pieces), at, longest, sum(piece.gain is not None for piece in pieces)
        self.struct.count[place], self.struct.pieces[place] = len(pieces), ctypes.addressof(structs)
        most = (max(sizes) for sizes in zip(*self._sizes, strict=True))
        self.struct.most, self.struct.ranks, self.struct.longest, self.struct.gains = most

    def _columns(self, matrix: Tensor) -> Tensor:
        """[inputs, outputs] -> [outputs / _WIDE, inputs, _WIDE], zeros behind the last output."""
        inputs, outputs = matrix.shape
        wide = F.pad(matrix, (0, -outputs % _WIDE)).view(inputs, -1, _WIDE).transpose(0, 1)
        return wide.to(torch.bfloat16 if self.is_half else torch.float32).contiguous()

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for kept in self._kept for one in kept if isinstance(one, Tensor))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        given, wide = x.float().contiguous(), y.float().contiguous()
        if lib().ll_adapt(self.address, given.data_ptr(), given.shape[0], wide.data_ptr()):
            raise MemoryError(f"no memory for an adapter's product of {x.shape[0]} rows")
        return wide.to(y.dtype)


def _padded(vector: Tensor) -> Tensor:
    return F.pad(vector.float(), (0, -vector.shape[0] % _WIDE)).contiguous()
