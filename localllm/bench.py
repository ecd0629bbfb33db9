"""How fast a model runs here: prefill, decode and time to first token, measured through the engine a user would use.

One result row per test, in llama-bench's words: `pp512` reads 512 tokens, `tg128` generates 128, `@ d4096` does so
behind 4,096 tokens of context. Token ids are random words of the vocabulary; the prefix cache is cleared before each
prefill, so nothing is counted that was not computed.
"""

from __future__ import annotations

import datetime
import json
import platform
import random
import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm import paths
from localllm._version import __version__
from localllm.calibrate import subject
from localllm.errors import ConfigError
from localllm.request import SamplingParams, Timing

if TYPE_CHECKING:
    from localllm.llm import LLM

VERSIONED = ("torch", "triton", "numpy", "tokenizers")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured."""

    prompt_tokens: int = 512
    output_tokens: int = 128
    depths: tuple[int, ...] = (0,)
    """tokens of context already there"""
    repeat: int = 3
    warmup: int = 1
    concurrency: tuple[int, ...] = (1,)
    """sequences decoded together"""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One test: tokens per second, over its repetitions."""

    test: str
    tps: float
    """median"""
    spread: float
    """standard deviation"""
    runs: tuple[float, ...]
    ttft_ms: float | None = None
    """median, for tests that start a request"""


@dataclass(slots=True)
class BenchResult:
    """All tests of one model."""

    model: str
    truth_line: str
    load_s: float
    weight_bytes: int
    rss_anon_bytes: int
    peak_rss_bytes: int
    rows: list[BenchRow] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    subject: dict[str, Any] = field(default_factory=dict)
    """what was measured, as `calibrate.load` looks for it"""
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        """The `--json` object."""
        return {"schema": "localllm.bench/1", "version": __version__, **asdict(self)}


def run_bench(llm: LLM, options: BenchOptions, on_test: Callable[[str], None] | None = None) -> BenchResult:
    """Measure a loaded model. Raises ConfigError when a test does not fit its context."""
    longest = max(options.depths) + options.prompt_tokens + options.output_tokens
    if longest >= llm.plan.ctx:
        raise ConfigError(
            f"the bench needs {longest:,} tokens, the context window holds {llm.plan.ctx:,}", f"add --ctx {longest + 1}"
        )
    tell = on_test or (lambda name: None)
    result = BenchResult(llm.name, llm.truth_line, llm.load_s, llm.state().weight_bytes, 0, 0)
    rng = random.Random(0)
    for _ in range(options.warmup):
        _prefill(llm, _words(llm, rng, 32))
        _decode(llm, [_words(llm, rng, 8)], 8)
    for depth in options.depths:
        behind = f" @ d{depth}" if depth else ""
        name = f"pp{options.prompt_tokens}{behind}"
        tell(name)
        timings = [_prefill_behind(llm, rng, depth, options.prompt_tokens) for _ in range(options.repeat)]
        result.rows.append(_row(name, [t.prefill_tps for t in timings], [t.ttft_s for t in timings]))
        name = f"tg{options.output_tokens}{behind}"
        tell(name)
        runs = [_decode(llm, [_words(llm, rng, max(depth, 1))], options.output_tokens) for _ in range(options.repeat)]
        result.rows.append(_row(name, runs))
    for streams in options.concurrency:
        if streams > 1:
            name = f"tg{options.output_tokens} x{streams}"
            tell(name)
            runs = [
                _decode(llm, [_words(llm, rng, 8) for _ in range(streams)], options.output_tokens)
                for _ in range(options.repeat)
            ]
            result.rows.append(_row(name, runs))
    result.rss_anon_bytes = rss_anon_bytes()
    result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result.machine = {"cpu": llm.machine.cpu.name, "cores": llm.machine.cpu.cores_usable, "threads": llm.threads}
    result.subject = subject(llm.facts, llm.plan, llm.machine)
    result.versions = {name: _version_of(name) for name in VERSIONED} | {"python": platform.python_version()}
    result.date = datetime.date.today().isoformat()
    return result


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _words(llm: LLM, rng: random.Random, count: int) -> list[int]:
    """`count` ordinary ids: no special tokens, which could end or mask an answer."""
    special = llm.tokenizer.special_ids
    ids: list[int] = []
    while len(ids) < count:
        token = rng.randrange(min(llm.tokenizer.vocab_size, llm.facts.vocab_size))
        if token not in special:
            ids.append(token)
    return ids


def _prefill(llm: LLM, ids: Sequence[int]) -> Timing:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return llm.submit(ids, params).answer().timing


def _prefill_behind(llm: LLM, rng: random.Random, depth: int, count: int) -> Timing:
    llm.engine.clear_prefix_cache()
    context = _words(llm, rng, depth) if depth else []
    if depth:
        _prefill(llm, context)
    return _prefill(llm, [*context, *_words(llm, rng, count)])


def _decode(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> float:
    """Tokens per second of all streams together, first tokens excluded."""
    import time

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    turns = [llm.submit(ids, params) for ids in prompts]
    if len(turns) == 1:
        return turns[0].answer().timing.decode_tps
    started = time.monotonic()
    total = sum(len(c.token_ids) for turn in turns for c in turn.answer().completions)
    return total / (time.monotonic() - started)


def _row(name: str, rates: list[float], ttfts: list[float] | None = None) -> BenchRow:
    spread = statistics.stdev(rates) if len(rates) > 1 else 0.0
    ttft = statistics.median(ttfts) * 1000 if ttfts else None
    return BenchRow(name, statistics.median(rates), spread, tuple(rates), ttft)


def rss_anon_bytes() -> int:
    """Anonymous memory of this process: what it really takes, without mapped files."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0)


def save(result: BenchResult) -> Path:
    """Keep a result below the data folder, where the planner finds it."""
    folder = paths.data_dir() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    target = folder / f"{Path(result.model).name.replace(':', '_')}-{stamp}.json"
    target.write_text(json.dumps(result.to_json(), indent=1))
    return target
