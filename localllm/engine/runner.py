"""The model runner: runs one forward pass and samples from it. `Step` -> logits of the requested rows -> tokens."""

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
from localllm.models.model import Model, Taps

from .batch import BatchBuilder, row_range
from .cuda_graph import DecodeGraphs, Shape
from .device_sampler import DeviceSampler
from .failures import is_device_lost
from .sampled_tokens import SampledTokens
from .sampler import is_plain_greedy, sample_batch
from .scheduler import Step
from .sequence import Sequence

log = logging.getLogger(__name__)
LOGIT_BYTES = 64 << 20  # most float32 logits held at once when many rows are needed: 64 rows of a 262k vocabulary


class ForwardOutput:
    """The requested rows of a forward pass, converted to logits on demand.

    hidden  [num_rows, hidden], before the final norm
    ready   float32 [num_rows, vocab] if the pass computed the logits as well (in a graph or a fused step); then all
            tensors are only valid until the next forward pass
    shape   shape of the graph; None without one
    places  indices of the requested rows in `hidden` and `ready`, contiguous per sequence; None for all rows
    best    int64 [num_rows], if known: index of the first largest logit of each row, -1 if the row contains NaN
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
        """Indices of requested rows in `ready`."""
        return rows if self._places is None else [self._places[row] for row in rows]

    def logits(self, rows: list[int]) -> Tensor:
        """The logits of these rows, float32 [len(rows), vocab]."""
        source = self._hidden if self.ready is None else self.ready
        rows = self.places(rows)
        picked = source if rows == list(range(source.shape[0])) else source[rows]
        return self._model.logits(picked) if self.ready is None else picked

    def best(self, rows: list[int]) -> list[int] | None:
        """Index of the largest logit of each of these rows, -1 for rows with NaN; None if not computed."""
        if self._best is None:
            return None
        found = self._best.tolist()
        return [found[row] for row in rows]

    def normed(self, start: int, end: int) -> Tensor:
        """Rows [start, end) after the final norm, float32 [rows, hidden]."""
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
    """Receives the hidden states of every computed token.

    reach   as in `PaidDrafter`
    """

    reach: int

    @property
    def taps(self) -> Taps | None:
        """Where the outputs of single layers go, if it reads them: a fused step does not show them."""

    def hear(self, step: Step, hidden: Tensor) -> None:
        """Called after every forward pass. `hidden` [num_tokens, hidden] is before the final norm."""


class Runner:
    """Runs a model over its KV cache. The caller must be in inference mode.

    graphs   captured decode steps; None runs everything eagerly
    sampler  samples on the device; None samples on the host
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
        self._listener: Listener | None = None
        self.beside: dict[str, DecodeGraphs] = {}  # graphs of the drafters, by name
        self.builder = BatchBuilder(len(cache.groups), cache.page_size, cache.device)

    @property
    def listener(self) -> Listener | None:
        """Receives the hidden states of every token. While there is none, the model copies no layer's outputs, except
        in steps that were captured before.
        """
        return self._listener

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        self._listener = listener
        self.model.taps = None if listener is None else listener.taps

    @property
    def is_captured(self) -> bool:
        """False while any graph is left to capture."""
        return self.graphs is None or not any(graphs.left for graphs in (self.graphs, *self.beside.values()))

    def capture(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Capture decode steps (`DecodeGraphs.capture`), sampling from their logits, and finally the drafters' graphs.

        Returns `is_captured`. `graphs.failure` describes what could not be captured.
        """
        if self.graphs is None:
            return True
        for graphs in self.beside.values() if self.graphs.left else ():
            # a replay of an old drafter graph could overwrite the logits of a newly captured graph before sampling
            graphs.buckets = ()
            graphs.renew()
        self.graphs.capture(stop)
        if self.sampler is not None:
            with self.graphs.noting("sampling"):
                self.sampler.capture(self.graphs.buckets, self.graphs.capture_run)
        for what, graphs in () if self.graphs.left else self.beside.items():
            graphs.capture(stop)
            self.graphs.failure = self.graphs.failure or (graphs.failure and f"{what}, {graphs.failure}")
        return self.is_captured

    def release(self) -> None:
        """Drop all graphs, with the memory they hold. The engine has ended."""
        for graphs in (self.graphs, *self.beside.values()):
            if graphs is not None:
                graphs.release()
        self.beside.clear()

    def forward(self, step: Step, before: SampledTokens | None = None, num_layers: int | None = None) -> ForwardOutput:
        """Copy shared pages that are about to be written, run the model, and save state checkpoints.

        before      provides the input tokens of a step that runs ahead
        num_layers  runs only the first layers, without graphs, to measure memory
        """
        self.copy_pages(step)
        output = self._forward(step, before, num_layers)
        for part in step.scheduled:
            if part.saves is not None:
                self.cache.copy_slot(part.saves.source, part.saves.target)
        return output

    def copy_pages(self, step: Step) -> None:
        """Copy the shared pages that a step is about to write, if that is still to be done."""
        for copy in step.copies:
            self.cache.copy_page(copy.group, copy.source, copy.target)
        step.copies.clear()

    def _forward(self, step: Step, before: SampledTokens | None, num_layers: int | None) -> ForwardOutput:
        parts = step.scheduled
        bucket = None if self.graphs is None or num_layers is not None else self.graphs.bucket(parts)
        if self.graphs is not None and bucket is not None:
            hidden, logits = self.graphs.replay(bucket, parts, before)
            starts = list(accumulate((part.num_tokens for part in parts), initial=0))
            self._notify(step, hidden[: starts.pop()])
            wanted = [row for part, start in zip(parts, starts, strict=True) for row in row_range(part, start)]
            return ForwardOutput(self.model, hidden, logits, bucket.shape, wanted)
        self._encode_images(step)
        batch = self.builder.build(step)
        if before is not None:
            before.fill(batch.token_ids, step.scheduled)
        samples = any(not part.sequence.request.pooling for part in step.scheduled)
        guessed = any(part.drafts for part in step.scheduled)
        if num_layers is None and samples and (guessed or self.sampler is None and batch.is_decode):
            by_layer = self.listener is not None and self.listener.taps is not None
            # not every row is wanted, for example, where a grammar forced some of the tokens
            if by_layer or batch.images or not batch.wants_every_row:
                hidden = self._forward_and_notify(step, batch)
                return ForwardOutput(self.model, hidden, self.model.logits(hidden))
            greedy = any(is_plain_greedy(part.sequence.params) for part in step.scheduled)
            hidden, logits, best = self.model.step(batch, self.cache, greedy)
            self._notify(step, hidden)
            return ForwardOutput(self.model, hidden, logits, best=best)
        if num_layers is None:
            return ForwardOutput(self.model, self._forward_and_notify(step, batch))
        return ForwardOutput(self.model, self.model.forward(batch, self.cache, num_layers=num_layers))

    def _forward_and_notify(self, step: Step, batch: ForwardBatch) -> Tensor:
        """Run the model, notify the listener, and return the requested rows."""
        if self.listener is None:
            return self.model.forward(batch, self.cache)
        hidden = self.model.forward(batch, self.cache, every_row=True)
        self._notify(step, hidden)
        return hidden if batch.wants_every_row else hidden[batch.logits_indices]

    def _notify(self, step: Step, hidden: Tensor) -> None:
        """Notify the listener. If it fails, it is removed; no request is affected."""
        if self.listener is None:
            return
        try:
            self.listener.hear(step, hidden)
        except Exception as error:
            if is_device_lost(error):
                raise
            log.error("no more drafts from hidden states: reading those of a step failed", exc_info=error)
            self.listener.reach = 0
            self.listener = None

    def projected(self, vector: Tensor) -> Tensor:
        """Apply the model's output projection to a pooled vector."""
        return self.model.projected(vector)

    def _encode_images(self, step: Step) -> None:
        """Run the vision tower on images first needed in this step. The listener reads one token further."""
        for part in step.scheduled:
            end = part.start + part.num_tokens + (self.listener is not None)
            for image in part.sequence.request.images:
                if image.vectors is None and image.start < end and part.start < image.end:
                    image.vectors = self.model.image_vectors(torch.from_numpy(image.pixels))
                    image.pixels = None

    def samples_ahead(self, output: ForwardOutput) -> bool:
        """True if the rows of draft tokens can be sampled together with the others, in a single replay."""
        return self.sampler is not None and output.shape is not None

    def sample(
        self, output: ForwardOutput, rows: list[int], sequences: list[Sequence], ahead: Many[int] = ()
    ) -> SampledTokens:
        """Sample a token for each of `sequences` from its row of `output`; `ahead` as in `DeviceSampler.sample`."""
        if not sequences:
            return SampledTokens([], list)
        if self.sampler is None:
            return sample_batch(output.logits(rows), sequences, output.best(rows))
        if output.shape is not None and output.ready is not None:
            return self.sampler.sample(output.ready, output.places(rows), sequences, output.shape, ahead)
        return self.sampler.sample(output.logits(rows), list(range(len(rows))), sequences)
