"""What fails beside a step ends no other request, and a step that is computed again changes no answer."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from localllm.engine import runner, stepper
from localllm.engine.adapters import Residents
from localllm.engine.cuda_graph import DecodeGraphs, Shape
from localllm.engine.decode_inputs import DecodeInputs
from localllm.engine.drafter import Guess
from localllm.engine.engine import Engine
from localllm.engine.page_files import PageFiles
from localllm.engine.scheduler import Scheduled, SchedulerLimits
from localllm.engine.sequence import Sequence
from localllm.engine.speculation import Speculation
from localllm.errors import ConstraintUnmet, DeviceError, OutOfMemory
from localllm.request import FinishReason, Request, SamplingParams

from . import test_engine as integers
from . import test_kv_store as stored
from .test_engine import VOCAB, ids_of, make, request, run


@pytest.fixture(autouse=True)
def in_turn():
    integers.runs_ahead[0] = integers.guesses[0] = False


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 0, "max_tokens": 2}, {"score": True, "max_tokens": 1}])
def test_no_row_of_a_prompt_is_told_twice(asked, monkeypatch):
    """Memory runs out in the second piece of a step's logits, so that the step is computed again."""
    monkeypatch.setattr(runner, "LOGIT_BYTES", 4 * VOCAB * 4)
    engine, calls = make(prefill_budget=64), []
    made = engine.runner.model.logits

    def logits(hidden):
        calls.append(len(hidden))
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")
        return made(hidden)

    engine.runner.model.logits = logits
    (stream,) = run(engine, request(range(40), **asked))
    told = [row for event in stream.seen for row in event.prompt_logprobs or ()]
    scores = sum(len(event.scores) for event in stream.seen if event.scores is not None)
    assert len(told) + scores == 40 and engine.stats().num_relieved == 1


def test_what_a_step_without_room_computed_is_let_go(monkeypatch):
    """Before its retry, which would have even less room. Nothing else frees it: a traceback holds it in a cycle."""
    engine, refs, alive = make(prefill_budget=256), [], []
    forward = engine.runner.model.forward

    def computes(*given):
        alive.append(sum(ref() is not None for ref in refs))
        activations = torch.zeros(8)
        refs.append(weakref.ref(activations))
        if len(refs) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")
        return forward(*given)

    monkeypatch.setattr(engine.runner.model, "forward", computes, raising=False)
    gc.disable()
    try:
        run(engine, request([1] * 150, max_tokens=1))
    finally:
        gc.enable()
    assert engine.stats().num_relieved == 2 and not any(alive)


@pytest.mark.parametrize("at", [2, 5])
def test_tokens_that_cannot_be_read_while_the_next_step_runs(at):
    """Asynchronous errors of a GPU show when its results are read: the step and the one ahead are computed again."""
    prompts = [1, 2, 3], [4, 5]
    wanted = [ids_of(run(make(), request(prompt, max_tokens=12))[0]) for prompt in prompts]
    engine = make()
    engine.stepper.runs_ahead = True
    sample, calls = engine.runner.sample, []

    def broken(*given):
        found = sample(*given)
        calls.append(found)
        if len(calls) == at:
            wait = found._wait

            def raises():
                raise RuntimeError("CUDA error: out of memory")

            found._wait, found._results = raises, None
            found._ids = torch.tensor([row[0] for row in wait()])  # the next step reads them on the device
        return found

    engine.runner.sample = broken
    streams = run(engine, *[request(prompt, max_tokens=12) for prompt in prompts])
    assert [ids_of(stream) for stream in streams] == wanted and engine.stats().num_relieved == 1


def ends_well(engine, asked, fail):
    """Whether a running request ends as usual although something beside it fails."""
    bystander = engine.submit(asked)
    fail()
    *_, last = bystander
    alive = not engine.is_dead
    engine.close()
    return alive and last.finish_reason is FinishReason.LENGTH


def test_a_reading_whose_result_cannot_be_computed_ends_alone(monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")

    monkeypatch.setattr(stepper, "pooled_event", fails)
    reads, speaks = run(make(), request([4, 5, 6], score=True), request([1, 2, 3]))
    assert isinstance(reads.seen[-1].error, OutOfMemory)
    assert ids_of(speaks) == integers.alone([1, 2, 3])


ILLEGAL = "CUDA error: an illegal memory access was encountered\nmore"


@pytest.mark.parametrize("where", ["row", "result", "between", "capture"])
def test_a_gpu_that_is_lost_in_work_for_one_request_ends_the_engine(where, monkeypatch):
    """Nothing later can be right, whatever the request that met it."""

    def lost(*_):
        raise RuntimeError(ILLEGAL)

    engine, asked = make(), request([1, 2, 3], temperature=1.0)
    if where == "row":
        monkeypatch.setattr("localllm.engine.sampler.sample_row", lost)
    elif where == "result":
        monkeypatch.setattr(stepper, "pooled_event", lost)
        asked = request([1, 2, 3], score=True)
    elif where == "between":
        engine.between_steps = lost
    else:
        graphs = DecodeGraphs(lambda batch: (), DecodeInputs(4, 64, 16, [9], "cpu"), (Shape(1),), lost)
        engine.between_steps = graphs.capture
    stream = engine.submit(asked)
    engine.start()
    engine.join(10)
    assert engine.failure == f"the GPU failed: a kernel accessed memory out of bounds ({ILLEGAL.splitlines()[0]})"
    ends = [event for event in integers.collected(stream) if event.finish_reason is not None]
    assert len(ends) == 1 and isinstance(ends[0].error, DeviceError)


def test_a_graph_that_cannot_record_a_call_is_given_up(caplog):
    def refuses(_):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    graphs = DecodeGraphs(lambda batch: (), DecodeInputs(4, 64, 16, [9], "cpu"), (Shape(1),), refuses)
    graphs.capture()
    assert not graphs.left and "not permitted when stream is capturing" in graphs.note


def test_a_job_that_hangs_while_a_request_waits_is_a_step_that_hangs():
    engine, begun, gate = make(), threading.Event(), threading.Event()
    engine.start()
    integers.collected(engine.submit(request([1, 2, 3])))

    def hangs(must_stop):
        begun.set()
        return gate.wait(30)

    engine.when_idle(hangs)
    assert begun.wait(20) and engine.step_age_s == 0
    stream = engine.submit(request([1, 2, 3]))
    time.sleep(0.01)
    assert engine.step_age_s > 0
    gate.set()
    assert ids_of(stream) == integers.alone([1, 2, 3])
    engine.close()
    assert engine.step_age_s == 0


def test_a_listener_that_fails_at_once():
    """Its event loop may be closed by the time the engine gets to it."""
    engine = make()
    engine.start()

    def raises(_):
        raise RuntimeError("Event loop is closed")

    assert ends_well(engine, request([1, 2, 3], max_tokens=150), lambda: engine.watch_pages(raises))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", ["page", "slot"])
def test_no_room_for_what_was_stored(part, tmp_path):
    def start():
        windows, _ = stored.KINDS["states"]
        limits = SchedulerLimits(max_parallel=3, prefill_budget=64, num_slots=stored.SLOTS)
        engine = Engine(stored.Runner(stored.Model(), stored.Cache(windows, 200), stored.VOCAB), [200], 600, limits)
        engine.keep_on_disk(PageFiles(tmp_path / "kv", b"i" * 16, 1 << 20))
        engine.start()
        return engine

    first = start()
    list(first.submit(stored.asked(stored.prompt(1))))
    first.close()
    engine, tried = start(), []

    def no_room(*_):
        tried.append(part)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    setattr(engine.runner.cache, f"write_{part}", no_room)
    again = engine.submit(stored.asked(stored.prompt(1)))
    assert ends_well(engine, stored.asked(stored.prompt(2), 300), lambda: list(again)) and tried


def test_no_room_for_an_adapter():
    class Held:
        def open(self, path):
            return type("File", (), {"nbytes": 10, "rank": 4, "base": ""})()

        def read(self, file):
            return type("Weights", (), {"digest": "d", "nbytes": 10})()

        def put(self, place, weights):
            if weights is not None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 MiB")

    engine, held = make(), Held()
    engine.adapters = Residents(lambda: held, lambda: 1 << 30)
    engine.start()
    assert ends_well(engine, request([1, 2, 3], max_tokens=150), lambda: engine.adapters.add("one", "/x"))


class Respelled:
    """After two tokens 3 and 7 follow, which a tokenizer writes as one token: 30. Then any text."""

    def __init__(self, ids=()):
        self.ids = list(ids)

    def fill(self, row):
        allowed = {2: [3], 3: [7] if self.ids[-1:] == [3] else None}.get(len(self.ids))
        if allowed is not None:
            row[:] = np.packbits(np.isin(np.arange(len(row) * 32), allowed), bitorder="little").view(np.int32)
        return allowed is not None

    def accept(self, token):
        if len(self.ids) == 2 and token not in (3, 30) or len(self.ids) == 3 and self.ids[-1] == 3 and token != 7:
            raise ConstraintUnmet("x")
        self.ids.append(token)

    def jump_forward(self, last=None):
        forced = [7] if len(self.ids) == 3 and self.ids[-1] == 3 else []
        return forced if last is None else [30] if forced else [last]

    @property
    def is_done(self):
        return len(self.ids) >= 12

    def fork(self):
        return Respelled(self.ids)

    def rollback(self, count):
        del self.ids[len(self.ids) - count :]


class Wrong:
    name = "wrong"

    def guess(self, sequence):
        return Guess((0, 0), 40)


@pytest.mark.parametrize("ahead", [False, True])
def test_neither_company_nor_drafts_change_how_a_token_is_spelled(ahead):
    """A token that is in a forward pass already cannot be spelled in another way."""
    found = set()
    for others, drafts in ((0, False), (1, False), (0, True), (1, True)):
        engine, asked = make(), request([1, 2, 3], max_tokens=12)
        asked.token_mask, engine.stepper.runs_ahead = Respelled(), ahead
        engine.stepper.speculation = Speculation(Wrong(), "always") if drafts else None
        neighbours = [request([i % 50 for i in range(120)], max_tokens=1)] * others
        found.add(tuple(ids_of(run(engine, asked, *neighbours)[0])))
    assert len(found) == 1 and (30 in next(iter(found))[:4]) is not ahead


def test_block_tables_that_found_no_room_are_copied_with_the_retry(monkeypatch):
    """Of two cache groups, the copy of the second fails; the retry must not take either for loaded."""
    sequence = Sequence(Request([1, 2, 3], SamplingParams()), 0, 2, 0, 10)
    sequence.block_tables = [[3], [4]]
    inputs, copies = DecodeInputs(2, 64, 16, [9, 9], "cpu"), []
    copy = DecodeInputs._copy

    def fails(self, target, values):
        copies.append(target)
        if len(copies) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        copy(self, target, values)

    monkeypatch.setattr(DecodeInputs, "_copy", fails)
    with pytest.raises(torch.OutOfMemoryError):
        inputs.load([Scheduled(sequence, 2, 1)], rows=2)
    inputs.load([Scheduled(sequence, 2, 1)], rows=2)
    batch = inputs.batch(2)
    assert [int(group.block_table[0, 0]) for group in batch.groups] == [3, 4]
