"""The in-process backend over a tiny model: every turn ends once, whatever happens to it."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))

from localllm.backend.in_process import InProcessBackend
from localllm.errors import InvalidRequest
from localllm.interface import Delta, Done, Failed, Prefill
from localllm.request import LoadProgress, SamplingParams

HELLO = [{"role": "user", "content": "hello"}]
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    import tiny_models

    return str(tiny_models.tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", "Q8_0"))


@pytest.fixture
def backend():
    backend = InProcessBackend(offline=True)
    yield backend
    backend.close()


def wait(backend, wanted, seen, timeout=60):
    """Drain until an event satisfies `wanted`; everything drained is added to `seen`."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        events = backend.events()
        while events:
            seen.append(events.popleft())
            if wanted(seen[-1]):
                return seen[-1]
        time.sleep(0.005)
    raise AssertionError(f"nothing of the kind among {seen}")


def ends(seen, turn):
    return [e for e in seen if isinstance(e, Done | Failed) and e.turn == turn]


def is_ready(event):
    return isinstance(event, LoadProgress) and event.name == "ready"


def test_a_base_model_is_refused_from_its_files(backend, tiny_path, tmp_path):
    base = tmp_path / "base.gguf"
    base.write_bytes(Path(tiny_path).read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templat_"))
    assert backend.find(tiny_path) == tiny_path
    with pytest.raises(InvalidRequest, match="base model without a chat template"):
        backend.find(str(base))
    seen = []
    backend.start(str(base))
    failed = wait(backend, lambda e: isinstance(e, Failed), seen)
    assert "base model without a chat template" in failed.message and failed.turn == -1
    assert {e.name for e in seen if isinstance(e, LoadProgress)} == {"resolve"}, "its weights were loaded"


def test_the_pace_of_answers_is_what_the_next_start_expects(tiny_path, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))

    def expected(long):
        backend = InProcessBackend(offline=True)
        backend.start(tiny_path)
        seen = []
        wait(backend, is_ready, seen)
        plan, facts = backend.llm.plan, backend.facts()
        backend.send(HELLO, LONG if long else SHORT)
        done = wait(backend, lambda e: isinstance(e, Done), seen)
        backend.close()
        own = 1 - done.timing.accepted_tokens / done.usage.completion_tokens  # what was guessed is no pace
        return plan, facts.decode_tps, done.timing.decode_tps * own

    plan, _, measured = expected(long=True)
    assert plan.basis == "estimate"
    again, tps, _ = expected(long=False)
    assert again.basis == "measured" and tps == pytest.approx(measured, abs=0.1)
    assert (again.eta, again.pace) == (plan.eta, plan.pace), "it says nothing of other models"


def test_a_base_model_that_completed_text_is_not_the_default_of_a_chat(tiny_path, tmp_path, monkeypatch):
    import tiny_models

    from localllm.config import EngineOptions
    from localllm.llm.local_models import default_model

    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    base = tiny_models.tiny_safetensors(tmp_path / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    for path in (tiny_path, str(base)):
        one = InProcessBackend(offline=True, completes=True)
        one.start(path)
        wait(one, is_ready, [])
        one.close()
    assert default_model(EngineOptions()) == tiny_path


def test_a_turn_sent_before_ready_is_answered(backend, tiny_path):
    backend.start(tiny_path)
    turn = backend.send(HELLO, SHORT)
    seen = []
    done = wait(backend, lambda e: isinstance(e, Done), seen)
    assert (done.turn, done.stop, done.usage.completion_tokens) == (turn, "length", 6)
    assert sum(e.num_tokens for e in seen if isinstance(e, Delta)) <= 6
    assert any(isinstance(e, Prefill) for e in seen)
    names = [e.name for e in seen if isinstance(e, LoadProgress)]
    assert names[0] == "resolve" and names[-1] == "ready"


def test_facts_are_known_when_ready_is_told(backend, tiny_path):
    backend.start(tiny_path)
    wait(backend, is_ready, [])
    assert backend.facts().ctx > 0 and backend.facts().run_summary


def test_stopping_queued_and_running_turns_ends_each_once(backend, tiny_path):
    backend.start(tiny_path)
    queued = backend.send(HELLO, LONG)
    backend.stop(queued)
    backend.stop(queued)
    seen = []
    assert wait(backend, lambda e: isinstance(e, Done), seen).stop == "abort"
    running = backend.send(HELLO, LONG)
    wait(backend, lambda e: isinstance(e, Delta), seen)
    backend.stop(running)
    assert wait(backend, lambda e: isinstance(e, Done) and e.turn == running, seen).stop == "abort"
    after = backend.send(HELLO, SHORT)
    wait(backend, lambda e: isinstance(e, Done) and e.turn == after, seen)
    assert all(len(ends(seen, turn)) == 1 for turn in (queued, running, after))


def test_a_model_that_does_not_load_fails_every_turn(backend, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\0" * 20)
    backend.start(str(bad))
    turns = [backend.send(HELLO), backend.send(HELLO)]
    seen = []
    for turn in turns:
        failed = wait(backend, lambda e, turn=turn: isinstance(e, Failed) and e.turn == turn, seen)
        assert failed.code.startswith("E12")
    late = backend.send(HELLO)
    assert wait(backend, lambda e: isinstance(e, Failed) and e.turn == late, seen)
    assert all(len(ends(seen, turn)) == 1 for turn in (*turns, late))


def test_parameters_that_fail_fail_their_turn_only(tiny_path):
    def broken(llm):
        raise ValueError("boom")

    backend = InProcessBackend(broken, offline=True)
    backend.start(tiny_path)
    seen = []
    first = backend.send(HELLO)
    assert isinstance(wait(backend, lambda e: ends([e], first), seen), Failed)
    second = backend.send(HELLO, SHORT)
    assert isinstance(wait(backend, lambda e: ends([e], second), seen), Done)
    backend.close()


def test_closing_ends_what_runs(tiny_path):
    backend = InProcessBackend(offline=True)
    backend.start(tiny_path)
    turns = [backend.send(HELLO, LONG) for _ in range(3)]
    seen = []
    wait(backend, lambda e: isinstance(e, Delta), seen)
    backend.close()
    seen += backend.events()
    assert all(len(ends(seen, turn)) == 1 for turn in turns)
    backend.close()


def test_another_model_takes_over_and_the_first_ones_turn_ends(backend, tiny_path):
    backend.start(tiny_path)
    seen = []
    wait(backend, is_ready, seen)
    turn = backend.send(HELLO, LONG)
    wait(backend, lambda e: isinstance(e, Delta), seen)
    backend.start(tiny_path, {"ctx": 64})
    wait(backend, is_ready, seen)
    assert len(ends(seen, turn)) == 1
    assert backend.facts().ctx == 64
    after = backend.send(HELLO, SHORT)
    wait(backend, lambda e: isinstance(e, Done) and e.turn == after, seen)


def test_changes_stay_when_the_next_start_comes_at_once(backend, tiny_path):
    backend.start(tiny_path)
    backend.start(tiny_path, {"ctx": 64})
    backend.start(tiny_path, {"kv": "f32"})
    seen = []
    while not (facts := backend.facts()).ctx:
        wait(backend, is_ready, seen)
    assert (facts.ctx, facts.kv) == (64, "f32")


def test_facts_hold_what_a_panel_shows(backend, tiny_path):
    backend.start(tiny_path)
    seen = []
    wait(backend, is_ready, seen)
    before = backend.facts()
    assert set(before.page_map) <= {0, 1} and len(before.page_map) == before.pages_total
    turn = backend.send(HELLO, SHORT)
    wait(backend, lambda e: isinstance(e, Done) and e.turn == turn, seen)
    after = backend.facts()
    assert after.num_steps > before.num_steps and after.num_output_tokens == before.num_output_tokens + 6
    assert dict(after.plan_parts).keys() == {"weights", "kv", "work", "margin"}
    assert after.held_bytes > after.weight_bytes and after.have_bytes > 0 and after.max_ctx >= after.ctx
    assert after.power_w == 0 and backend.count_tokens("hello you") > 0


def test_choices_have_fit_and_speed(backend, tiny_path):
    rows = backend.choices(256)
    local = [row for row in rows if row.local]
    assert all(row.supported is False or row.have_bytes > 0 for row in local)
    fetched = [row for row in rows if not row.local]
    assert fetched and all(row.size_bytes > 0 and row.license for row in fetched)
    assert any(row.fits and row.tps > 0 for row in fetched) or not any(row.fits for row in fetched)


def test_a_constraint_binds_every_answer_and_a_bad_one_fails_the_turn(tiny_path):
    from localllm.request import Constraint

    bound = InProcessBackend(offline=True, constraint=Constraint("choice", ["yes", "no"]))
    refused = InProcessBackend(offline=True, constraint=Constraint("grammar", "start: nothing_of_the_name"))
    try:
        bound.start(tiny_path)
        seen = []
        for _ in range(2):
            turn = bound.send(HELLO, SamplingParams(temperature=0, max_tokens=20))
            wait(bound, lambda e, turn=turn: isinstance(e, Done | Failed) and e.turn == turn, seen)
            assert "".join(e.text for e in seen if isinstance(e, Delta) and e.turn == turn) in ("yes", "no")
        refused.start(tiny_path)
        refused.send(HELLO, SHORT)
        assert wait(refused, lambda e: isinstance(e, Done | Failed), []).code == "E203"
    finally:
        bound.close()
        refused.close()
