"""Load test: time to first token, time per token and throughput of concurrent requests, ours or an OpenAI endpoint's.

The shapes are those of a chat turn and of an agent's step. Prompts are random and share no prefix, so prefix caches do
not help. Engines alternate, repetition by repetition.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from localllm.errors import LocalLLMError
from localllm.request import SamplingParams

from .endpoint import Endpoint, Sample
from .results import BenchResult, PeerResult, spread
from .throughput import BenchOptions, result_of, words

if TYPE_CHECKING:
    from localllm.llm.llm import LLM


@dataclass(frozen=True, slots=True)
class Shape:
    """Prompt and output tokens of a request."""

    name: str
    prompt_tokens: int
    output_tokens: int


SHAPES = (Shape("chat", 512, 128), Shape("agent", 256, 16))


@dataclass(frozen=True, slots=True)
class LoadRow:
    """Results of one engine for one shape and concurrency."""

    engine: str
    shape: str
    concurrency: int
    tps: float  # output tokens per second of all requests together, including prefill: median
    spread: float  # standard deviation of tps
    ttft_ms: float  # median over requests
    tpot_ms: float  # (end to end - time to first token) / (output tokens - 1), median over requests
    prompt_tokens: float  # median, as counted by the engine
    requests: int
    failed: int


Ask = Callable[[str, int], Sample]  # (prompt, output tokens) -> timings


def run_load(
    llm: LLM, endpoint: Endpoint, options: BenchOptions, on_test: Callable[[str], None] | None = None
) -> BenchResult:
    """Measure our engine and an endpoint alternately, for every shape and concurrency."""

    def ours(prompt: str, count: int) -> Sample:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        answer = llm.submit(llm.encode_prompt(prompt), params).answer()
        timing, usage = answer.timing, answer.usage
        return Sample(timing.ttft_s, timing.total_s, usage.prompt_tokens, usage.completion_tokens)

    rng = random.Random(0)

    def prompt(shape: Shape) -> str:
        return llm.tokenizer.decode(words(llm, rng, shape.prompt_tokens))

    engines: dict[str, Ask] = {"localllm": ours, endpoint.name: endpoint.ask}
    for ask in engines.values():
        ask(prompt(Shape("warm-up", 16, 4)), 4)
    rows = measure(engines, prompt, options.concurrency, SHAPES, options.repeat, on_test)
    theirs = PeerResult(endpoint.name, (), endpoint.peak_rss_bytes(), endpoint.versions())
    return result_of(llm, load=[asdict(row) for row in rows], peer=theirs)


def measure(
    engines: Mapping[str, Ask],
    prompt: Callable[[Shape], str],
    concurrency: Sequence[int],
    shapes: Sequence[Shape],
    repeat: int,
    on_test: Callable[[str], None] | None = None,
) -> list[LoadRow]:
    """Measure every engine, shape and concurrency. Raises an error of a test in which every request failed."""
    rows = []
    for shape in shapes:
        for streams in concurrency:
            if on_test is not None:
                on_test(f"{shape.name} x{streams}")
            samples: dict[str, list[Sample]] = {name: [] for name in engines}
            rates: dict[str, list[float]] = {name: [] for name in engines}
            failed = dict.fromkeys(engines, 0)
            for _ in range(repeat):
                prompts = [prompt(shape) for _ in range(streams)]
                for name, ask in engines.items():
                    found, errors, seconds = _run_concurrently(ask, prompts, shape.output_tokens)
                    failed[name] += len(errors)
                    if not found:
                        raise errors[0]
                    samples[name] += found
                    rates[name].append(sum(s.output_tokens for s in found) / seconds)
            rows += [_row(name, shape, streams, samples[name], rates[name], failed[name]) for name in engines]
    return rows


def _run_concurrently(ask: Ask, prompts: Sequence[str], count: int) -> tuple[list[Sample], list[LocalLLMError], float]:
    found: list[Sample] = []
    errors: list[LocalLLMError] = []

    def one(prompt: str) -> None:
        try:
            found.append(ask(prompt, count))
        except LocalLLMError as error:
            errors.append(error)

    started = time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(one, prompts))
    return found, errors, time.monotonic() - started


def _row(name: str, shape: Shape, streams: int, samples: list[Sample], rates: list[float], failed: int) -> LoadRow:
    return LoadRow(
        engine=name,
        shape=shape.name,
        concurrency=streams,
        tps=statistics.median(rates),
        spread=spread(rates),
        ttft_ms=statistics.median(s.ttft_s for s in samples) * 1000,
        tpot_ms=statistics.median(s.tpot_s for s in samples) * 1000,
        prompt_tokens=statistics.median(s.prompt_tokens for s in samples),
        requests=len(samples),
        failed=failed,
    )
