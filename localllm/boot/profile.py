"""Memory profile: runs the worst-case steps of a plan once and compares their memory use with the plan.

The worst-case steps are the last prefill chunk at full context, one decode step per bucket with all sequences at full
context, and sampling at the largest batch. Earlier chunks are skipped, because the contents of pages do not affect
memory. On a GPU, all of this runs before the first request, and torch's allocator is compared term by term. On the CPU,
it runs after the first answer while the engine is idle: it touches every planned page, runs the steps through one layer
of each kind (other layers reuse the same memory), and compares the process's anonymous memory.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import ClassVar, Self

import torch

from localllm.boot.memory_meter import Peak, gpu_peak
from localllm.device.memory import memory_limits
from localllm.engine.failures import is_out_of_memory
from localllm.engine.pages import Pages
from localllm.engine.runner import Runner
from localllm.engine.scheduler import Scheduled, Step
from localllm.engine.sequence import Sequence
from localllm.errors import DeviceError
from localllm.kernels.experts import tokens_of_tiles
from localllm.kernels.verify.trial import LINEAR_TOKENS
from localllm.kernels.verify.tuning import waited
from localllm.models.architectures.facts import ModelFacts, expert_counts
from localllm.models.model import Model
from localllm.models.parallel import Message, ParallelModel
from localllm.plan.memory import GRAPH_BYTES
from localllm.plan.plan import Plan
from localllm.plan.profiles import MemoryProfile, Term, farthest
from localllm.request import Request, SamplingParams

log = logging.getLogger(__name__)

# time limit for touching pages on the CPU; the remaining pages are only counted, since their size is known exactly
TOUCH_S = 6.0
BYTES_AT_ONCE = 16 << 20


class WorstSteps:
    """The steps that need the most memory, run over pages that the caller allows to be overwritten.

    pages    page ids per cache group; too few for the context are reused
    slots    state slots, likewise
    samples  False skips sampling
    """

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        pages: Many[Many[int]],
        num_layers: int | None = None,
        slots: Many[int] = (),
        samples: bool = True,
    ) -> None:
        self._runner = runner
        self._plan = plan
        self.pages = pages
        self.slots = slots
        self._num_layers = num_layers
        self._samples = samples

    def prefill(self) -> None:
        """Run the last prefill chunk of a prompt that fills the context, and sample a token."""
        length = self._plan.ctx - 1
        rows = min(self._plan.prefill_budget, length)
        self.chunk(length - rows, rows)()

    def decode(self, count: int) -> None:
        """Run a decode step for `count` sequences that fill the context, and sample."""
        self.decoding(count)()

    def check_guesses(self, count: int) -> None:
        """Like `decode`, with the plan's maximum of draft tokens after the first sequence."""
        self.checking(count, min(self._plan.num_drafts, self._plan.ctx - 2))()

    def checking(self, count: int, guessed: int, waits: bool = True) -> Callable[[], None]:
        """Like `decoding`, with `guessed` draft tokens after the first sequence."""
        first, *others = [self._sequence(self._plan.ctx - 1, 1 + guessed, i) for i in range(count)]
        del first.token_ids[len(first.token_ids) - guessed :]
        first.num_prompt_tokens = len(first.token_ids) - 1  # drafts follow answer tokens, as graphs expect
        return partial(self._run, [first, *others], [1] * count, waits, drafts=(1,) * guessed)

    def chunk(self, start: int, count: int) -> Callable[[], None]:
        """A call that prefills tokens [start, start + count) of a sequence and samples the next token."""
        return partial(self._run, [self._sequence(start + count, count, 0)], [count])

    def prompt(self, count: int) -> None:
        """Prefill a prompt of `count` tokens and sample the next token."""
        self.chunk(0, count)()

    def mixed(self, count: int, length: int) -> None:
        """Prefill a prompt of `count` tokens in the same step as a decoding sequence of `length` tokens."""
        self._run([self._sequence(count, count, 0), self._sequence(length, 1, 1)], [count, 1])

    def decoding(self, count: int, waits: bool = True) -> Callable[[], None]:
        """A call that decodes one token for each of `count` sequences that fill the context.

        waits   False leaves the tokens on the device, as the engine does when it runs one step ahead
        """
        sequences = [self._sequence(self._plan.ctx - 1, 1, index) for index in range(count)]
        return partial(self._run, sequences, [1] * count, waits)

    def _sequence(self, length: int, written: int, index: int) -> Sequence:
        """A sequence of `length` tokens whose last `written` tokens go to pages not shared with other sequences."""
        params = SamplingParams(temperature=1.0, top_p=0.95, seed=index, max_tokens=2)
        sequence = Sequence(Request([1] * length, params), index, len(self.pages), index, 2)
        size = self._plan.page_size
        count = -(-length // size)
        first_written = (length - written) // size
        own = count - first_written
        for group, pages in enumerate(self.pages):
            table = [pages[(index * count + i) % len(pages)] for i in range(count)]
            table[first_written:] = [pages[(index * own + i) % len(pages)] for i in range(own)]
            sequence.block_tables[group] = table
        sequence.table_version = 1
        if self.slots:
            sequence.slot = self.slots[index % len(self.slots)]
        return sequence

    @torch.inference_mode()
    def _run(
        self, sequences: list[Sequence], news: list[int], waits: bool = True, drafts: tuple[int, ...] = ()
    ) -> None:
        """Run one step; `drafts` are draft tokens of the first sequence."""
        step = Step([Scheduled(s, s.num_tokens - new, new) for s, new in zip(sequences, news, strict=True)])
        first = step.scheduled[0]
        step.scheduled[0] = replace(first, num_tokens=first.num_tokens + len(drafts), drafts=drafts)
        output = self._runner.forward(step, num_layers=self._num_layers)
        if not self._samples:
            return
        # an eager step computes the logits of all rows before it samples any
        held = output.logits(list(range(len(sequences) + len(drafts)))) if drafts else None
        draw = self._runner.sample(output, list(range(len(sequences))), sequences)
        del held
        if waits:
            draw.results()


class Watch:
    """Context manager that records the peak memory of every other rank; records nothing for a single process.

    left   pages per cache group that are counted without being touched
    """

    def __init__(self, model: Model) -> None:
        self._lead = model.lead if isinstance(model, ParallelModel) else None
        self.left: list[int] = []
        self.found: list[Message] = []

    def __enter__(self) -> Self:
        if self._lead is not None:
            self._lead.tell({"do": "watch"})
        return self

    def __exit__(self, *error: object) -> None:
        if self._lead is not None:
            self.found = self._lead.ask({"do": "watched", "left": self.left})


def profile_gpu(runner: Runner, plan: Plan, held: Mapping[str, int]) -> MemoryProfile:
    """Run the worst-case steps now. Raises DeviceError if several ranks run out of memory in them.

    held   bytes that torch's allocator took for "weights", "kv", "tables" and "graphs"
    """
    started = time.monotonic()
    planned = dict(plan.work_terms)
    device = torch.device(plan.device)
    worst = WorstSteps(runner, plan, [range(count) for count in plan.num_pages], slots=range(plan.num_slots))
    terms = [
        Term("weights", plan.weight_bytes, held["weights"]),
        Term("kv", plan.kv_bytes, held["kv"]),
        Term("tables", planned["tables"], held.get("tables", 0)),
        Term(
            "graphs",
            planned["graphs"] - GRAPH_BYTES * (len(plan.graph_buckets) + len(plan.guess_buckets)),
            held.get("graphs", 0),
        ),
    ]
    others: list[list[Message]] = []  # per step, the answers of the other ranks
    failure = ""
    eager = WorstSteps(runner, plan, worst.pages, num_layers=1 << 30, slots=worst.slots)  # every layer, without graphs
    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("activations", eager.prefill),
        ("logits", partial(eager.check_guesses if plan.num_drafts else eager.decode, plan.max_parallel)),
        *((f"graph of {size}", partial(worst.decode, size)) for size in plan.graph_buckets),
    )
    for name, step in steps:
        try:
            with Watch(runner.model) as watch:
                terms.append(Term(name, planned.get(name, 0), gpu_peak(device, step)))
            others.append(watch.found)
        except Exception as error:
            if isinstance(error, DeviceError) or not is_out_of_memory(error):
                raise
            torch.cuda.empty_cache()
            failure = f"out of memory in the worst-case step of {name}"
            break
    own = MemoryProfile(tuple(terms), "cuda", time.monotonic() - started, failure)
    each = zip(*others, strict=True)  # per rank, its answers for all steps
    names = [name for name, _ in steps]
    theirs = [_of_rank(plan.of_rank(rank), said, names) for rank, said in enumerate(each, 1)]
    return _of_all([own, *theirs])


def _of_rank(plan: Plan, said: Many[Message], steps: Many[str]) -> MemoryProfile:
    """The profile of another rank on a GPU; its tables are part of the first step."""
    planned = dict(plan.work_terms)
    terms = [Term("weights", plan.weight_bytes, said[0]["weights"]), Term("kv", plan.kv_bytes, said[0]["kv"])]
    for step, one in zip(steps, said, strict=True):
        terms.append(Term(step, planned.get(step, 0), one["peak"]))
    return MemoryProfile((*terms, Term("tables", planned["tables"], 0)), "cuda", 0.0)


def _of_all(profiles: list[MemoryProfile]) -> MemoryProfile:
    """The decisive profile, with its rank if there are several."""
    if len(profiles) == 1:
        return profiles[0]
    named = [replace(one, rank=rank, seconds=profiles[0].seconds) for rank, one in enumerate(profiles)]
    for one in named:
        log.info("rank %s: %s", one.rank, one)
    return farthest(named)


def warm_up(runner: Runner, plan: Plan, facts: ModelFacts) -> None:
    """Launch every kernel that requests may need, over pages not yet in use.

    Loading or compiling a kernel takes milliseconds to seconds, which the first prompt of that length would wait for.
    """
    worst = WorstSteps(runner, plan, [range(count) for count in plan.num_pages], 1 << 30, range(plan.num_slots))
    for step in _every_kernel(runner, plan, facts):
        step(worst)


def _every_kernel(runner: Runner, plan: Plan, facts: ModelFacts) -> Iterator[Callable[[WorstSteps], None]]:
    """Steps that together launch every kernel outside of graphs."""
    largest = min(plan.prefill_budget, plan.ctx - 1)
    counts = *LINEAR_TOKENS["cuda"], *tokens_of_tiles(*expert_counts(facts))
    for count in sorted({min(count, largest) for count in counts}):
        yield methodcaller("prompt", count)
    if plan.max_parallel > 1:
        # E4M3 pages are widened up front for many queries, but not for few, nor next to a sequence this long
        short = {(min(100, largest), 2), (largest, 2)} if plan.kv == "fp8" else set()
        for count, length in sorted(short | {(largest, plan.ctx - 1)}):
            yield methodcaller("mixed", count, length)
    captured = max(runner.graphs.captured, default=0) if runner.graphs is not None else 0
    for count in LINEAR_TOKENS["cuda"]:
        if captured < count <= plan.max_parallel:
            yield methodcaller("decode", count)


class WarmAgain:
    """Idle job (`Engine.when_idle`) that repeats `warm_up` over free pages after new tiles were chosen.

    recorded   records what a call would launch; returns a function that compiles it in another thread
    """

    def __init__(
        self,
        runner: Runner,
        pages: Pages,
        plan: Plan,
        facts: ModelFacts,
        recorded: Callable[[Callable[[], object]], Callable[[], None]] | None,
    ) -> None:
        self._runner, self._pages, self._plan = runner, pages, plan
        self._recorded = recorded
        self._left = deque(_every_kernel(runner, plan, facts))
        self._compiling: Future[None] | None = None

    @property
    def is_done(self) -> bool:
        return not self._left

    def __call__(self, must_stop: Callable[[], bool]) -> bool:
        try:
            self._run_steps(must_stop)
        except BaseException:
            self._left.clear()  # counts as done, so that the next change of tiles starts a new job
            raise
        return self.is_done

    def _run_steps(self, must_stop: Callable[[], bool]) -> None:
        free = [pool.free_pages() for pool in self._pages.pools]
        slots = self._pages.slots.free_pages() if self._pages.slots is not None else []
        if not all(free) or self._plan.num_slots and not slots:
            self._left.clear()  # do not evict cached prefixes for this
        given = self._runner, self._plan, free, 1 << 30, slots
        worst, noted = WorstSteps(*given), WorstSteps(*given, samples=False)
        while self._left and not must_stop():
            step = self._left[0]
            if self._recorded is not None and self._compiling is None:
                compiling = self._recorded(partial(step, noted))
                self._compiling = ThreadPoolExecutor(1, "compile").submit(compiling)
            if self._compiling is None or waited(self._compiling, must_stop):
                step(worst)
                self._left.popleft()
                self._compiling = None


class Neighbours:
    """Counts how often a model was loaded or freed in this process. Memory is attributable to one model in between."""

    changes: ClassVar[int] = 0


class CpuProfiler:
    """Idle job (`Engine.when_idle`) that profiles a plan on the CPU; a request interrupts it, and it starts over.

    base_bytes     anonymous memory of the process without this model
    program_bytes  the part of it taken by our imports and the tokenizer
    since          `Neighbours.changes` when these were read
    draft          (weight bytes, page bytes) of the draft model, whose pages are not touched
    done           called in the engine's thread with the profile, or None if another model was loaded or freed
    """

    def __init__(
        self,
        runner: Runner,
        pages: Pages,
        plan: Plan,
        base_bytes: int,
        program_bytes: int,
        since: int,
        draft: tuple[int, int],
        done: Callable[[MemoryProfile | None], None],
    ) -> None:
        self._runner = runner
        self._pages = pages
        self._cache = runner.cache
        self._plan = plan
        self._draft = draft
        self._base_bytes, self._program_bytes = base_bytes, program_bytes
        self._since = since
        self._done = done
        self._failed: MemoryProfile | None = None

    def __call__(self, must_stop: Callable[[], bool]) -> bool:
        """Profile the plan. Returns True when finished, including when profiling is impossible."""
        started = time.monotonic()
        free = [pool.free_pages() for pool in self._pages.pools]
        slots = self._pages.slots.free_pages() if self._pages.slots is not None else []
        if not self._is_alone():
            return True
        if not self._has_room(free) or (self._plan.num_slots and not slots):
            log.info("plan not profiled: other programs use the planned memory")
            return True
        try:
            with Peak() as peak, Watch(self._runner.model) as watch:
                untouched = self._touch(free, watch.left, must_stop)
                for slot in slots:
                    self._cache.copy_slot(-1, slot)
                if untouched is None or not self._steps(free, slots, must_stop):
                    return False
        finally:
            for group, pages in enumerate(free):
                self._cache.forget(group, pages)
            self._cache.forget_slots(slots)
        if not self._is_alone():
            return True
        profile = self._profile(peak.highest + untouched, watch.found, time.monotonic() - started)
        if not profile.held and self._failed is None:
            self._failed = profile  # something else in this process may have taken memory meanwhile, so try once more
            return False
        self._done(min(profile, self._failed or profile, key=lambda one: one.total.measured_bytes))
        return True

    def _is_alone(self) -> bool:
        """True if no other model was loaded or freed since `base_bytes` was read; otherwise reports None to `done`."""
        if self._since == Neighbours.changes:
            return True
        log.info("plan not profiled: another model was loaded or freed in this process")
        self._done(None)
        return False

    def _has_room(self, free: list[list[int]]) -> bool:
        """True if the machine has enough free memory for the pages, and enough free pages for the steps."""
        wanted = sum(len(pages) for pages in free) / max(1, sum(self._plan.num_pages)) * self._plan.kv_bytes
        rows = max(self._plan.prefill_budget // self._plan.page_size + 2, self._plan.max_parallel)
        return memory_limits().ram_available_bytes > wanted + self._plan.margin_bytes // 2 and all(
            len(pages) >= min(rows, count) for pages, count in zip(free, self._plan.num_pages, strict=True)
        )

    def _touch(self, free: list[list[int]], left: list[int], must_stop: Callable[[], bool]) -> int | None:
        """Write to every free page. Returns the bytes of pages left out to save time, None if interrupted.

        left   receives the number of these pages per cache group
        """
        ends = time.monotonic() + TOUCH_S
        for group, pages in enumerate(free):
            left.append(0)
            count = max(1, BYTES_AT_ONCE // max(1, self._cache.page_bytes(group)))
            for at in range(0, len(pages), count):
                if must_stop():
                    return None
                if time.monotonic() > ends:
                    left[group] = len(pages) - at
                    break
                self._cache.touch(group, pages[at : at + count])
        return sum(count * self._cache.page_bytes(group) for group, count in enumerate(left))

    def _steps(self, free: list[list[int]], slots: list[int], must_stop: Callable[[], bool]) -> bool:
        worst = WorstSteps(self._runner, self._plan, free, self._runner.model.num_kinds, slots)
        # the logits of a decode step stay alive during the next step (`kernels.cpu.segments`), which may be a prefill
        left = torch.ones(self._plan.max_parallel + self._plan.num_drafts, self._runner.vocab_size)
        for step in (worst.prefill, lambda: worst.decode(self._plan.max_parallel)):
            if must_stop():
                return False
            step()
        del left
        return True

    def _profile(self, peak_bytes: int, others: Many[Message], seconds: float) -> MemoryProfile:
        plan, pages, program = self._plan, self._cache.nbytes, dict(self._plan.work_terms)["program"]
        weights = self._runner.model.weight_bytes + self._draft[0]
        terms = (
            Term("weights", plan.weight_bytes, weights),
            Term("kv", plan.kv_bytes, pages + self._draft[1]),
            Term("program", program, self._program_bytes),
            Term("work", plan.work_bytes - program, peak_bytes - self._base_bytes - weights - pages),
        )
        profiles = [MemoryProfile(terms, "cpu", seconds)]
        for rank, said in enumerate(others, 1):
            part, kept = plan.of_rank(rank), (said["weights"], said["kv"])
            planned, taken = (part.weight_bytes, part.kv_bytes, part.work_bytes), (*kept, said["peak"] - sum(kept))
            named = zip(("weights", "kv", "work"), planned, taken, strict=True)
            profiles.append(MemoryProfile(tuple(Term(*one) for one in named), "cpu", seconds))
        return _of_all(profiles)
