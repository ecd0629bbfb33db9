"""Weights, caches, one forward: `ForwardBatch` -> logits of the rows that are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from localllm.models.inputs import ForwardBatch
from localllm.models.kv_cache import KVCache

from .pages import PageCopy

LOGIT_BYTES = 64 << 20
"""most float32 logits held at once when many rows are wanted: 64 rows of a 262k vocabulary"""


class ForwardModel(Protocol):
    """What the runner needs of a model (`models.loader.load_model` gives one)."""

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """-> hidden [num_tokens, hidden]"""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows [num_rows, hidden] -> float32 [num_rows, vocab]"""
        ...


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """hidden [num_rows, hidden]: the wanted rows; `logits` turns pieces of them into logits when they are needed."""

    hidden: Tensor
    logits: Callable[[Tensor], Tensor]

    def rows(self, start: int, end: int) -> Tensor:
        """float32 logits [end - start, vocab]"""
        return self.logits(self.hidden[start:end])

    def pieces(self, start: int, end: int, vocab_size: int) -> Iterator[Tensor]:
        """The same in pieces of at most LOGIT_BYTES."""
        step = max(1, LOGIT_BYTES // (4 * vocab_size))
        for at in range(start, end, step):
            yield self.rows(at, min(at + step, end))


class Runner:
    """Runs a model over its cache."""

    def __init__(self, model: ForwardModel, cache: KVCache, vocab_size: int) -> None:
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, copies: list[PageCopy]) -> ForwardOutput:
        """Copy shared pages that are about to be written, then run the model."""
        for copy in copies:
            self.cache.copy_page(copy.group, copy.source, copy.target)
        hidden = self.model.forward(batch, self.cache)
        return ForwardOutput(hidden[batch.logits_indices], self._logits)

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)
