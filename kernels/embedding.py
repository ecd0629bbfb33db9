"""Rows of a table by index; `Impl.rows` reads those of a weight that an implementation of `linear` has prepared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import reference
from .dequant import dequantize_rows
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
class Embedding:
    """Token ids -> rows of the embedding, times a scale. Of a quantized table only the rows asked for are decoded."""

    rows: RowReader
    scale: float
    dtype: torch.dtype  # of what it returns
    nbytes: int  # bytes it holds; 0 where it reads the table of a tied head
    prepared: Any = None  # that table, as an implementation of `linear` has prepared it
    entry: Entry | None = None

    def __call__(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """token_ids int64 [num_tokens] -> [num_tokens, hidden] in the compute dtype. `positions`: for an entry."""
        rows = self.rows(token_ids)
        if self.entry is not None and positions is not None:
            return self.entry(rows.float(), positions).to(self.dtype)
        return (rows if self.scale == 1.0 else rows.mul_(self.scale)).to(self.dtype)


def weight_rows(weight: Weight) -> RowReader:
    """Reads rows of a canonical weight; only those asked for are decoded."""
    if is_plain_table(weight):
        return partial(reference.embedding, table=weight.qweight)
    return partial(dequantize_rows, weight)


def is_plain_table(weight: Weight) -> bool:
    """Whether its rows lie in `qweight` as they are."""
    return weight.form == "dense" and weight.perm is None and weight.pre_scale is None
