"""Rows of a table by index; `Impl.rows` reads those of a weight that an implementation of `linear` has prepared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .dequant import dequantize_rows
from .layer_weights import Linear, Norm
from .weight import Weight

RowReader = Callable[[Tensor], Tensor]  # ids int64 [n] -> float32 [n, K], a fresh tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """What a token's row becomes before the first layer of an encoder: the sum with another table's row, normed."""

    table: Tensor  # float32 [positions, hidden], or of one row for all
    weight: Tensor  # float32 [hidden], of a LayerNorm
    bias: Tensor
    eps: float

    def __call__(self, rows: Tensor, positions: Tensor) -> Tensor:
        """rows float32 [num_tokens, hidden], positions int64 [num_tokens]"""
        added = self.table if self.table.shape[0] == 1 else self.table.index_select(0, positions)
        return reference.layer_norm(rows + added, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What tokens have for each layer: a row of a second table, and a projection of what the first layer gets."""

    rows: RowReader  # [.., layers * size]
    projection: Linear
    norm: Norm  # of what is projected for one layer
    dtype: torch.dtype  # of what it returns
    nbytes: int

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """token_ids int64 [num_tokens], x [num_tokens, hidden] -> [num_tokens, layers, size]."""
        size = self.norm.weight.shape[0]
        projected = self.projection(x).float().mul_(x.shape[-1] ** -0.5).unflatten(-1, (-1, size))
        given = reference.rms_norm(projected, self.norm.weight, self.norm.eps)
        stored = self.rows(token_ids).float().mul_(size**0.5)
        return given.add_(stored.view(given.shape)).mul_(2**-0.5).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token ids -> rows of the embedding, times a scale. Of a quantized table only the rows asked for are decoded."""

    rows: RowReader
    scale: float
    dtype: torch.dtype  # of what it returns
    nbytes: int  # bytes it holds; 0 where it reads the table of a tied head
    prepared: Any = None  # that table, as an implementation of `linear` has prepared it
    entry: Entry | None = None
    inputs: LayerInputs | None = None
    norm_eps: float = 0.0  # rows are normed, without a weight; 0: they are not

    def layer_inputs(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """What the tokens have for each layer, where layers take in more than the residual stream."""
        return None if self.inputs is None else self.inputs(token_ids, x)

    def __call__(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """token_ids int64 [num_tokens] -> [num_tokens, hidden] in the compute dtype. `positions`: for an entry."""
        rows = self.rows(token_ids)
        if self.entry is not None and positions is not None:
            return self.entry(rows.float(), positions).to(self.dtype)
        rows = rows if self.scale == 1.0 else rows.mul_(self.scale)
        if self.norm_eps:
            rows = functional.rms_norm(rows.float(), rows.shape[-1:], eps=self.norm_eps)
        return rows.to(self.dtype)


def weight_rows(weight: Weight) -> RowReader:
    """Reads rows of a canonical weight; only those asked for are decoded."""
    if is_plain_table(weight):
        return partial(reference.embedding, table=weight.qweight)
    return partial(dequantize_rows, weight)


def rows_within(count: int, read: RowReader) -> RowReader:
    """Reads rows of a table of `count`; ids beyond it read the first one."""
    return lambda ids: read(torch.where(ids < count, ids, 0))


def is_plain_table(weight: Weight) -> bool:
    """Whether its rows lie in `qweight` as they are."""
    return weight.form == "dense" and weight.perm is None and weight.pre_scale is None
