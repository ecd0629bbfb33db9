"""Decode steps captured as CUDA graphs, one per number of tokens: a replay has no launch or Python overhead.

A graph reads fixed input buffers (`DecodeInputs`) and writes fixed outputs. Attention treats every token as its own
sequence, so a verification step is a decode step with more rows; only recurrent layers need graphs that know which
tokens follow each other (`Shape.several`). What the host looks up by token, such as n-gram rows in a file, it writes
into fixed memory before each replay (`prepare`). Steps without a graph run eagerly, which also is the reference for
tests; `failure` says why a capture failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.verify.tuning import capture_stream, one_capture
from localllm.models.inputs import ForwardBatch
from localllm.models.kv_cache import KVCache
from localllm.models.model import Model

from .decode_inputs import DecodeInputs
from .failures import is_device_lost
from .sampled_tokens import SampledTokens
from .scheduler import Scheduled

log = logging.getLogger(__name__)

WARM_RUNS = 2  # eager runs before a capture, to compile kernels and allocate library workspaces
Run = Callable[[], tuple[Tensor, ...]]
Captured = tuple[tuple[Tensor, ...], Callable[[], None]]  # (outputs, replay)


class Shape(NamedTuple):
    """The capacity of a graph.

    rows     tokens
    several  some sequences have several tokens, in a model with recurrent layers: at most rows - 1 sequences
    """

    rows: int
    several: bool = False


def shapes_of(sizes: Iterable[int], guess_sizes: Iterable[int], keeps_states: bool) -> tuple[Shape, ...]:
    """The shapes of decode steps (`sizes`, sequences) and of verification steps (`guess_sizes`, tokens)."""
    return tuple(sorted({*map(Shape, sizes), *(Shape(size, keeps_states) for size in guess_sizes)}))


@dataclass(frozen=True, slots=True)
class Bucket:
    """One captured graph; `outputs` are the results of `DecodeGraphs.compute`, one row per token."""

    shape: Shape
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


class CudaCapture:
    """Captures graphs into one memory pool shared by all buckets, since only one of them runs at a time.

    Another engine of this process may decode meanwhile. Captures use the same stream as all steps, because kernels that
    count their finished programs share one set of counters per GPU. Captures wait for each other, because there is a
    single capture stream per GPU.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Captured:
        for _ in range(WARM_RUNS):
            run()
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        # torch's own capture stream belongs to the GPU of the process's first capture
        apart = capture_stream(torch.cuda.current_device())
        # `stream` restores the current stream if a capture fails to end. "thread_local" allows CUDA calls from other
        # threads (tokenizer, interface) during the capture.
        with (
            one_capture,
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, stream=apart, capture_error_mode="thread_local"),
        ):
            outputs = run()
        return outputs, graph.replay


def _released(batch: ForwardBatch) -> tuple[Tensor, ...]:
    raise RuntimeError("these graphs were released")


class DecodeGraphs:
    """The graphs of one model, or of its MTP head.

    compute       maps a batch in fixed memory to outputs with one row per token
    shapes        shapes to capture
    capture       `CudaCapture()`, or a replacement in tests
    keeps_states  the model has recurrent layers, so graphs must know which tokens follow each other
    prepare       called with the loaded batch before each replay
    """

    def __init__(
        self,
        compute: Callable[[ForwardBatch], tuple[Tensor, ...]],
        inputs: DecodeInputs,
        shapes: tuple[Shape, ...],
        capture: Callable[[Run], Captured],
        keeps_states: bool = False,
        prepare: Callable[[ForwardBatch], None] | None = None,
    ) -> None:
        self._compute = compute
        self._prepare = prepare
        self.inputs = inputs
        self.shapes = shapes
        self.capture_run = capture
        self._keeps_states = keeps_states
        self.buckets: tuple[Bucket, ...] = ()  # captured graphs, ascending
        self.left = shapes  # shapes to capture
        self.failure = ""  # why a capture failed; its steps use a larger graph or run eagerly

    @classmethod
    def of(
        cls,
        model: Model,
        cache: KVCache,
        inputs: DecodeInputs,
        shapes: tuple[Shape, ...],
        capture: Callable[[Run], Captured],
    ) -> DecodeGraphs:
        """Graphs of a whole model, with hidden states before the final norm and logits as outputs."""
        ngrams, rows = model.ngrams, None
        if ngrams is not None:
            width, dtype = ngrams.facts.width, model.embedding.dtype
            rows = torch.zeros((inputs.most, width), dtype=dtype, device=inputs.device)

        def prepare(batch: ForwardBatch) -> None:
            if rows is not None and ngrams is not None:
                rows[: batch.token_ids.shape[0]].copy_(ngrams(batch, cache, rows.dtype))

        def compute(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
            if rows is not None:
                batch = replace(batch, ngram_rows=rows[: batch.token_ids.shape[0]])
            hidden = model.forward(batch, cache)
            return hidden, model.logits(hidden)

        return cls(compute, inputs, shapes, capture, bool(model.states), prepare if rows is not None else None)

    def release(self) -> None:
        """Drop the graphs and what they compute, which refers to the drafter that holds this object: a garbage
        collection does not find this cycle after `gc.freeze`.
        """
        self.buckets = ()
        self._compute, self._prepare = _released, None

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Context that records a failed capture in `failure` instead of raising, unless the GPU is lost."""
        try:
            yield
        except Exception as error:
            if is_device_lost(error):
                raise
            known, self.failure = (
                self.failure,
                f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            )
            if not known:  # later ones fail for the same reason
                log.warning("CUDA graphs: %s", self.failure, exc_info=error)

    @property
    def captured(self) -> tuple[int, ...]:
        """Numbers of tokens with a graph, ascending."""
        return tuple(sorted({bucket.shape.rows for bucket in self.buckets}))

    @property
    def note(self) -> str:
        """The captured sizes or the failure, for the run summary."""
        if self.failure:
            rest = f", {', '.join(map(str, self.captured))} captured" if self.captured else ""
            return f"CUDA graphs failed ({self.failure}){rest}"
        return f"graphs {','.join(map(str, self.captured))}"

    def renew(self) -> None:
        """Have every shape captured again; until then the old graphs are used."""
        self.left = self.shapes

    @torch.inference_mode()
    def capture(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Capture what is left, largest first, so that smaller ones fit into its memory. Failures are recorded.

        stop   checked before each capture
        """
        if len(self.left) == len(self.shapes):
            self.failure = ""
        while self.left and not stop():
            shape = max(self.left)
            self.left = tuple(one for one in self.left if one != shape)
            self.buckets = tuple(bucket for bucket in self.buckets if bucket.shape != shape)  # free its memory first
            self.inputs.load((), rows=shape.rows)
            batch = self.inputs.batch(*shape)
            with self.noting(f"batch {shape.rows}"):
                outputs, replay = self.capture_run(partial(self._compute, batch))
                kept = (*self.buckets, Bucket(shape, outputs, replay))
                self.buckets = tuple(sorted(kept, key=lambda bucket: bucket.shape))

    def bucket(self, parts: Many[Scheduled]) -> Bucket | None:
        """The smallest graph that can run a step of decoding sequences without adapters; None if there is none.

        A single prompt token also qualifies, unless the prompt has images, which graphs do not support.
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
        blocks: bool = False,
    ) -> tuple[Tensor, ...]:
        """Replay a graph for these parts; its outputs are valid until the next replay of any graph.

        before, ids, blocks   as in `DecodeInputs.load`
        """
        self.inputs.load(parts, before, bucket.shape.rows, ids, blocks)
        if self._prepare is not None:
            self._prepare(self.inputs.batch(*bucket.shape))
        bucket.replay()
        return bucket.outputs
