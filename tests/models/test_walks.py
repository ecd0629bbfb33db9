"""Random walks through the engine: requests that come, wait, are drafted for, preempted and aborted, each against the
same request alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from localllm.engine.cuda_graph import DecodeGraphs, shapes_of
from localllm.engine.decode_inputs import DecodeInputs
from localllm.engine.drafter import Guess
from localllm.engine.engine import Engine
from localllm.engine.publisher import RequestStream
from localllm.engine.runner import Runner
from localllm.engine.scheduler import SchedulerLimits
from localllm.engine.sequence import Sequence
from localllm.engine.speculation import Speculation
from localllm.errors import OutOfMemory
from localllm.models.model import Model
from localllm.request import FinishReason, Request, SamplingParams

from .test_decode_graphs import rerun

CONTEXT, VOCAB, REQUESTS = 96, 99, 14
NAMES = (
    "llama",
    "mistral",
    "gemma3",
    "gpt-oss",
    "qwen3.5",
    "lfm2",
    "nemotron-h",
    "falcon-h1",
    "glm4-moe-lite",
    "ling3",
)
QUICK = (("gemma3", 1), ("falcon-h1", 2))
MANY = tuple((name, seed) for name in NAMES for seed in range(3, 7))


@dataclass
class Known:
    """Guesses what the answers alone were, wrong in one token of six."""

    rng: random.Random
    texts: list[list[int]] = field(default_factory=list)
    name: str = "known"

    def guess(self, sequence: Sequence) -> Guess | None:
        ids = sequence.token_ids
        follows = next((text[len(ids) : len(ids) + 5] for text in self.texts if text[: len(ids)] == ids), [])
        found = [(token + (self.rng.random() < 1 / 6)) % VOCAB for token in follows]
        return Guess(tuple(found), 9) if found else None


@dataclass
class Answer:
    """What a stream said so far about one of a request's answers."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    error: Exception | None = None


def request(rng: random.Random, before: list[Request]) -> Request:
    length = rng.choice([1, 2, 9, 33, 60])
    prompt = [rng.randrange(VOCAB) for _ in range(length)]
    if before and rng.random() < 0.6:  # a prefix that may still be in the cache
        shared = rng.choice(before).prompt_token_ids
        prompt = [*shared[: rng.randint(1, len(shared))], *prompt][:60]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.9]),
        seed=rng.randrange(100),
        max_tokens=rng.choice([1, 3, 12, 30]),
        n=rng.choice([1, 1, 1, 2]),
        logprobs=rng.choice([None, 0, 2]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
    )
    return Request(prompt, params)


def alone(model: Model, one: Request) -> list[Answer]:
    """The answers with room for everything, in whole prompts, without drafts and cached prefixes."""
    engine = engine_of(model, 16, [40] * len(model.groups), SchedulerLimits(2, 512, num_slots=4 * bool(model.states)))
    stream = engine.submit(one)
    while not engine.is_idle:
        engine.run_once()
    return gathered([stream], one.params.n)


def engine_of(
    model: Model, page: int, counts: list[int], limits: SchedulerLimits, *, prefix: bool = False, graphs: bool = False
) -> Engine:
    slots = limits.num_slots
    cache = model.new_cache([count + 1 for count in counts], page, "f32", torch.device("cpu"), slots + 1)
    captured = None
    if graphs:
        inputs = DecodeInputs(16, CONTEXT, page, counts, "cpu", slots or -1)
        captured = DecodeGraphs.of(model, cache, inputs, shapes_of((1, 2, 4), (2, 4, 8, 16), bool(slots)), rerun)
        captured.capture()
    runner = Runner(model, cache, model.facts.vocab_size, captured)
    engine = Engine(runner, counts, CONTEXT, limits, prefix_cache=prefix, check_invariants=True)
    engine.stepper.runs_ahead = graphs
    return engine


def gathered(events: Any, count: int) -> list[Answer]:
    """The events of a stream by answer; after the terminal event there is none."""
    found = [Answer() for _ in range(count)]
    for event in (event for stream in events for event in stream):
        answer = found[event.index]
        assert answer.reason is None, "an event after the terminal one"
        answer.token_ids += event.token_ids
        answer.logprobs += [one.logprob for one in event.logprobs]
        answer.reason, answer.error = event.finish_reason, event.error
    return found


def limits_of(rng: random.Random, model: Model) -> SchedulerLimits:
    parallel = rng.randint(1, 4)
    return SchedulerLimits(
        parallel,
        rng.choice([3, 8, 24, 64]),
        score_rows=rng.choice([1, 5, 256]),
        num_slots=(parallel + rng.choice([1, 3, 8])) * bool(model.states),
        drafts=rng.choice([2, 5, 15]),
        preempt_every=rng.choice([0, 0, 2, 3, 7]),
    )


def walk(model: Model, seed: int) -> tuple[int, int]:
    """Run one walk; return how many answers were compared in full and in part."""
    rng = random.Random(seed)
    page, limits, graphs = rng.choice([8, 16, 32]), limits_of(rng, model), rng.random() < 0.5
    full = -(-CONTEXT // page)
    counts = []
    for group in model.groups:
        windowed = full if group.window is None else -(-(group.window + limits.prefill_budget + page) // page)
        counts.append(int(windowed * rng.uniform(1.0, 2.0)) + 1)
    engine = engine_of(model, page, counts, limits, prefix=rng.random() < 0.8, graphs=graphs)
    known = Known(rng)
    engine.stepper.speculation = Speculation(known, "always") if rng.random() < 0.7 else None
    made: list[Request] = []
    expected: list[list[Answer]] = []
    streams: list[RequestStream] = []
    leaving: dict[int, int] = {}  # requests that are aborted -> after how many moves

    def submit() -> None:
        made.append(request(rng, made))
        expected.append(alone(model, replace(made[-1])))  # a copy, which gets an id of its own
        known.texts += [[*made[-1].prompt_token_ids, *answer.token_ids] for answer in expected[-1]]
        if rng.random() < 0.15:
            leaving[len(streams)] = rng.randint(1, 12)
        streams.append(engine.submit(made[-1]))

    while len(made) < REQUESTS or not engine.is_idle:
        if len(made) < REQUESTS and (rng.random() < 0.3 or engine.is_idle):
            submit()
        else:
            engine.run_once()
        for place in leaving:
            leaving[place] -= 1
            if leaving[place] == 0:
                streams[place].abort()
    whole = part = 0
    for place, (stream, wanted) in enumerate(zip(streams, expected, strict=True)):
        for ours, theirs in zip(gathered([stream], len(wanted)), wanted, strict=True):
            assert ours.reason is not None, "no terminal event"
            assert ours.error is None or isinstance(ours.error, OutOfMemory), ours.error
            if ours.error is not None or ours.reason is FinishReason.ABORT:
                assert ours.error is not None or place in leaving, "aborted by nobody"
                assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
                part += 1
                continue
            assert (ours.token_ids, ours.reason) == (theirs.token_ids, theirs.reason), (place, made[place])
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
            whole += 1
    return whole, part


def cases() -> Iterator[Any]:
    yield from QUICK
    yield from (pytest.param(*case, marks=pytest.mark.slow) for case in MANY)


@pytest.mark.parametrize(("name", "seed"), list(cases()))
def test_a_walk(name: str, seed: int, loaded: Callable[[str], Model]) -> None:
    whole, part = walk(loaded(name), seed)
    assert whole > part
