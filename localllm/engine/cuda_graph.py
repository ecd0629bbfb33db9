"""Decode steps captured as CUDA graphs, one per batch bucket, and replayed: no launch costs, no Python in between.

A graph reads fixed input buffers (`DecodeInputs`) and leaves hidden states and logits in fixed outputs. Eager mode
stays the oracle: what is not captured, or cannot be, runs there, and `failure` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.models.inputs import ForwardBatch
from localllm.models.kv_cache import KVCache
from localllm.models.model import Model

from .decode_inputs import DecodeInputs
from .sampled_tokens import SampledTokens
from .scheduler import Step

log = logging.getLogger(__name__)

WARM_RUNS = 2  # eager runs before a capture: kernels compile, libraries take their workspaces
Run = Callable[[], tuple[Tensor, ...]]
Captured = tuple[tuple[Tensor, ...], Callable[[], None]]  # (outputs, replay)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One captured graph."""

    size: int
    hidden: Tensor
    logits: Tensor
    replay: Callable[[], None]


class CudaCapture:
    """Captures into one memory pool, shared by all buckets: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Captured:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_RUNS):
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # a capture that cannot end leaves its stream current; `stream` restores the one before it. Other threads (a
        # tokenizer, an interface) may call into CUDA meanwhile: only this one is watched
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            outputs = run()
        return outputs, graph.replay


class DecodeGraphs:
    """The graphs of one model.

    sizes    batch sizes to capture, ascending
    capture  `CudaCapture()`, or what tests have in its place
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        inputs: DecodeInputs,
        sizes: tuple[int, ...],
        capture: Callable[[Run], Captured],
    ) -> None:
        self._model = model
        self._cache = cache
        self._inputs = inputs
        self._sizes = sizes
        self.capture_run = capture
        self.buckets: tuple[Bucket, ...] = ()  # what was captured, ascending
        self.failure = ""  # why a bucket was not captured; it and larger ones run eagerly

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """A capture that fails is told as `failure`: what belongs to it is launched instead."""
        try:
            yield
        except Exception as error:
            self.failure = f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            log.warning("CUDA graphs: %s", self.failure, exc_info=error)

    @property
    def captured(self) -> tuple[int, ...]:
        return tuple(bucket.size for bucket in self.buckets)

    @property
    def note(self) -> str:
        """For the run summary: what is captured, or why not."""
        if self.failure:
            rest = f", {', '.join(map(str, self.captured))} captured" if self.captured else ""
            return f"CUDA graphs failed ({self.failure}){rest}"
        return f"graphs {','.join(map(str, self.captured))}"

    @torch.inference_mode()
    def capture(self, left: tuple[int, ...] | None = None, stop: Callable[[], bool] = lambda: False) -> tuple[int, ...]:
        """Capture buckets anew, the largest first: the smaller ones fit into its memory. Failures are noted.

        left   which; None: all
        stop   asked before each: what is left then keeps the graph it had

        Returns the sizes that are left.
        """
        waiting = sorted(self._sizes if left is None else left, reverse=True)
        if len(waiting) == len(self._sizes):
            self.failure = ""
        self._inputs.load(())
        while waiting and not stop():
            size = waiting.pop(0)
            self.buckets = tuple(bucket for bucket in self.buckets if bucket.size != size)  # its memory goes first
            batch = self._inputs.batch(size)

            def run(batch: ForwardBatch = batch) -> tuple[Tensor, Tensor]:
                hidden = self._model.forward(batch, self._cache)
                return hidden, self._model.logits(hidden)

            with self.noting(f"batch {size}"):
                (hidden, logits), replay = self.capture_run(run)
                kept = (*self.buckets, Bucket(size, hidden, logits, replay))
                self.buckets = tuple(sorted(kept, key=lambda bucket: bucket.size))
        return tuple(waiting)

    def takes(self, step: Step) -> bool:
        """Whether a step is one token for each of no more sequences than the largest graph has, without adapters."""
        return (
            bool(self.buckets)
            and len(step.scheduled) <= self.buckets[-1].size
            and all(part.num_tokens == 1 and part.sequence.place < 0 for part in step.scheduled)
        )

    def forward(self, step: Step, before: SampledTokens | None = None) -> Bucket:
        """The bucket whose first rows are the step's, valid until the next forward.

        before   gives tokens that are not known yet
        """
        bucket = next(bucket for bucket in self.buckets if bucket.size >= len(step.scheduled))
        self._inputs.load(step.scheduled, before)
        bucket.replay()
        return bucket
