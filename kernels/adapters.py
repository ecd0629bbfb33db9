"""What adapters add to a product: for every row of a step the low-rank update of the adapter that its sequence has.

A model's weights stay as they are. Its products are kept a second time with `Additions`, for the steps that have a
sequence with an adapter; all others use the plain ones.
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

MOST_ADAPTERS = 8  # in memory at once
# rows that are multiplied at once where a row may not depend on its neighbours; and the least rank then: MKL on Zen 4
# multiplies matrices of fewer than 12 rows by another routine, in which a row's place changes its last bit
_TILE = 16


@dataclass(frozen=True, slots=True)
class LowRank:
    """One module's update: y += (x downᵀ) upᵀ for the outputs [first, first + N) of a product.

    gain   of DoRA: first these outputs, less their bias, are multiplied with it
    """

    down: Tensor  # float32 [rank, K]
    up: Tensor  # float32 [N, rank], its scale in it
    first: int
    gain: Tensor | None = None  # float32 [N]

    @property
    def nbytes(self) -> int:
        gain = 0 if self.gain is None else self.gain.nbytes
        return self.down.nbytes + self.up.nbytes + gain


class AdapterRows:
    """Which adapter's place each row of the present step has, -1 for none; shared by all products of those rows."""

    def __init__(self) -> None:
        self.places = np.empty(0, dtype=np.int32)
        self._address = ctypes.c_void_p()

    def set(self, places: np.ndarray) -> None:
        """int32 [rows], contiguous; kept until the next step. The same array says the same."""
        if places is not self.places:
            self.places = places
            self._address.value = places.ctypes.data

    @property
    def runs(self) -> Iterator[tuple[int, slice]]:
        """(place, rows) for consecutive rows that have one."""
        start = 0
        for place, rows in groupby(self.places.tolist()):
            end = start + sum(1 for _ in rows)
            if place >= 0:
                yield place, slice(start, end)
            start = end

    @property
    def address(self) -> int:
        """Of the address of `places`, as C follows it."""
        return ctypes.addressof(self._address)


class Additions:
    """What up to MOST_ADAPTERS adapters add to one product, in PyTorch; the reference of all others.

    bias    float32 [N] of the product
    tiled   a row's result does not depend on the rows beside it
    coarse  the product's weights have a byte or less each: so may the updates, where they need not be exact
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
        """Memory for all updates of an adapter, where they lie together."""
        return None

    def put(self, place: int, pieces: Sequence[LowRank], room: Any = None) -> None:
        """From now on rows with this place get these updates."""
        self.pieces[place] = tuple(map(_widened, pieces) if self.tiled else pieces)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for pieces in self.pieces for piece in pieces)

    def forget(self, pages_only: bool = False) -> None:
        """Fused segments keep nothing here."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """y [rows, N] = x Wᵀ + b, changed: rows with an adapter get its update."""
        for place, rows in self.rows.runs:
            for piece in self.pieces[place]:
                columns = slice(piece.first, piece.first + piece.up.shape[0])
                given = y[rows, columns].float()
                if piece.gain is not None:
                    given = _gained(given, piece.gain, None if self.bias is None else self.bias[columns])
                hidden = self._product(x[rows].float(), piece.down)
                y[rows, columns] = (given + self._product(hidden, piece.up)).to(y.dtype)
        return y

    def _product(self, x: Tensor, matrix: Tensor) -> Tensor:
        if not self.tiled:
            return F.linear(x, matrix)
        count = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -count % _TILE))
        return torch.cat([F.linear(tile, matrix) for tile in padded.split(_TILE)])[:count]


def _widened(piece: LowRank) -> LowRank:
    """The same update with a rank of at least _TILE."""
    more = max(0, _TILE - piece.down.shape[0])
    return replace(piece, down=F.pad(piece.down, (0, 0, 0, more)), up=F.pad(piece.up, (0, more)))


def _gained(y: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    return y * gain if bias is None else (y - bias) * gain + bias
