"""Weights, caches, one forward and one sampling: `Step` -> logits of the rows that are wanted -> tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from localllm.models.inputs import ForwardBatch
from localllm.models.kv_cache import KVCache
from localllm.models.model import Model

from .batch import BatchBuilder, row_range
from .cuda_graph import DecodeGraphs, Shape
from .device_sampler import DeviceSampler
from .failures import is_device_lost
from .sampled_tokens import SampledTokens
from .sampler import is_plain_greedy, sample_batch
from .scheduler import Step
from .sequence import Sequence

log = logging.getLogger(__name__)
LOGIT_BYTES = 64 << 20  # most float32 logits held at once when many rows are wanted: 64 rows of a 262k vocabulary


class ForwardOutput:
    """The wanted rows of a forward pass, turned into logits when they are needed.

    hidden  [num_rows, hidden], before the last norm
    ready   float32 [num_rows, vocab] where a graph or a step has computed the logits, too; then all of it is valid only
            until the next forward
    shape   of that graph, None without one
    places  of the wanted rows in `hidden` and `ready`, those of a sequence side by side; None: all rows are wanted
    best    int64 [num_rows], where it is known: the first place of the largest logit of each row, -1 where one is NaN
    """

    def __init__(
        self,
        model: Model,
        hidden: Tensor,
        ready: Tensor | None = None,
        shape: Shape | None = None,
        places: list[int] | None = None,
        best: Tensor | None = None,
    ) -> None:
        self._model = model
        self._hidden = hidden
        self.ready = ready
        self.shape = shape
        self._places = places
        self._best = best

    def places(self, rows: list[int]) -> list[int]:
        """Where wanted rows are in `ready`."""
        return rows if self._places is None else [self._places[row] for row in rows]

    def logits(self, rows: list[int]) -> Tensor:
        """float32 [len(rows), vocab]"""
        source = self._hidden if self.ready is None else self.ready
        rows = self.places(rows)
        picked = source if rows == list(range(source.shape[0])) else source[rows]
        return self._model.logits(picked) if self.ready is None else picked

    def best(self, rows: list[int]) -> list[int] | None:
        """The place of the largest logit of each of these rows, -1 where one is NaN; None where nobody looked."""
        if self._best is None:
            return None
        found = self._best.tolist()
        return [found[row] for row in rows]

    def normed(self, start: int, end: int) -> Tensor:
        """Rows [start, end) after the last norm, float32 [rows, hidden]."""
        (first,) = self.places([start])
        return self._model.normed(self._hidden[first : first + end - start])

    def pieces(self, start: int, end: int, vocab_size: int) -> Iterator[Tensor]:
        """Logits of rows [start, end), in order, in pieces of at most LOGIT_BYTES."""
        step = max(1, LOGIT_BYTES // (4 * vocab_size))
        (first,) = self.places([start])
        for at in range(first, first + end - start, step):
            piece = slice(at, min(at + step, first + end - start))
            yield self._model.logits(self._hidden[piece]) if self.ready is None else self.ready[piece]


class Listener(Protocol):
    """Hears what a model thinks of every token that is computed."""

    def hear(self, step: Step, hidden: Tensor) -> None:
        """`hidden` [num_tokens, hidden]: before the last norm, valid until the next step."""


class Runner:
    """Runs a model over its cache, in inference mode where its caller is.

    graphs   decode steps replayed from captured graphs; None runs everything eagerly
    sampler  samples where the logits are; None: on the host
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        vocab_size: int,
        graphs: DecodeGraphs | None = None,
        sampler: DeviceSampler | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        self.graphs = graphs
        self.sampler = sampler
        self.listener: Listener | None = None  # is told the hidden states of every token
        self.beside: dict[str, DecodeGraphs] = {}  # graphs of what guesses for the model, by what that is
        self.builder = BatchBuilder(len(cache.groups), cache.page_size, cache.device)

    def capture(
        self, left: tuple[Shape, ...] | None = None, stop: Callable[[], bool] = lambda: False
    ) -> tuple[Shape, ...]:
        """Capture decode steps (`DecodeGraphs.capture`), sampling from their logits, and when none is left what guesses
        for them; returns the shapes left. `graphs.failure` says what could not be captured.
        """
        if self.graphs is None:
            return ()
        for graphs in self.beside.values():
            # their replays write where a graph captured from now on may leave its logits, before these are sampled
            graphs.buckets = ()
        left = self.graphs.capture(left, stop)
        if self.sampler is not None:
            with self.graphs.noting("sampling"):
                self.sampler.capture(self.graphs.buckets, self.graphs.capture_run)
        for what, graphs in () if left else self.beside.items():
            graphs.capture(stop=stop)
            self.graphs.failure = self.graphs.failure or (graphs.failure and f"{what}, {graphs.failure}")
        return left

    def forward(self, step: Step, before: SampledTokens | None = None, num_layers: int | None = None) -> ForwardOutput:
        """Copy shared pages that are about to be written, run the model, and keep states as checkpoints.

        before      where the tokens of a step that is ahead come from
        num_layers  only the first so many layers, without graphs, to see what a step takes
        """
        for copy in step.copies:
            self.cache.copy_page(copy.group, copy.source, copy.target)
        output = self._forward(step, before, num_layers)
        for part in step.scheduled:
            if part.saves is not None:
                self.cache.copy_slot(part.saves.source, part.saves.target)
        return output

    def _forward(self, step: Step, before: SampledTokens | None, num_layers: int | None) -> ForwardOutput:
        parts = step.scheduled
        bucket = None if self.graphs is None or num_layers is not None else self.graphs.bucket(parts)
        if self.graphs is not None and bucket is not None:
            hidden, logits = self.graphs.replay(bucket, parts, before)
            starts = list(accumulate((part.num_tokens for part in parts), initial=0))
            self._tell(step, hidden[: starts.pop()])
            wanted = [row for part, start in zip(parts, starts, strict=True) for row in row_range(part, start)]
            return ForwardOutput(self.model, hidden, logits, bucket.shape, wanted)
        self._see(step)
        batch = self.builder.build(step)
        if before is not None:
            before.fill(batch.token_ids, step.scheduled)
        samples = any(not part.sequence.request.pooling for part in step.scheduled)
        guessed = any(part.drafts for part in step.scheduled)
        if num_layers is None and samples and (guessed or self.sampler is None and batch.is_decode):
            if batch.images or not batch.wants_every_row:  # a grammar forced some of the tokens
                hidden = self._told(step, batch)
                return ForwardOutput(self.model, hidden, self.model.logits(hidden))
            greedy = any(is_plain_greedy(part.sequence.params) for part in step.scheduled)
            hidden, logits, best = self.model.step(batch, self.cache, greedy)
            self._tell(step, hidden)
            return ForwardOutput(self.model, hidden, logits, best=best)
        if num_layers is None:
            return ForwardOutput(self.model, self._told(step, batch))
        return ForwardOutput(self.model, self.model.forward(batch, self.cache, num_layers=num_layers))

    def _told(self, step: Step, batch: ForwardBatch) -> Tensor:
        """Run the model, tell who listens, and return the wanted rows."""
        if self.listener is None:
            return self.model.forward(batch, self.cache)
        hidden = self.model.forward(batch, self.cache, every_row=True)
        self._tell(step, hidden)
        return hidden if batch.wants_every_row else hidden[batch.logits_indices]

    def _tell(self, step: Step, hidden: Tensor) -> None:
        """One that fails listens no more, and costs no request anything."""
        if self.listener is None:
            return
        try:
            self.listener.hear(step, hidden)
        except Exception as error:
            if is_device_lost(error):
                raise
            log.error("drafting stopped: the hidden states of a step could not be read", exc_info=error)
            self.listener = None

    def projected(self, vector: Tensor) -> Tensor:
        """A pooled vector as the model gives it away."""
        return self.model.projected(vector)

    def _see(self, step: Step) -> None:
        """Have the tower compute the images that this step is the first to need; who listens reads one token more."""
        for part in step.scheduled:
            end = part.start + part.num_tokens + (self.listener is not None)
            for image in part.sequence.request.images:
                if image.vectors is None and image.start < end and part.start < image.end:
                    image.vectors = self.model.image_vectors(torch.from_numpy(image.pixels))
                    image.pixels = None

    def samples_ahead(self, output: ForwardOutput) -> bool:
        """Whether rows behind guessed tokens are best sampled with the others: it takes one replay."""
        return self.sampler is not None and output.shape is not None

    def sample(
        self, output: ForwardOutput, rows: list[int], sequences: list[Sequence], ahead: Many[int] = ()
    ) -> SampledTokens:
        """One token for each of `sequences`, from the rows of `output` that are theirs; `ahead` of `DeviceSampler`."""
        if not sequences:
            return SampledTokens([], list)
        if self.sampler is None:
            return sample_batch(output.logits(rows), sequences, output.best(rows))
        if output.shape is not None and output.ready is not None:
            return self.sampler.sample(output.ready, output.places(rows), sequences, output.shape, ahead)
        return self.sampler.sample(output.logits(rows), list(range(len(rows))), sequences)
