"""Decode steps captured as CUDA graphs, one per number of tokens, and replayed: no launch costs, no Python in between.

A graph reads fixed input buffers (`DecodeInputs`) and leaves its results in fixed outputs. Attention takes every token
as a sequence of its own, so a step with guessed tokens is a decode step of more rows; only layers that keep states need
graphs that know which tokens follow each other (`Shape.several`). Eager mode stays the oracle: what is not captured, or
cannot be, runs there, and `failure` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.verify.tuning import one_capture
from localllm.models.inputs import ForwardBatch
from localllm.models.kv_cache import KVCache
from localllm.models.model import Model

from .decode_inputs import DecodeInputs
from .sampled_tokens import SampledTokens
from .scheduler import Scheduled

log = logging.getLogger(__name__)

WARM_RUNS = 2  # eager runs before a capture: kernels compile, libraries take their workspaces
Run = Callable[[], tuple[Tensor, ...]]
Captured = tuple[tuple[Tensor, ...], Callable[[], None]]  # (outputs, replay)


class Shape(NamedTuple):
    """What a graph has room for.

    rows     tokens
    several  some sequences have several of them, and layers keep states: at least one sequence less than tokens
    """

    rows: int
    several: bool = False


def shapes_of(sizes: Iterable[int], guess_sizes: Iterable[int], keeps_states: bool) -> tuple[Shape, ...]:
    """Of decode steps of so many sequences, and of steps with guesses of so many tokens."""
    return tuple(sorted({*map(Shape, sizes), *(Shape(size, keeps_states) for size in guess_sizes)}))


@dataclass(frozen=True, slots=True)
class Bucket:
    """One captured graph: `outputs` are what `DecodeGraphs` was told to compute, a row a token."""

    shape: Shape
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


class CudaCapture:
    """Captures into one memory pool, shared by all buckets: only one of them runs at a time.

    Another engine of this process may decode meanwhile. What runs here runs on the stream of all steps, since kernels
    that count their finished programs share the counters of a card. One capture waits for another, since torch has one
    stream for them all.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Captured:
        for _ in range(WARM_RUNS):
            run()
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        # a capture that cannot end leaves its stream current; `stream` restores the one before it. Other threads (a
        # tokenizer, an interface) may call into CUDA meanwhile: only this one is watched
        with (
            one_capture,
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            outputs = run()
        return outputs, graph.replay


class DecodeGraphs:
    """The graphs of one model, or of its head.

    compute  from a batch, in fixed memory, to a row of each output for every token
    shapes   what to capture
    capture  `CudaCapture()`, or what tests have in its place
    keeps_states  whether a graph must know which tokens follow each other
    """

    def __init__(
        self,
        compute: Callable[[ForwardBatch], tuple[Tensor, ...]],
        inputs: DecodeInputs,
        shapes: tuple[Shape, ...],
        capture: Callable[[Run], Captured],
        keeps_states: bool = False,
    ) -> None:
        self._compute = compute
        self.inputs = inputs
        self.shapes = shapes
        self.capture_run = capture
        self._keeps_states = keeps_states
        self.buckets: tuple[Bucket, ...] = ()  # what was captured, ascending
        self.failure = ""  # why a bucket was not captured; larger ones take its steps, or they run eagerly

    @classmethod
    def of(
        cls,
        model: Model,
        cache: KVCache,
        inputs: DecodeInputs,
        shapes: tuple[Shape, ...],
        capture: Callable[[Run], Captured],
    ) -> DecodeGraphs:
        """Of a whole model: hidden states before the last norm, and logits."""

        def compute(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
            hidden = model.forward(batch, cache)
            return hidden, model.logits(hidden)

        return cls(compute, inputs, shapes, capture, bool(model.states))

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """A capture that fails is told as `failure`: what belongs to it is launched instead."""
        try:
            yield
        except Exception as error:
            known, self.failure = (
                self.failure,
                f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            )
            if not known:  # the others fail for the same reason
                log.warning("CUDA graphs: %s", self.failure, exc_info=error)

    @property
    def captured(self) -> tuple[int, ...]:
        """Tokens of each graph, ascending."""
        return tuple(sorted({bucket.shape.rows for bucket in self.buckets}))

    @property
    def note(self) -> str:
        """For the run summary: what is captured, or why not."""
        if self.failure:
            rest = f", {', '.join(map(str, self.captured))} captured" if self.captured else ""
            return f"CUDA graphs failed ({self.failure}){rest}"
        return f"graphs {','.join(map(str, self.captured))}"

    @torch.inference_mode()
    def capture(
        self, left: tuple[Shape, ...] | None = None, stop: Callable[[], bool] = lambda: False
    ) -> tuple[Shape, ...]:
        """Capture buckets anew, the largest first: the smaller ones fit into its memory. Failures are noted.

        left   which; None: all
        stop   asked before each: what is left then keeps the graph it had

        Returns the shapes that are left.
        """
        waiting = sorted(self.shapes if left is None else left, reverse=True)
        if len(waiting) == len(self.shapes):
            self.failure = ""
        while waiting and not stop():
            shape = waiting.pop(0)
            self.buckets = tuple(bucket for bucket in self.buckets if bucket.shape != shape)  # its memory goes first
            self.inputs.load((), rows=shape.rows)
            batch = self.inputs.batch(*shape)
            with self.noting(f"batch {shape.rows}"):
                outputs, replay = self.capture_run(partial(self._compute, batch))
                kept = (*self.buckets, Bucket(shape, outputs, replay))
                self.buckets = tuple(sorted(kept, key=lambda bucket: bucket.shape))
        return tuple(waiting)

    def bucket(self, parts: Many[Scheduled]) -> Bucket | None:
        """The smallest graph for a step of sequences that decode, none with an adapter; None where there is none.

        A piece of a prompt can be one token, too: not of one with images, which no graph reads.
        """
        rows = sum(part.num_tokens for part in parts)
        several = self._keeps_states and rows > len(parts)
        for part in parts:
            reads = part.start < part.sequence.num_prompt_tokens
            if part.sequence.place >= 0 or reads and (part.num_tokens > 1 or part.sequence.request.images):
                return None
        fitting = (one for one in self.buckets if one.shape.rows >= rows and one.shape.several == several)
        return next(fitting, None)

    def replay(
        self,
        bucket: Bucket,
        parts: Many[Scheduled],
        before: SampledTokens | None = None,
        ids: Many[int] | Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The outputs of the bucket, whose first rows are the parts' tokens, valid until the next replay of any.

        before   gives tokens that are not known yet
        ids      to read in place of the parts' own tokens
        """
        self.inputs.load(parts, before, bucket.shape.rows, ids)
        bucket.replay()
        return bucket.outputs
