"""LoRA adapters: adds to each row of a linear layer's output the low-rank update of its sequence's adapter.

Base weights stay unmodified. A model keeps a second set of linear layers with `Additions`, used for steps that include
a sequence with an adapter; other steps use the plain ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ADAPTERS = 8  # loaded at once
# rows multiplied at a time, and the minimum (padded) rank, for batch-invariant results: for matrices of fewer than
# 12 rows, MKL on Zen 4 uses a different routine whose last bit depends on the row's position
_TILE = 16


@dataclass(frozen=True, slots=True)
class LowRank:
    """One module's update: y += (x downᵀ) upᵀ for the outputs [first, first + N) of a linear layer.

    gain   DoRA magnitude: multiplies these outputs, without their bias, before the update is added
    """

    down: Tensor  # float32 [rank, K]
    up: Tensor  # float32 [N, rank], with the LoRA scale folded in
    first: int
    gain: Tensor | None = None  # float32 [N]

    @property
    def nbytes(self) -> int:
        gain = 0 if self.gain is None else self.gain.nbytes
        return self.down.nbytes + self.up.nbytes + gain


class AdapterRows:
    """The adapter index of each row of the current step, -1 for none; shared by all linear layers of the step."""

    def __init__(self) -> None:
        self.places = np.empty(0, dtype=np.int32)
        self._address = ctypes.c_void_p()

    def set(self, places: np.ndarray) -> None:
        """places   int32 [rows], contiguous; must not change until the next call. The same array again is a no-op."""
        if places is not self.places:
            self.places = places
            self._address.value = places.ctypes.data

    @property
    def runs(self) -> Iterator[tuple[int, slice]]:
        """(place, rows) of each run of consecutive rows with the same adapter."""
        start = 0
        for place, rows in groupby(self.places.tolist()):
            end = start + sum(1 for _ in rows)
            if place >= 0:
                yield place, slice(start, end)
            start = end

    @property
    def address(self) -> int:
        """Address of the pointer to `places`, which the C code dereferences."""
        return ctypes.addressof(self._address)


class Additions:
    """Updates of up to MOST_ADAPTERS adapters to one linear layer, in PyTorch; the reference of the C version.

    bias    float32 [N], of the linear layer
    tiled   batch-invariant results
    coarse  the layer's weights take at most one byte each, so updates may be 8-bit too unless they must be exact
    """

    def __init__(
        self,
        rows: AdapterRows,
        shape: tuple[int, int],
        bias: Tensor | None,
        *,
        tiled: bool = True,
        coarse: bool = False,
    ) -> None:
        self.rows, self.shape, self.bias, self.tiled, self.coarse = rows, shape, bias, tiled, coarse
        self.pieces: list[tuple[LowRank, ...]] = [()] * MOST_ADAPTERS

    @staticmethod
    def room(nbytes: int) -> Any:
        """Allocate one buffer for all updates of an adapter, if this class keeps them together."""
        return None

    def put(self, place: int, pieces: Sequence[LowRank], room: Any = None) -> None:
        """Set the updates applied to rows of adapter `place`."""
        self.pieces[place] = tuple(map(_widened, pieces) if self.tiled else pieces)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for pieces in self.pieces for piece in pieces)

    def forget(self, pages_only: bool = False) -> None:
        """Do nothing: fused segments keep no data here."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add each row's adapter update to y [rows, N] = x Wᵀ + b, in place."""
        for place, rows in self.rows.runs:
            for piece in self.pieces[place]:
                columns = slice(piece.first, piece.first + piece.up.shape[0])
                base = y[rows, columns].float()
                if piece.gain is not None:
                    base = _gained(base, piece.gain, None if self.bias is None else self.bias[columns])
                hidden = self._product(x[rows].float(), piece.down)
                y[rows, columns] = (base + self._product(hidden, piece.up)).to(y.dtype)
        return y

    def _product(self, x: Tensor, matrix: Tensor) -> Tensor:
        if not self.tiled:
            return F.linear(x, matrix)
        count = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -count % _TILE))
        return torch.cat([F.linear(tile, matrix) for tile in padded.split(_TILE)])[:count]


def _widened(piece: LowRank) -> LowRank:
    """Pad the update's rank with zeros to at least _TILE."""
    more = max(0, _TILE - piece.down.shape[0])
    return replace(piece, down=F.pad(piece.down, (0, 0, 0, more)), up=F.pad(piece.up, (0, more)))


def _gained(y: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    return y * gain if bias is None else (y - bias) * gain + bias
