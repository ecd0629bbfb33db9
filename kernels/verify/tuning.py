"""Tile sizes: which candidate a kernel runs with on this card.

A kernel with choices asks `tuner(device).pick(...)` at launch. It gets the winner that was measured on this card, else
the first of its candidates, which runs at once; the others are timed later, in idle moments (`tune`), and the winner is
kept per card, driver, Triton and shape (`records.py`). Candidates come from the kernel, at most eight, the expected
best first.

    shape = Shape("linear_gemv", (n, k, group_size))
    tile = tuner(x.device).pick(shape, candidates, trial)        # {"block_n": 64, "num_warps": 4, ...}

`trial(tile)` returns a call that launches the kernel once, on data it made itself: what it holds lives until the shape
is tuned, so it keeps no activations of the caller, and writes nothing that matters. The call returns what the kernel
computed, where it can: a candidate that disagrees with the first one, which the self-test knows, is never used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import torch

from .records import Records
from .trial import compare, is_device_lost

MAX_CANDIDATES = 8
BUDGET_S = 20.0  # most seconds of one `tune`
WARM_RUNS = 3
POLL_S = 0.005  # between two questions whether to stop
# by how much of their size the numbers of two candidates may differ: sums in another order, rounded to bfloat16
AGREEMENT = 2e-2
STEADY = 0.10  # by how much the first candidate may differ when it is timed again: more, and the card's clocks changed
WORTH = 0.97  # a candidate replaces the one in use when it takes at most this share of its time: less is noise

one_capture = threading.Lock()  # in this process: another engine may capture its steps

Tile = Mapping[str, int]
Trial = Callable[[Tile], Callable[[], object]]


class Shape(NamedTuple):
    """What the best tile depends on, besides the card."""

    op: str  # the kernel: linear_gemv, attention_decode, ...
    key: tuple[int | str, ...]  # sizes that matter to it: N, K, group size, class of M

    @property
    def name(self) -> str:
        """The key in the records."""
        return f"{self.op}:{','.join(str(part) for part in self.key)}"


# (compute capability as 90, shape) -> the best tile of one card, the first candidate on cards like it, and that card.
# Filled from `localllm tune --json` on real cards, never by guess; candidates of a kernel stand beside the kernel.
STARTING_POINTS: dict[tuple[int, Shape], tuple[Tile, str]] = {}


def is_measured(capability: int) -> bool:
    """Whether any starting point comes from a card of this compute capability."""
    return any(known == capability for known, _ in STARTING_POINTS)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What timing one shape gave."""

    shape: Shape
    tile: Tile  # the winner
    us: float  # its microseconds a launch
    first_us: float  # those of the first candidate
    failed: tuple[str, ...] = ()  # candidates that did not run or were wrong, with the reason


@dataclass(slots=True)
class Tuner:
    """Winners of one card, and the shapes that still wait to be timed."""

    records: Records | None = None
    capability: int = 0
    num_unsteady: int = 0  # shapes whose times were worth nothing
    _picked: dict[Shape, Tile] = field(default_factory=dict)
    _jobs: dict[Shape, tuple[tuple[Tile, ...], Trial]] = field(default_factory=dict)  # not timed yet
    _compiler: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "compile"))
    _timing: threading.Lock = field(default_factory=threading.Lock)  # another engine on the card may be idle, too

    def use(self, records: Records, capability: int = 0) -> None:
        """Take the winners of this card; what was picked before is looked up again."""
        self.records, self.capability = records, capability
        self._picked.clear()

    def picked(self, shape: Shape) -> Tile | None:
        """What `pick` gave before: callers need not make candidates and a trial again, which takes longer."""
        return self._picked.get(shape)

    def pick(self, shape: Shape, candidates: Sequence[Tile], trial: Trial | None = None) -> Tile:
        """The tile to run with now. Candidates beyond the eighth are ignored; without a `trial` nothing is timed."""
        if (known := self.picked(shape)) is not None:
            return known
        if not candidates:
            raise ValueError(f"{shape.name} has no candidates")
        start, _ = STARTING_POINTS.get((self.capability, shape), ({}, ""))
        kept = tuple(sorted(candidates[:MAX_CANDIDATES], key=lambda tile: tile != start))
        known = self.records.get(shape.name) if self.records is not None else None
        winner = next((tile for tile in kept if known is not None and tile == known.get("tile")), None)
        if winner is None and trial is not None and len(kept) > 1:
            self._jobs[shape] = kept, trial
        self._picked[shape] = winner if winner is not None else kept[0]
        return self._picked[shape]

    @property
    def num_measured(self) -> int:
        """Shapes whose winner on this card is known."""
        return len(self.records.items()) if self.records is not None else 0

    @property
    def waiting(self) -> tuple[Shape, ...]:
        """Shapes in use that were not timed on this card."""
        return tuple(self._jobs)

    def tune(
        self,
        measure: Callable[[Callable[[], object]], float],
        budget_s: float = BUDGET_S,
        stop: Callable[[], bool] = lambda: False,
        on_tuned: Callable[[Tuned], None] = lambda tuned: None,
        compile_ahead: Callable[[Callable[[], object]], None] | None = None,
    ) -> list[Tuned]:
        """Time the waiting shapes until `budget_s` is over or `stop` says so; winners are used from the next launch.

        measure        a call -> seconds it takes (`gpu_seconds` on a card)
        compile_ahead  compiles what a call launches; run in a thread of its own, so that `stop` need not wait for it

        A shape is finished or not begun: one that was interrupted waits for the next time.
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
                tuned = self._tune_one(shape, measure, must_end, compile_ahead)
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
                    if not times:  # the next launch overwrites it
                        first_result = result.clone()
                    elif reason := compare(result, first_result, AGREEMENT):
                        failed.append(f"{dict(tile)}: {reason}")
                        continue
                times.append((measure(call), tile))
            except Exception as error:  # too much shared memory, a compiler's refusal: the others are still good
                if is_device_lost(error):
                    raise
                failed.append(f"{dict(tile)}: {type(error).__name__}: {str(error)[:120]}")
        del self._jobs[shape]
        if not times:
            return Tuned(shape, candidates[0], 0.0, 0.0, tuple(failed))
        first_s, first = times[0]
        if len(times) > 1 and abs(again := measure(trial(first)) / first_s - 1) > STEADY:
            self.num_unsteady += 1  # nothing is kept: the next start times it again
            failed.append(f"the card's speed changed by {again:.0%} meanwhile: its power or heat is limited")
            return Tuned(shape, first, first_s * 1e6, first_s * 1e6, tuple(failed))
        best_s, best = min(times, key=lambda entry: entry[0])
        if best_s > WORTH * first_s:
            best_s, best = first_s, first
        self._picked[shape] = best
        if self.records is not None:
            self.records.put(shape.name, {"tile": dict(best), "us": best_s * 1e6, "first_us": first_s * 1e6})
        return Tuned(shape, best, best_s * 1e6, first_s * 1e6, tuple(failed))


def waited(task: Future[None], stop: Callable[[], bool]) -> bool:
    """Whether it ended before `stop` said so; one that did not goes on, and the next attempt finds what it made."""
    while not stop():
        with suppress(TimeoutError):
            task.exception(timeout=POLL_S)
            return True
    return False


@cache
def tuner(device: torch.device) -> Tuner:
    """The one of a card in this process: another card may not even have the memory for its tiles."""
    return Tuner()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One: cuBLAS keeps a workspace for each stream that it was used on, 32 MiB on a Hopper."""
    return torch.cuda.Stream(device)


def _replay(call: Callable[[], object]) -> Callable[[], None] | None:
    """The call's kernels as a CUDA graph; None where it cannot be captured."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream = _capture_stream(torch.cuda.current_device())
    try:
        # not `torch.cuda.graph`: it collects garbage and empties the cache first
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
    """Median seconds of one call on the current CUDA stream, by events, each after other data went through the L2.

    That data is read: what is written leaves the L2 during the call, which costs an H100 16 us.

    Decoding reads every weight once a step: what the cache still holds of the last launch would flatter small shapes.
    The call is captured once and replayed, as it is in a decode step: between two events the host would need longer
    for its launches (tens of microseconds from Python) than a small kernel runs.
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
