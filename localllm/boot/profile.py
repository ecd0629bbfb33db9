"""Boots = fills: the worst steps of a plan, run once, and what they took against what the plan said.

The worst steps are the last prefill chunk at full depth, one decode step of every bucket with all sequences at full
depth, and the sampler at the largest batch. Earlier chunks need not be computed: what lies in the pages does not matter
to memory. On a GPU all of it runs before the first request, and torch's allocator is compared term by term. On a CPU it
runs when the first answer is out and nobody asks anything: every planned page is touched, a layer of each kind computes
the steps (the others would use the same memory again), and the process's anonymous memory is compared.
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

# for touching pages on a CPU; the rest of very many pages is counted, since a page's bytes are known exactly
TOUCH_S = 6.0
BYTES_AT_ONCE = 16 << 20


class WorstSteps:
    """The steps that take most memory, over pages that the caller says may be written.

    pages   per cache group: ids to read and write; fewer than the depth needs are read again and again
    slots   the same of states
    samples no tokens are drawn without
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
        """The last chunk of a prompt that fills the context, and its token."""
        length = self._plan.ctx - 1
        rows = min(self._plan.prefill_budget, length)
        self.chunk(length - rows, rows)()

    def decode(self, count: int) -> None:
        """One token for each of `count` sequences that fill the context, sampled."""
        self.decoding(count)()

    def check_guesses(self, count: int) -> None:
        """The same, with as many guessed tokens behind the first of them as the plan lets a step check."""
        self.checking(count, min(self._plan.num_drafts, self._plan.ctx - 2))()

    def checking(self, count: int, guessed: int, waits: bool = True) -> Callable[[], None]:
        """As `decoding`, with so many guessed tokens behind the first of the sequences."""
        first, *others = [self._sequence(self._plan.ctx - 1, 1 + guessed, i) for i in range(count)]
        del first.token_ids[len(first.token_ids) - guessed :]
        first.num_prompt_tokens = len(first.token_ids) - 1  # guesses stand behind an answer: graphs are for those
        return partial(self._run, [first, *others], [1] * count, waits, drafts=(1,) * guessed)

    def chunk(self, start: int, count: int) -> Callable[[], None]:
        """A call that computes tokens [start, start + count) of a sequence, and a token behind them."""
        return partial(self._run, [self._sequence(start + count, count, 0)], [count])

    def prompt(self, count: int) -> None:
        """A prompt of `count` tokens, and the token behind it."""
        self.chunk(0, count)()

    def mixed(self, count: int, length: int) -> None:
        """A prompt of `count` tokens beside a sequence of `length` that decodes."""
        self._run([self._sequence(count, count, 0), self._sequence(length, 1, 1)], [count, 1])

    def decoding(self, count: int, waits: bool = True) -> Callable[[], None]:
        """A call that computes one token for each of `count` sequences that fill the context.

        waits   False leaves the tokens on the device, as an engine that is a step ahead does
        """
        sequences = [self._sequence(self._plan.ctx - 1, 1, index) for index in range(count)]
        return partial(self._run, sequences, [1] * count, waits)

    def _sequence(self, length: int, written: int, index: int) -> Sequence:
        """One of `length` tokens, the last `written` of which go to pages of their own, other than its neighbours'."""
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
        """`drafts` are guessed for the first of the sequences."""
        step = Step([Scheduled(s, s.num_tokens - new, new) for s, new in zip(sequences, news, strict=True)])
        first = step.scheduled[0]
        step.scheduled[0] = replace(first, num_tokens=first.num_tokens + len(drafts), drafts=drafts)
        output = self._runner.forward(step, num_layers=self._num_layers)
        if not self._samples:
            return
        # a step that is not captured has computed them all before any is sampled
        held = output.logits(list(range(len(sequences) + len(drafts)))) if drafts else None
        draw = self._runner.sample(output, list(range(len(sequences))), sequences)
        del held
        if waits:
            draw.results()


class Watch:
    """While a block runs, what each of the other ranks holds at most; one process has none.

    left   of each group, pages that are counted without being touched
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
    """Run the worst steps now. Raises DeviceError where several ranks run out of memory in them.

    held   what torch's allocator took for "weights", "kv", "tables" and "graphs"
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
    others: list[list[Message]] = []  # of every step, what the other ranks say
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
            failure = f"memory ran out in the worst step of {name}"
            break
    own = MemoryProfile(tuple(terms), "cuda", time.monotonic() - started, failure)
    each = zip(*others, strict=True)  # of every other rank, what it says of the steps
    names = [name for name, _ in steps]
    theirs = [_of_rank(plan.of_rank(rank), said, names) for rank, said in enumerate(each, 1)]
    return _of_all([own, *theirs])


def _of_rank(plan: Plan, said: Many[Message], steps: Many[str]) -> MemoryProfile:
    """What another rank with a GPU has measured; its tables are made in the first of the steps."""
    planned = dict(plan.work_terms)
    terms = [Term("weights", plan.weight_bytes, said[0]["weights"]), Term("kv", plan.kv_bytes, said[0]["kv"])]
    for step, one in zip(steps, said, strict=True):
        terms.append(Term(step, planned.get(step, 0), one["peak"]))
    return MemoryProfile((*terms, Term("tables", planned["tables"], 0)), "cuda", 0.0)


def _of_all(profiles: list[MemoryProfile]) -> MemoryProfile:
    """The one that decides, with its rank where there are several."""
    if len(profiles) == 1:
        return profiles[0]
    named = [replace(one, rank=rank, seconds=profiles[0].seconds) for rank, one in enumerate(profiles)]
    for one in named:
        log.info("rank %s: %s", one.rank, one)
    return farthest(named)


def warm_up(runner: Runner, plan: Plan, facts: ModelFacts) -> None:
    """Launch every kernel that requests may need, over pages that nobody has yet: loading or compiling one takes a card
    from milliseconds to seconds, which the first prompt of its length would wait for.
    """
    worst = WorstSteps(runner, plan, [range(count) for count in plan.num_pages], 1 << 30, range(plan.num_slots))
    for step in _every_kernel(runner, plan, facts):
        step(worst)


def _every_kernel(runner: Runner, plan: Plan, facts: ModelFacts) -> Iterator[Callable[[WorstSteps], None]]:
    """Steps which together launch every kernel that is in no graph."""
    largest = min(plan.prefill_budget, plan.ctx - 1)
    counts = *LINEAR_TOKENS["cuda"], *tokens_of_tiles(*expert_counts(facts))
    for count in sorted({min(count, largest) for count in counts}):
        yield methodcaller("prompt", count)
    if plan.max_parallel > 1:
        # keys and values of E4M3 are widened once for many queries, but not for few, nor beside so long a sequence
        short = {(min(100, largest), 2), (largest, 2)} if plan.kv == "fp8" else set()
        for count, length in sorted(short | {(largest, plan.ctx - 1)}):
            yield methodcaller("mixed", count, length)
    captured = max(runner.graphs.captured, default=0) if runner.graphs is not None else 0
    for count in LINEAR_TOKENS["cuda"]:
        if captured < count <= plan.max_parallel:
            yield methodcaller("decode", count)


class WarmAgain:
    """An idle job (`Engine.when_idle`) that does so once more, over pages that are free: other tiles were chosen since.

    recorded   notes what a call would launch, and gives what compiles that, to run beside the engine's thread
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
            self._go_on(must_stop)
        except BaseException:
            self._left.clear()  # it is done: whoever chooses other tiles next begins anew
            raise
        return self.is_done

    def _go_on(self, must_stop: Callable[[], bool]) -> None:
        free = [pool.free_pages() for pool in self._pages.pools]
        slots = self._pages.slots.free_pages() if self._pages.slots is not None else []
        if not all(free) or self._plan.num_slots and not slots:
            self._left.clear()  # what is kept for later requests is worth more
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
    """How often a model came into this process's memory, or gave some back: in between it tells of one model alone."""

    changes: ClassVar[int] = 0


class CpuProfiler:
    """An idle job (`Engine.when_idle`) that profiles a plan on the CPU; a request stops it, and it begins anew.

    base_bytes     anonymous memory of the process with everything but this model in it
    program_bytes  what of it our own imports and the tokenizer took
    since          `Neighbours.changes` when that was read
    draft          bytes of a draft model's weights, and of its pages: these are not touched
    done           called with the profile, in the engine's thread; None where the memory is not this model's alone
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
        """True when it is finished, also where it cannot be done."""
        started = time.monotonic()
        free = [pool.free_pages() for pool in self._pages.pools]
        slots = self._pages.slots.free_pages() if self._pages.slots is not None else []
        if not self._is_alone():
            return True
        if not self._has_room(free) or (self._plan.num_slots and not slots):
            log.info("the plan is not profiled: others took the memory that it counts on")
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
            self._failed = profile  # something else in this process may have taken memory just then: once more
            return False
        self._done(min(profile, self._failed or profile, key=lambda one: one.total.measured_bytes))
        return True

    def _is_alone(self) -> bool:
        """Whether no other model came or went since the memory without this one was read; says so where one did."""
        if self._since == Neighbours.changes:
            return True
        log.info("the plan is not profiled: another model came into this process, or left it")
        self._done(None)
        return False

    def _has_room(self, free: list[list[int]]) -> bool:
        """Whether the machine still has what the pages need, and there are enough of them to write to."""
        wanted = sum(len(pages) for pages in free) / max(1, sum(self._plan.num_pages)) * self._plan.kv_bytes
        rows = max(self._plan.prefill_budget // self._plan.page_size + 2, self._plan.max_parallel)
        return memory_limits().ram_available_bytes > wanted + self._plan.margin_bytes // 2 and all(
            len(pages) >= min(rows, count) for pages, count in zip(free, self._plan.num_pages, strict=True)
        )

    def _touch(self, free: list[list[int]], left: list[int], must_stop: Callable[[], bool]) -> int | None:
        """Write to every free page; bytes that were left out to save time, None when it had to stop.

        left   takes how many pages of each group these are
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
        # a decode step leaves its logits to the next one (`kernels.cpu.segments`), which may have a prompt in it
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
