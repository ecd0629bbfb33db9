"""Embedding lookup. `Impl.rows` reads rows of a weight that an implementation of `linear` has prepared."""

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

RowReader = Callable[[Tensor], Tensor]  # ids int64 [n] -> float32 [n, K], a new tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """Input of an encoder's first layer: LayerNorm(token row + row of a position or token type table)."""

    table: Tensor  # float32 [positions, hidden], or one row for all positions
    weight: Tensor  # float32 [hidden], of the LayerNorm
    bias: Tensor
    eps: float

    def __call__(self, rows: Tensor, positions: Tensor) -> Tensor:
        """rows float32 [num_tokens, hidden], positions int64 [num_tokens]"""
        added = self.table if self.table.shape[0] == 1 else self.table.index_select(0, positions)
        return reference.layer_norm(rows + added, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer inputs (Gemma 3n): a row of a second table (if any) plus a normed projection of the first input."""

    rows: RowReader | None  # [.., layers * size]
    projection: Linear
    norm: Norm  # over the projection for one layer
    dtype: torch.dtype  # of the result
    nbytes: int

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """token_ids int64 [num_tokens], x [num_tokens, hidden] -> [num_tokens, layers, size]."""
        size = self.norm.weight.shape[0]
        projected = self.projection(x).float().mul_(x.shape[-1] ** -0.5).unflatten(-1, (-1, size))
        inputs = reference.rms_norm(projected, self.norm.weight, self.norm.eps)
        if self.rows is None:
            return inputs.to(self.dtype)
        stored = self.rows(token_ids).float().mul_(size**0.5)
        return inputs.add_(stored.view(inputs.shape)).mul_(2**-0.5).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token ids -> scaled rows of the embedding table. Only the requested rows of a quantized table are decoded."""

    rows: RowReader
    scale: float
    dtype: torch.dtype  # of the result
    nbytes: int  # bytes of its own table; 0 if it reads a tied head's
    prepared: Any = None  # the tied head's prepared weight
    entry: Entry | None = None
    inputs: LayerInputs | None = None
    norm_eps: float = 0.0  # eps of an RMSNorm over rows, with unit weight; 0: no norm

    def layer_inputs(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """Per-layer inputs of the tokens; None if the model has none."""
        return None if self.inputs is None else self.inputs(token_ids, x)

    def __call__(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """token_ids int64 [num_tokens] -> [num_tokens, hidden] in the compute dtype. Only `entry` needs `positions`."""
        rows = self.rows(token_ids)
        if self.entry is not None and positions is not None:
            return self.entry(rows.float(), positions).to(self.dtype)
        rows = rows if self.scale == 1.0 else rows.mul_(self.scale)
        if self.norm_eps:
            rows = functional.rms_norm(rows.float(), rows.shape[-1:], eps=self.norm_eps)
        return rows.to(self.dtype)


def weight_rows(weight: Weight) -> RowReader:
    """Return a reader of rows of a canonical weight; only the requested rows are decoded."""
    if is_plain_table(weight):
        return partial(reference.embedding, table=weight.qweight)
    return partial(dequantize_rows, weight)


def rows_within(count: int, read: RowReader) -> RowReader:
    """Return a reader of a table of `count` rows; out-of-range ids read row 0."""
    return lambda ids: read(torch.where(ids < count, ids, 0))


def is_plain_table(weight: Weight) -> bool:
    """Whether rows can be read from `qweight` without decoding."""
    return weight.form == "dense" and weight.perm is None and weight.pre_scale is None
