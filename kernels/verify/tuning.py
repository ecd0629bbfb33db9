"""Autotuning of tile sizes on the GPU in use.

A kernel with several candidates calls `tuner(device).pick(...)` at launch. It gets the winner measured on this GPU, or
its first candidate, so that it can run immediately; all candidates are timed later, while the engine is idle (`tune`),
and the winner is stored per GPU, driver, Triton version and shape (`records.py`). A kernel lists at most eight
candidates, the expected best first.

    shape = Shape("linear_gemv", (n, k, group_size))
    tile = tuner(x.device).pick(shape, candidates, trial)        # {"block_n": 64, "num_warps": 4, ...}

`trial(tile)` returns a call that launches the kernel once on its own data. It stays alive until the shape is tuned, so
it must not hold the caller's activations or write to live data. The call should return the kernel's result: a candidate
that disagrees with the first one, which the self-test has verified, is never used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from .records import Records
from .trial import compare, is_device_lost

MAX_CANDIDATES = 8
BUDGET_S = 20.0  # maximum duration of one `tune`
WARM_RUNS = 3
POLL_S = 0.005  # interval between checks whether to stop
# relative difference allowed between two candidates: sums in a different order, rounded to bfloat16
AGREEMENT = 2e-2
STEADY = 0.10  # maximum change of the first candidate's time when it is timed again; beyond it the GPU's clocks changed
WORTH = 0.97  # a candidate wins if it takes at most this share of the first one's time; smaller gains are noise

one_capture = threading.Lock()  # per process: another engine may be capturing its steps

Tile = Mapping[str, int]
Trial = Callable[[Tile], Callable[[], object]]


class Sampled:
    """A trial on random data, which `make` creates for the first candidate and `forget` drops.

    run   (data, tile) -> the call to time
    """

    def __init__(self, make: Callable[[], Any], run: Callable[[Any, Tile], Callable[[], object]]) -> None:
        self._make, self._run = make, run
        self._data: Any = None

    def __call__(self, tile: Tile) -> Callable[[], object]:
        if self._data is None:
            self._data = self._make()
        return self._run(self._data, tile)

    def forget(self) -> None:
        self._data = None


class Shape(NamedTuple):
    """Everything the best tile depends on besides the GPU."""

    op: str  # the kernel: linear_gemv, attention_decode, ...
    key: tuple[int | str, ...]  # relevant sizes: N, K, group size, class of M

    @property
    def name(self) -> str:
        """The key in the records."""
        return f"{self.op}:{','.join(str(part) for part in self.key)}"


@dataclass(frozen=True, slots=True)
class Tuned:
    """Tuning result of one shape."""

    shape: Shape
    tile: Tile  # the winner
    us: float  # the winner's microseconds per launch
    first_us: float  # the first candidate's
    failed: tuple[str, ...] = ()  # candidates that failed to run or gave wrong results, with the reason


@dataclass(slots=True)
class Tuner:
    """Winners on one GPU, and the shapes that still have to be timed."""

    records: Records | None = None
    num_unsteady: int = 0  # shapes whose timings were discarded
    _picked: dict[Shape, Tile] = field(default_factory=dict)
    _jobs: dict[Shape, tuple[tuple[Tile, ...], Trial]] = field(default_factory=dict)  # not timed yet
    _compiler: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "compile"))
    _timing: threading.Lock = field(default_factory=threading.Lock)  # another engine on the GPU may be tuning

    def use(self, records: Records) -> None:
        """Use this GPU's stored winners; forget earlier picks, so that they are looked up again."""
        self.records = records
        self._picked.clear()

    def picked(self, shape: Shape) -> Tile | None:
        """The tile that `pick` returned before, if any: saves callers from building candidates and a trial again."""
        return self._picked.get(shape)

    def pick(self, shape: Shape, candidates: Sequence[Tile], trial: Trial | None = None) -> Tile:
        """Return the tile to use now. Candidates beyond the eighth are ignored; without a `trial` none are timed."""
        if (known := self.picked(shape)) is not None:
            return known
        if not candidates:
            raise ValueError(f"{shape.name} has no candidates")
        kept = tuple(candidates[:MAX_CANDIDATES])
        known = self.records.get(shape.name) if self.records is not None else None
        winner = next((tile for tile in kept if known is not None and tile == known.get("tile")), None)
        if winner is None and trial is not None and len(kept) > 1:
            self._jobs[shape] = kept, trial
        self._picked[shape] = winner if winner is not None else kept[0]
        return self._picked[shape]

    @property
    def num_measured(self) -> int:
        """Number of shapes with a known winner on this GPU."""
        return len(self.records.items()) if self.records is not None else 0

    @property
    def waiting(self) -> tuple[Shape, ...]:
        """Shapes in use that have not been timed on this GPU."""
        return tuple(self._jobs)

    def tune(
        self,
        measure: Callable[[Callable[[], object]], float],
        budget_s: float = BUDGET_S,
        stop: Callable[[], bool] = lambda: False,
        on_tuned: Callable[[Tuned], None] = lambda tuned: None,
        compile_ahead: Callable[[Callable[[], object]], None] | None = None,
    ) -> list[Tuned]:
        """Time waiting shapes until `budget_s` is used up or `stop()` is true; winners apply from the next launch.

        measure        call -> its duration in seconds (`gpu_seconds` on a GPU)
        compile_ahead  compiles the kernels that a call launches; runs in its own thread, so `stop` takes effect sooner

        An interrupted shape is discarded and timed again the next time.
        """
        ends = time.monotonic() + budget_s
        results: list[Tuned] = []

        def must_end() -> bool:
            return stop() or time.monotonic() >= ends

        while not self._timing.acquire(timeout=POLL_S):
            if must_end():
                return results
        try:
            for shape in list(self._jobs):
                _, trial = self._jobs[shape]
                try:
                    tuned = self._tune_one(shape, measure, must_end, compile_ahead)
                finally:
                    if isinstance(trial, Sampled):  # an interrupted shape keeps its place, but not its random weights
                        trial.forget()
                if tuned is None:
                    break
                results.append(tuned)
                on_tuned(tuned)
        finally:
            self._timing.release()
        if self.records is not None:
            self.records.save()
        return results

    def _tune_one(
        self,
        shape: Shape,
        measure: Callable[[Callable[[], object]], float],
        stop: Callable[[], bool],
        compile_ahead: Callable[[Callable[[], object]], None] | None,
    ) -> Tuned | None:
        candidates, trial = self._jobs[shape]
        times: list[tuple[float, Tile]] = []
        failed: list[str] = []
        first_result = torch.empty(0)
        for tile in candidates:
            if stop():
                return None
            try:
                call = trial(tile)
                if compile_ahead is not None and not waited(self._compiler.submit(compile_ahead, call), stop):
                    return None
                result = call()
                if isinstance(result, torch.Tensor):
                    if not times:  # clone: the next launch overwrites it
                        first_result = result.clone()
                    elif reason := compare(result, first_result, AGREEMENT):
                        failed.append(f"{dict(tile)}: {reason}")
                        continue
                times.append((measure(call), tile))
            except Exception as error:  # too much shared memory, a compiler error: other candidates may still work
                if is_device_lost(error):
                    raise
                failed.append(f"{dict(tile)}: {type(error).__name__}: {str(error)[:120]}")
                if tile is candidates[0]:
                    break  # only its result was verified, so the others have nothing to agree with
        del self._jobs[shape]
        if not times:
            return Tuned(shape, candidates[0], 0.0, 0.0, tuple(failed))
        first_s, first = times[0]
        if len(times) > 1 and abs(again := measure(trial(first)) / first_s - 1) > STEADY:
            self.num_unsteady += 1  # not stored: the next start times the shape again
            failed.append(f"the GPU's speed changed by {again:.0%} during timing, as under a power or heat limit")
            return Tuned(shape, first, first_s * 1e6, first_s * 1e6, tuple(failed))
        best_s, best = min(times, key=lambda entry: entry[0])
        if best_s > WORTH * first_s:
            best_s, best = first_s, first
        self._picked[shape] = best
        if self.records is not None:
            self.records.put(shape.name, {"tile": dict(best), "us": best_s * 1e6, "first_us": first_s * 1e6})
        return Tuned(shape, best, best_s * 1e6, first_s * 1e6, tuple(failed))


def waited(task: Future[None], stop: Callable[[], bool]) -> bool:
    """Wait for `task` until `stop()`; return whether it ended. If not, it keeps running for the next attempt."""
    while not stop():
        with suppress(TimeoutError):
            task.exception(timeout=POLL_S)
            return True
    return False


@cache
def tuner(device: torch.device) -> Tuner:
    """The process-wide tuner of a GPU; separate per GPU, as the tiles of one may not fit in another's memory."""
    return Tuner()


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """A single capture stream per GPU: cuBLAS keeps a workspace per stream, 32 MiB on Hopper."""
    return torch.cuda.Stream(device)


def _replay(call: Callable[[], object]) -> Callable[[], None] | None:
    """Capture the call in a CUDA graph and return its replay; None if it cannot be captured."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream = capture_stream(torch.cuda.current_device())
    try:
        # not `torch.cuda.graph`, which runs the garbage collector and empties the allocator cache first
        with one_capture:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    call()
                finally:
                    graph.capture_end()
            current.wait_stream(stream)
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        if is_device_lost(error):
            raise
        return None
    return graph.replay


def gpu_seconds(call: Callable[[], object], runs: int = 9) -> float:
    """Median seconds of one call on the current CUDA stream, timed with events and a flushed L2.

    A decode step reads every weight once, so data left in the L2 by the previous launch would flatter small shapes. The
    flush reads its data: written lines would be evicted during the call, which costs 16 us on an H100. The call is
    captured once and replayed, as in a decode step: launches from Python (tens of microseconds) would take longer than
    a small kernel.
    """
    for _ in range(WARM_RUNS):
        call()
    call = _replay(call) or call
    size = max(8 << 20, 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    other = torch.zeros(size // 4, device="cuda")
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(runs)]
    for begin, end in events:
        other.sum()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[runs // 2] / 1e3
