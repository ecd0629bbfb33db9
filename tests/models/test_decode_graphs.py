"""Decode steps from fixed buffers and captured graphs against eager steps, token by token."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.boot.assembly import assemble
from localllm.boot.memory_meter import Meter
from localllm.config import EngineOptions
from localllm.device.fake import MACHINES
from localllm.engine.batch import BatchBuilder
from localllm.engine.cuda_graph import Captured, CudaCapture, DecodeGraphs, Run, Shape, shapes_of
from localllm.engine.decode_inputs import DecodeInputs
from localllm.engine.device_sampler import DeviceSampler
from localllm.engine.draft_model import DraftModel
from localllm.engine.drafter import Guess
from localllm.engine.engine import Engine
from localllm.engine.runner import Runner
from localllm.engine.scheduler import Scheduled, SchedulerLimits, Step
from localllm.engine.sequence import Sequence
from localllm.engine.speculation import Speculation
from localllm.kernels import sparse
from localllm.kernels.sampling import sample as reference
from localllm.kernels.verify.selftest import SelfTest
from localllm.kernels.verify.tuning import one_capture
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model
from localllm.plan.planner import Planner
from localllm.request import Request, SamplingParams

CONTEXT, PAGE, PAGES = 120, 16, 40
FORMS = ("eager", "graphs", "device")
SLOW_GUESSES = [*product(["qwen3", "glm4-moe-lite", "ling3"], FORMS), ("qwen3.5", "eager"), ("qwen3.5", "device")]
SLOW_GUESSES += [("qwen4-exp", "eager")]


def rerun(run: Run) -> Captured:
    """In place of a capture where there is no GPU: a replay runs again and writes into the outputs of the first run."""
    outputs = run()

    def replay() -> None:
        for kept, new in zip(outputs, run(), strict=True):
            kept.copy_(new)

    return outputs, replay


def _op(where: str) -> Any:
    """The reference asks the device for numbers, which ends a capture."""
    if where == "cpu":
        return reference
    from localllm.kernels.triton.sampling import sample

    return sample


def engine_of(
    model: Model,
    sizes: tuple[int, ...] = (),
    ahead: bool = False,
    capture: Callable[..., Any] = rerun,
    device: bool = False,
    where: str = "cpu",
    kv: str = "f32",
    parallel: int = 5,
    guesses: tuple[int, ...] = (),
) -> Engine:
    """An engine, with graphs of these sizes; one page more than it knows of is the scratch page."""
    count = [PAGES] * len(model.groups)
    slots = 12 if model.states else 0
    cache = model.new_cache([n + 1 for n in count], PAGE, kv, torch.device(where), slots + 1)
    graphs = None
    if sizes:
        most = max(*sizes, *guesses)
        inputs = DecodeInputs(most, CONTEXT, PAGE, count, where, slots or -1)
        graphs = DecodeGraphs.of(model, cache, inputs, shapes_of(sizes, guesses, bool(slots)), capture)
        graphs.capture()
    sampler = None
    if device:
        sampler = DeviceSampler(_op(where), parallel, model.facts.vocab_size, torch.device(where), max((0, *guesses)))
    if sampler is not None and graphs is not None:
        sampler.capture(graphs.buckets, capture)
    runner = Runner(model, cache, model.facts.vocab_size, graphs, sampler)
    limits = SchedulerLimits(parallel, 24, num_slots=slots)
    engine = Engine(runner, count, CONTEXT, limits, check_invariants=True)
    engine.stepper.runs_ahead = ahead
    return engine


def answers(engine: Engine, requests: list[Request]) -> list[list[int]]:
    streams = []
    for index, request in enumerate(requests):
        streams.append(engine.submit(request))
        if index % 3 == 2:
            engine.run_once()
    for _ in range(2000):
        if engine.is_idle:
            break
        engine.run_once()
    events = [list(stream) for stream in streams]
    assert all(e[-1].error is None for e in events)
    return [[t for event in sorted(e, key=lambda one: one.index) for t in event.token_ids] for e in events]


def requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    made = []
    for index in range(9):
        prompt = [rng.randrange(99) for _ in range(rng.choice([1, 3, 17, 40]))]
        params = SamplingParams(temperature=0 if index % 2 else 0.9, seed=index, max_tokens=rng.choice([1, 2, 9, 30]))
        if index == 4:
            params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, repetition_penalty=1.3, logprobs=1, n=2)
        made.append(Request(prompt, params))
    return made


class Told:
    """Guesses what the same prompt was answered with before, wrong in one token of eight."""

    name = "told"

    def __init__(self, requests: list[Request], answers: list[list[int]]) -> None:
        self._texts = [[*r.prompt_token_ids, *a] for r, a in zip(requests, answers, strict=True)]
        self._rng = random.Random(2)

    def guess(self, sequence: Sequence) -> Guess | None:
        ids = sequence.token_ids
        follows = [text[len(ids) : len(ids) + 6] for text in self._texts if text[: len(ids)] == ids]
        found = [(token + (self._rng.random() < 0.125)) % 99 for token in (*follows, [])[0]]
        return Guess(tuple(found), 9) if found else None


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3.5", "graphs"),
        *product(["gemma3", "mistral"], FORMS),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_GUESSES),
    ],
)
def test_guesses_change_no_token(loaded: Callable[[str], Model], name: str, form: str) -> None:
    """Windows, new pages, penalties, log-probabilities and two answers to a prompt, beside steps that are captured."""
    model = loaded(name)
    made = {
        "eager": lambda: engine_of(model),
        "graphs": lambda: engine_of(model, (1, 2, 4), ahead=True),
        "device": lambda: engine_of(model, (1, 2, 4), ahead=True, device=True),
    }[form]
    expected = answers(made(), requests(1))
    engine = made()
    engine.stepper.speculation = Speculation(Told(requests(1), expected), "always")
    for _ in range(2):  # then with pages from the prefix tree
        assert answers(engine, requests(1)) == expected
    stats = engine.stats()
    assert 0.3 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_steps < 0.8 * stats.num_output_tokens


SEVERAL = [*product(["qwen3", "glm4-moe-lite", "lfm2", "nemotron-h", "ling3", "mistral", "gemma3"], [False, True])]
SEVERAL += [("olmo-hybrid", True), ("qwen4-exp", True), ("glm5-next", True)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "device"),
    [("gemma3", True), ("qwen3.5", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in SEVERAL)],
)
def test_steps_with_guesses_are_replayed(
    loaded: Callable[[str], Model], name: str, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step of sequences that decode is launched eagerly, and no token is another one; states go back and forth."""
    model = loaded(name)
    expected = answers(engine_of(model, device=device), requests(1))  # the host's random numbers are others
    monkeypatch.setattr(sparse, "reads_back", lambda x: False)
    engine = engine_of(model, (1, 2, 4, 5), True, device=device, guesses=(2, 4, 8, 16, 64))
    engine.stepper.speculation = Speculation(Told(requests(1), expected), "always", goes_back=bool(model.states))
    built: list[bool] = []
    build = engine.runner.builder.build

    def noting(step: Step) -> Any:
        built.append(all(part.start >= part.sequence.num_prompt_tokens for part in step.scheduled))
        return build(step)

    engine.runner.builder.build = noting
    for _ in range(2):  # then with pages from the prefix tree
        assert answers(engine, requests(1)) == expected
    assert built and not any(built)
    stats = engine.stats()
    assert 0.3 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_steps < 0.9 * stats.num_output_tokens


def test_rows_of_a_step_with_guesses() -> None:
    """Each token has a length and its sequence's block table; what no sequence fills is one of its own, then empty."""
    inputs = DecodeInputs(8, CONTEXT, PAGE, [40], "cpu", 12)
    batch, parts = inputs.batch(8, several=True), []
    for number, (length, drafts) in enumerate([(17, (7, 8)), (3, ())]):
        sequence = Sequence(Request(list(range(length))), 0, 1, 0, 9)
        sequence.block_tables, sequence.slot = [[2 * number, 2 * number + 1]], number + 3
        parts.append(Scheduled(sequence, length - 1, 1 + len(drafts), drafts=drafts))
    inputs.load(parts, rows=8)
    assert batch.token_ids[:4].tolist() == [16, 7, 8, 2] and batch.positions[:4].tolist() == [16, 17, 18, 2]
    assert batch.seq_lens_tensor.tolist() == [17, 18, 19, 3, 1, 1, 1, 1]
    assert batch.groups[0].block_table[:, 0].tolist() == [0, 0, 0, 2, 40, 40, 40, 40]
    assert batch.groups[0].slot_mapping.tolist() == [16, 17, 18, 34, *[40 * PAGE] * 4]
    assert batch.state_starts is not None and batch.state_starts.tolist() == [0, 3, 4, 8, 8, 8, 8, 8]
    assert batch.slots is not None and batch.slots.tolist() == [3, 4, 12, 12, 12, 12, 12]


class Thirds:
    """Allows every third token, others after each; every fifth is forced."""

    is_done = False

    def __init__(self, count: int = 0) -> None:
        self._count = count

    def fill(self, row: Any) -> bool:
        for token in range(self._count % 3, 99, 3):
            row[token // 32] |= 1 << token % 32 if token % 32 < 31 else -(1 << 31)
        return True

    def accept(self, token: int) -> None:
        assert token % 3 == self._count % 3
        self._count += 1

    def jump_forward(self, last: int | None = None) -> list[int]:
        forced = [30 + self._count % 3] if self._count % 5 == 0 else []
        return forced if last is None else [last, *forced]

    def rollback(self, count: int) -> None:
        self._count -= count

    def fork(self) -> Thirds:
        return Thirds(self._count)


def wishes() -> list[Request]:
    """What changes from token to token, alone and beside what does not."""
    asked: list[tuple[dict[str, Any], Any]] = [
        ({"temperature": 0}, Thirds()),
        ({"temperature": 0.8, "seed": 3}, None),
        ({"temperature": 0.9, "seed": 4, "top_p": 0.7, "logprobs": 2}, Thirds()),
        (
            {"temperature": 0.7, "seed": 5, "min_tokens": 11, "stop_token_ids": tuple(t for t in range(99) if t % 4)},
            None,
        ),
        ({"temperature": 0.7, "seed": 6, "frequency_penalty": 0.9, "logit_bias": {7: 3.0}}, None),
        ({"temperature": 0, "dry_multiplier": 0.8}, None),
    ]
    return [
        Request([5 + number, 17, 3], SamplingParams(max_tokens=25, **params), token_mask=mask)
        for number, (params, mask) in enumerate(asked)
    ]


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3.5", marks=pytest.mark.slow)])
def test_guesses_in_graphs_keep_what_depends_on_the_token_before(loaded: Callable[[str], Model], name: str) -> None:
    """Grammars with forced tokens, stops that are banned at first, penalties: sampled row by row."""
    model = loaded(name)
    expected = answers(engine_of(model, device=True), wishes())
    assert all(token % 3 == place % 3 for place, token in enumerate(expected[0]))
    engine = engine_of(model, (1, 2, 4, 5), True, device=True, guesses=(2, 4, 8, 16, 64))
    engine.stepper.speculation = Speculation(Told(wishes(), expected), "always", goes_back=bool(model.states))
    assert answers(engine, wishes()) == expected
    stats = engine.stats()
    assert 0.3 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_model_with_states_has_slots_for_those_before_guesses(loaded: Callable[[str], Model]) -> None:
    options = EngineOptions(ctx=CONTEXT, max_parallel=3, kv="f32", speculation="ngram")
    model = loaded("qwen3.5")
    made = Planner(MACHINES["cpu"], options).plan(model.facts)
    engine = assemble(model, made)
    assert engine.stepper.speculation is not None and made.speculation == "ngram" and made.num_drafts > 0
    assert engine._pages.slots is not None and engine._pages.slots.num_pages == made.num_slots == 4 * 3 + 1


GRAPHS = ("qwen3", "qwen3.5", "falcon-h1", "glm5-next", "lfm2", "gemma3", "mistral", "nemotron-h", "qwen4-exp")
AHEAD = ("qwen3", "qwen3.5", "glm5-next")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "ahead"),
    [*((name, False) for name in GRAPHS), *((name, True) for name in AHEAD)]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in GRAPHS if name not in AHEAD],
)
def test_graph_equals_eager_token_by_token(
    loaded: Callable[[str], Model], name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets larger than the batch, sequences that come, grow into new pages, leave windows and end."""
    model = loaded(name)
    eager = answers(engine_of(model), requests(1))
    monkeypatch.setattr(sparse, "reads_back", lambda x: False)
    engine = engine_of(model, (1, 2, 4), ahead)
    assert answers(engine, requests(1)) == eager
    assert engine.stats().prefix_hit_tokens == 0
    assert answers(engine, requests(1)) == eager  # now with pages from the prefix tree
    assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("name", ["lfm2", "nemotron-h", "olmo-hybrid"])
def test_preemption_changes_no_token_of_a_model_that_keeps_states(loaded: Callable[[str], Model], name: str) -> None:
    model = loaded(name)
    engine = engine_of(model)
    engine.scheduler.limits = replace(engine.scheduler.limits, preempt_every=3)
    assert answers(engine, requests(1)) == answers(engine_of(model), requests(1))
    assert engine.scheduler.num_preemptions > 0


def test_sampling_on_the_device_is_the_same_alone_in_a_batch_captured_and_ahead(
    loaded: Callable[[str], Model],
) -> None:
    model = loaded("qwen3")
    alone = [answers(engine_of(model, device=True), [request])[0] for request in requests(3)]
    assert answers(engine_of(model, device=True), requests(3)) == alone
    assert answers(engine_of(model, (1, 2, 4), True, device=True), requests(3)) == alone
    greedy = [i for i, request in enumerate(requests(3)) if request.params.temperature == 0]
    eager = answers(engine_of(model), requests(3))
    assert [alone[i] for i in greedy] == [eager[i] for i in greedy]


def test_an_assembled_engine_has_graphs_a_spare_page_and_runs_the_plan(
    loaded: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("gemma3")
    options = EngineOptions(ctx=CONTEXT, max_parallel=3, kv="f32", prefill_budget=24)
    made = Planner(MACHINES["cpu"], options).plan(model.facts)
    engine = assemble(model, replace(made, graph_buckets=(1, 2, 3)), capture=rerun, check_invariants=True)
    assert engine.runner.graphs is not None and engine.runner.graphs.note == "graphs 1,2,3"
    assert [p + 1 for p in made.num_pages] == list(engine.runner.cache.num_pages)
    assert answers(engine, requests(5)) == answers(engine_of(model), requests(5))
    plain = assemble(model, made)
    assert plain.runner.graphs is None and plain.runner.cache.num_pages == made.num_pages

    monkeypatch.setattr(Meter, "note", lambda self, name, reserved=False: self.found.update({name: 1}))
    meter = Meter(torch.device("cpu"))
    assemble(model, made, meter=meter)
    assert meter.found == {"kv": 1}  # what the sampler takes is not taken for graphs
    monkeypatch.undo()

    def fails(run: Any) -> Any:
        raise RuntimeError("no graphs here")

    caplog.clear()
    broken = assemble(model, replace(made, graph_buckets=(1, 2), guess_buckets=(4, 8)), capture=fails)
    assert len([one for one in caplog.records if "CUDA graphs" in one.message]) == 1
    assert broken.runner.graphs is not None
    assert broken.runner.graphs.note == "CUDA graphs failed (batch 1: RuntimeError: no graphs here)"
    assert answers(broken, requests(5)) == answers(engine_of(model), requests(5))


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3.5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fails", ["", pytest.param("draft", marks=pytest.mark.slow)])
def test_a_draft_model_has_graphs_of_its_own(loaded: Callable[[str], Model], name: str, fails: str) -> None:
    """It is the model itself, so that all it guesses is right; what cannot be captured is said, and launched."""
    model = loaded(name)
    options = EngineOptions(ctx=CONTEXT, max_parallel=3, kv="f32", speculation="draft", prefill_budget=24)
    made = replace(
        Planner(MACHINES["cpu"], options, draft=model.facts).plan(model.facts),
        graph_buckets=(1, 2, 3),
        guess_buckets=(2, 4, 8, 16, 35) if model.states else (4, 8, 16, 35),
    )
    shapes: list[int] = []

    def capture(run: Run) -> Captured:
        if run.func.__name__ == "compute":
            shapes.append(run.args[0].token_ids.shape[0])
            if fails and shapes.count(35) == 2 and shapes[-1] == 16:
                raise RuntimeError("no room")
        return rerun(run)

    engine = assemble(model, made, draft=model, capture=capture, check_invariants=True)
    speculation = engine.stepper.speculation
    assert speculation is not None
    drafter = speculation._sources[0].paid
    assert isinstance(drafter, DraftModel) and engine.runner.graphs is not None
    assert ("the draft model, batch 16: RuntimeError: no room" in engine.runner.graphs.note) == bool(fails)
    eager: list[list[Scheduled]] = []
    for builder in (engine.runner.builder, drafter.runner.builder):
        builder.build = lambda step, build=builder.build: eager.append(step.scheduled) or build(step)
    asked = [replace(one, params=replace(one.params, temperature=0)) for one in requests(1) if one.params.n == 1]
    assert answers(engine, asked) == answers(engine_of(model), asked)
    behind = [parts for parts in eager if all(part.start >= part.sequence.num_prompt_tokens for part in parts)]
    assert eager and (len(behind) <= 2 if fails else not behind)
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 40


def test_a_capture_that_fails_is_named_and_its_sizes_run_eagerly(loaded: Callable[[str], Model]) -> None:
    def capture(run: Run) -> Captured:
        if run.args[0].token_ids.shape[0] >= 4:
            raise RuntimeError("operation not permitted when stream is capturing")
        return rerun(run)

    engine = engine_of(loaded("qwen3"), (1, 2, 4), True, capture)
    graphs = engine.runner.graphs
    assert graphs.captured == (1, 2)
    assert graphs.failure == "batch 4: RuntimeError: operation not permitted when stream is capturing"
    assert answers(engine, requests(2)) == answers(engine_of(loaded("qwen3")), requests(2))


def test_a_request_does_not_wait_until_all_graphs_are_captured_again(loaded: Callable[[str], Model]) -> None:
    engine = engine_of(loaded("qwen3"), (1, 2, 4), True)
    graphs = engine.runner.graphs
    guessing = DecodeGraphs(graphs._compute, graphs.inputs, (Shape(1), Shape(2)), rerun)
    engine.runner.beside["the MTP head"] = guessing
    guessing.capture()
    assert engine.runner.is_captured
    before = {bucket.shape: bucket for bucket in graphs.buckets}
    graphs.renew()
    questions = iter([False, True])
    assert not engine.runner.capture(lambda: next(questions))
    assert graphs.left == (Shape(1), Shape(2)) and graphs.captured == (1, 2, 4)
    assert [before[bucket.shape] is bucket for bucket in graphs.buckets] == [True, True, False]
    assert not guessing.buckets, "a replay of one would write where the new graph may leave its logits"
    assert answers(engine, requests(2)) == answers(engine_of(loaded("qwen3")), requests(2))
    questions = iter([False, False, True, True])
    assert not engine.runner.capture(lambda: next(questions)) and graphs.captured == (1, 2, 4)
    renewed = graphs.buckets
    assert not graphs.left and not any(before[bucket.shape] is bucket for bucket in renewed)
    questions = iter([False, True])
    assert not engine.runner.capture(lambda: next(questions)) and guessing.captured == (2,)
    assert engine.runner.capture() and guessing.captured == (1, 2)
    assert graphs.buckets is renewed, "what is captured stays, whatever interrupted the drafter's"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama-packable", "qwen3", "gemma3", "qwen4-exp", "glm5-next"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["rows by themselves", "fastest"])
def test_captured_graph_equals_eager_on_the_card(
    name: str, deterministic: bool, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """Forward and sampling captured, one step ahead, against the same kernels launched one by one.

    The fastest kernels' results depend on how many rows a step has: there one request follows the other.
    """
    options = LoadOptions(
        device="cuda", dtype="bfloat16", kv_format="bf16", selftest=SelfTest(), deterministic=deterministic
    )
    with open_model(tiny(name).save(tmp_path)) as checkpoint:
        model = load_model(checkpoint, options)
    eager = engine_of(model, device=True, where="cuda", kv="bf16")
    graphs = engine_of(model, (1, 2, 4), deterministic, CudaCapture(), device=True, where="cuda", kv="bf16")
    assert graphs._runner.graphs is not None and graphs._runner.graphs.failure == ""
    if deterministic:
        assert answers(graphs, requests(1)) == answers(eager, requests(1))
        assert graphs.stats().num_ahead > 10
        return
    for request in requests(1):
        if request.params.n == 1:
            assert answers(graphs, [request]) == answers(eager, [request])


def test_a_capture_that_cannot_end_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def wait_stream(self, other: Stream) -> None: ...

    now = usual = Stream()

    class Using:
        """As `torch.cuda.stream`."""

        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            nonlocal now
            self.before, now = now, self.stream

        def __exit__(self, *error: object) -> None:
            nonlocal now
            now = self.before

    class Graph(Using):
        """As `torch.cuda.graph` where `capture_end` raises: the stream of the capture stays current."""

        def __init__(self, graph: object, **options: Any) -> None:
            super().__init__(options["stream"])

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    for name, fake in {
        "graph_pool_handle": lambda: None,
        "current_device": lambda: 1,
        "current_stream": lambda: now,
        "stream": Using,
        "CUDAGraph": SimpleNamespace,
        "graph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    apart = {0: Stream(), 1: Stream()}  # by GPU; torch's own belongs to the GPU of the first capture
    monkeypatch.setattr("localllm.engine.cuda_graph.capture_stream", apart.__getitem__)
    used: list[Stream] = []
    with pytest.raises(RuntimeError, match="previous error"):
        CudaCapture()(lambda: (used.append(now), ())[1])
    assert now is usual and not one_capture.locked()
    *warm, captured = used
    assert set(warm) == {usual} and captured is apart[1]  # what executes does so in the order of all steps


def test_two_engines_capture_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one stream for all captures of a GPU."""
    inside = most = 0

    class Graph:
        def __init__(self, graph: object, **options: Any) -> None: ...

        def __enter__(self) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)

        def __exit__(self, *error: object) -> None:
            nonlocal inside
            inside -= 1

    for name, fake in {
        "graph_pool_handle": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda: None,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "graph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("localllm.engine.cuda_graph.capture_stream", lambda device: None)
    with ThreadPoolExecutor(4) as pool:
        assert len([*pool.map(lambda _: CudaCapture()(lambda: ()), range(8))]) == 8
    assert most == 1


def test_rows_of_a_step_begin_where_their_kernels_were_compiled_for() -> None:
    """Rows of an odd number of sequences, too: 8 bytes off is another kernel to compile, in the middle of an answer."""
    builder = SimpleNamespace(device=torch.device("meta"), _tensor=torch.from_numpy)
    for count in (1, 2, 3, 7):
        ids = [*range(count)]
        rows, lens = BatchBuilder._decode_tensors(builder, ids, ids, [ids, [9] * count], ids)  # type: ignore[arg-type]
        assert [row.tolist() for row in rows] == [ids, ids, ids, [9] * count] and lens.tolist() == ids
        assert all((row.data_ptr() - rows[0].data_ptr()) % 16 == 0 and row.is_contiguous() for row in rows)
