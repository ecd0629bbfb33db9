"""Throughput benchmark: prefill, decode and time to first token, measured through the regular engine.

There is one result row per test, named as in llama-bench: `pp512` prefills 512 tokens, `tg128` generates 128, `@ d4096`
does so after 4,096 tokens of context. Token ids are random, and the prefix cache is cleared before each prefill, so
only computed tokens count. Another engine may run the same tests: its repetitions alternate with ours, so other load on
the machine affects both.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from localllm.device.memory import rss_anon_bytes
from localllm.errors import ConfigError
from localllm.plan.speeds import subject
from localllm.request import SamplingParams, Timing

from .results import BenchResult, BenchRow, OtherWork, peak_rss_bytes, versions

if TYPE_CHECKING:
    from localllm.llm.llm import LLM

    from .peer import Peer

RETRIES = 20  # for runs disturbed by other processes, if `most_other_cores` is set


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure."""

    prompt_tokens: int = 512
    output_tokens: int = 128
    depths: tuple[int, ...] = (0,)  # tokens of context before each test
    repeat: int = 3
    warmup: int = 1
    concurrency: tuple[int, ...] = (1,)  # sequences decoded together
    # a run is repeated, up to 20 times, if other processes used more cores than this; None accepts every run
    most_other_cores: float | None = None


class Engine(Protocol):
    """An engine that runs the tests."""

    def prefill(self, context: Sequence[int], ids: Sequence[int]) -> tuple[float, float | None]:
        """Prefill `ids` after `context`, which is not timed: (tokens per second, seconds to the first token)."""
        ...

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """Generate `count` tokens after each prompt, concurrently: tokens per second, without the prefill."""
        ...


class OurEngine:
    """Our engine, through the `LLM` class."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def prefill(self, context: Sequence[int], ids: Sequence[int]) -> tuple[float, float | None]:
        self.llm.engine.clear_prefix_cache()
        if context:
            self._read(context)
        timing = self._read([*context, *ids])
        return timing.prefill_tps, timing.ttft_s

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        turns = [self.llm.submit(ids, params) for ids in prompts]
        return sum(turn.answer().timing.decode_tps for turn in turns)

    def _read(self, ids: Sequence[int]) -> Timing:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        return self.llm.submit(ids, params).answer().timing


# one repetition of a test; returns tokens per second, seconds to the first token
Run = Callable[[Engine, random.Random], tuple[float, float | None]]


def run_bench(
    llm: LLM,
    options: BenchOptions,
    on_test: Callable[[str], None] | None = None,
    peer: Peer | None = None,
) -> BenchResult:
    """Measure a loaded model, alternating with a peer if given. Raises ConfigError if a test exceeds the context."""
    longest = max(options.depths) + options.prompt_tokens + options.output_tokens
    if longest >= llm.plan.ctx:
        most = min(llm.plan.max_ctx, llm.facts.max_context)
        less = f"measure fewer tokens with -p, -n or -d: --ctx cannot exceed {most:,} here"
        raise ConfigError(
            f"the benchmark needs {longest:,} tokens, but the context window holds {llm.plan.ctx:,}",
            f"add --ctx {longest + 1}" if longest < most else less,
        )
    engines: list[Engine] = [OurEngine(llm)] if peer is None else [OurEngine(llm), peer]
    rng = random.Random(0)
    for _ in range(options.warmup):
        for engine in engines:
            engine.prefill([], words(llm, rng, 32))
            engine.decode([words(llm, rng, 8)], 8)
    ours: list[BenchRow] = []
    theirs: list[BenchRow] = []
    for name, test in _tests(llm, options).items():
        if on_test is not None:
            on_test(name)
        found: list[list[tuple[float, float | None]]] = [[] for _ in engines]
        for number in range(options.repeat):
            for runs, engine in zip(found, engines, strict=True):
                runs.append(_one_run(test, engine, f"{name} {number}", options.most_other_cores))
        rows = [BenchRow.of(name, [r for r, _ in runs], [t for _, t in runs]) for runs in found]
        ours.append(rows[0])
        theirs += rows[1:]
    return result_of(llm, rows=ours, peer=peer.result(theirs) if peer is not None else None)


def result_of(llm: LLM, **found: Any) -> BenchResult:
    """Build a result from the given fields, adding the model, the machine, versions and memory use."""
    cpu = llm.machine.cpu
    return BenchResult(
        model=llm.name,
        truth_line=llm.run_summary,
        load_s=llm.load_s,
        weight_bytes=llm.state().weight_bytes,
        rss_anon_bytes=rss_anon_bytes(),
        peak_rss_bytes=peak_rss_bytes(),
        machine={"cpu": cpu.name, "cores": cpu.cores_usable, "threads": llm.plan.threads},
        subject=subject(llm.facts, llm.plan, llm.machine),
        versions=versions(),
        date=datetime.date.today().isoformat(),
        **found,
    )


def words(llm: LLM, rng: random.Random, count: int) -> list[int]:
    """Return `count` random ids without special tokens, which could end or mask a response."""
    special = llm.tokenizer.special_ids
    ids: list[int] = []
    while len(ids) < count:
        token = rng.randrange(min(llm.tokenizer.vocab_size, llm.facts.vocab_size))
        if token not in special:
            ids.append(token)
    return ids


def _tests(llm: LLM, options: BenchOptions) -> dict[str, Run]:
    count, tokens = options.prompt_tokens, options.output_tokens

    def read(depth: int, engine: Engine, rng: random.Random) -> tuple[float, float | None]:
        return engine.prefill(words(llm, rng, depth), words(llm, rng, count))

    def write(lengths: Sequence[int], engine: Engine, rng: random.Random) -> tuple[float, float | None]:
        return engine.decode([words(llm, rng, length) for length in lengths], tokens), None

    tests: dict[str, Run] = {}
    for depth in options.depths:
        behind = f" @ d{depth}" if depth else ""
        tests[f"pp{count}{behind}"] = partial(read, depth)
        tests[f"tg{tokens}{behind}"] = partial(write, [max(depth, 1)])
    return tests | {f"tg{tokens} x{n}": partial(write, [8] * n) for n in options.concurrency if n > 1}


def _one_run(test: Run, engine: Engine, seed: str, most_other_cores: float | None) -> tuple[float, float | None]:
    """Run one repetition, with the same tokens for every engine."""
    for _ in range(RETRIES if most_other_cores is not None else 1):
        with OtherWork() as others:
            found = test(engine, random.Random(seed))
        if most_other_cores is None or others.cores <= most_other_cores:
            return found
        time.sleep(1.0)
    return found
