"""Programs on the tiny model: what they write and share, what select scores, and what goes wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from localllm import LLM, SamplingParams
from localllm.errors import ContextTooLong, InvalidConstraint, InvalidRequest
from localllm.program import State, assistant, function, gen, select, system, user
from localllm.program.calls import Prefixes

GREEDY = SamplingParams(temperature=0)
PREFIX = "the sea and the sky " * 6


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    import tiny_models

    path = tiny_models.tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", "Q8_0", context=1024)
    with LLM(path, ctx=1024, max_parallel=8, debug_invariants=True) as llm:
        yield llm


@function
def forking(s: State, size: int) -> int:
    s += PREFIX
    forks = s.fork(size)
    for number, fork in enumerate(forks):
        fork += str(number)
    forks += gen("end", max_tokens=6) + "!"
    forks[0] += gen("more", max_tokens=2, temperature=1.0)
    forks.join()
    return len(forks)


def test_what_forks_begin_with_is_computed_once_and_they_run_together(llm: LLM) -> None:
    llm.engine.clear_prefix_cache()
    before, prefix = llm.stats().num_steps, len(llm.encode_prompt(PREFIX))
    state = forking.run(llm, size=5, params=GREEDY)
    alone = [llm.generate(f"{PREFIX}{number}", SamplingParams(temperature=0, max_tokens=6)) for number in range(5)]
    assert state["end"] == [one.text for one in alone] and state.ret_value == 5
    assert len(state["more"]) == 5 and state["more"][1:] == [None] * 4
    assert state.tokens.reused >= 5 * (prefix // 16 * 16)
    assert state.tokens.computed < prefix + 6 * 40
    # forks one after the other take 38 steps; together 13, and more where their threads begin late
    assert llm.stats().num_steps - before < 5 * 7 + 30
    assert state.text() == PREFIX


def test_select_scores_every_choice_exactly(llm: LLM) -> None:
    @function
    def asked(s: State, method: str) -> None:
        s += PREFIX
        s += select("what", ["sun", "the moon", "stars"], choices_method=method)  # type: ignore[arg-type]

    states = asked.run_batch(llm, [{"method": "token_length_normalized"}, {"method": "likelihood"}])
    before = [*llm.encode_prompt(PREFIX), -1]
    options = [llm.encode_prompt(PREFIX + choice) for choice in ("sun", "the moon", "stars")]
    differ = [next(at for at, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b) for ids in options]
    assert len(set(differ)) > 1, "a choice is joined with the space before it: all are scored from there on"
    sums, lengths = [], []
    for ids in options:
        scores = llm.score(ids)
        assert isinstance(scores, np.ndarray)
        sums.append(sum(float(scores[at - 1, ids[at]]) for at in range(min(differ), len(ids))))
        lengths.append(len(ids) - min(differ))
    for state, weights in zip(states, (lengths, [1, 1, 1]), strict=True):
        meta = state.get_meta_info("what")
        assert meta["logprobs"] == pytest.approx(sums, abs=1e-4) and meta["num_tokens"] == lengths
        best = int(np.argmax([total / weight for total, weight in zip(sums, weights, strict=True)]))
        assert state["what"] == meta["choices"][best] and state.text() == PREFIX + state["what"]
        assert meta["cached_tokens"] >= 2 * (len(before) // 16 * 16)


def test_a_conversation_is_what_the_template_makes_of_it(llm: LLM) -> None:
    @function
    def talk(s: State) -> None:
        s += system("Be brief.") + user("Hi")
        s += assistant(gen("first", max_tokens=5))
        s += user("And?") + assistant("It is ", gen("second", max_tokens=2), ".")

    state = talk.run(llm, params=GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert state["first"] == llm.chat(messages, SamplingParams(temperature=0, max_tokens=5)).text
    last = {"role": "assistant", "content": f"It is {state['second']}."}
    assert state.messages()[-1] == last
    asked = [*state.messages()[:-1], {"role": "assistant", "content": "It is "}]
    ids = llm.encode_chat(asked, continue_final=True)
    assert llm.tokenizer.decode(ids).endswith("It is ")
    assert state["second"] == llm.generate(ids, SamplingParams(temperature=0, max_tokens=2)).text
    assert state.get_meta_info("second")["prompt_tokens"] == len(ids)
    assert state.text().startswith("system: Be brief.\n\nuser: Hi\n\nassistant: ")
    assert state.get_meta_info("second")["completion_tokens"] == 2 and "third" not in state


@pytest.mark.slow
def test_gen_is_bound_by_a_regex_or_a_schema(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}

    @function
    def bound(s: State) -> None:
        s += "It is " + gen("number", regex="[0-9]{2}")
        for given in (schema, json.dumps(schema)):
            s += gen("object", json_schema=given)
            assert json.loads(s["object"]) in ({"a": 1}, {"a": 2})
        s += gen("wrong", regex="(")

    with pytest.raises(InvalidConstraint) as raised:
        bound.run(llm, params=GREEDY)
    assert raised.value.param == "regex"


def test_programs_call_programs_and_a_seed_differs_by_fork(llm: LLM) -> None:
    @function
    def word(s: State, name: str) -> None:
        s += gen(name, max_tokens=8)

    @function
    def twice(s: State) -> None:
        s += PREFIX
        word(s, "one")
        with s.fork(3) as forks:
            for fork in forks:
                word(fork, "two")

    params = SamplingParams(temperature=1.0, seed=7, ignore_eos=True)
    first, again = (twice.run(llm, params=params).variables for _ in range(2))
    assert first == again and len(set(first["two"])) == 3
    assert first["one"] == llm.generate(PREFIX, replace(params, max_tokens=8)).text


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda s: gen("a", regex="a", json_schema={}), "regex and a json_schema"),
        (lambda s: gen("a", json_schema="{"), "not valid JSON"),
        (lambda s: gen("a", max_tokens=0), "max_tokens must be"),
        (lambda s: select("a", []), "must be non-empty"),
        (lambda s: select("a", "yes"), "must be non-empty"),
        (lambda s: select("a", ["x", "x"]), "duplicate"),
        (lambda s: select("a", ["x"], "best"), "choices_method"),  # type: ignore[arg-type]
        (lambda s: 3, "cannot add 3"),
        (lambda s: "a" + gen("b", max_tokens=1) + None, "cannot add None"),  # type: ignore[operator]
        (lambda s: user(gen("a")), "user(...) contains gen(...)"),
        (lambda s: assistant(user("a")), "contains another message"),
        (lambda s: user("a") + "b", "outside of any message"),
        (lambda s: user("a") + gen("b"), "gen(...) is outside"),
        (lambda s: "text" + gen("b", max_tokens=1) + user("a"), "follows text"),
        (lambda s: s["other"], "no variable 'other'"),
        (lambda s: s.fork(0), "1 to 256"),
        (lambda s: forking(1), "needs a state"),
    ],
)  # fmt: skip
def test_mistakes_are_named(llm: LLM, made, said: str) -> None:
    @function
    def wrong(s: State) -> None:
        s += made(s)

    with pytest.raises(InvalidRequest, match=said.replace("(", r"\(").replace(")", r"\)")) as raised:
        wrong.run(llm)
    assert raised.value.hint


def test_select_needs_something_before_it(llm: LLM) -> None:
    @function
    def first(s: State) -> None:
        s += select("a", ["x", "y"])

    if llm.encode_prompt("") == []:
        with pytest.raises(InvalidRequest, match="needs text before it"):
            first.run(llm)


def test_what_fails_ends_what_runs_beside_it(llm: LLM) -> None:
    endless = SamplingParams(temperature=1, ignore_eos=True)

    @function
    def wrong(s: State, long: bool) -> None:
        forks = s.fork(2)
        forks[0] += "a" + gen("a", max_tokens=400)
        if long:
            forks[1] += "the sea " * 1000 + gen("b")
            forks[1].sync()
        while not llm.stats().num_running:
            time.sleep(0)
        raise KeyError("the program's own")

    with pytest.raises(KeyError):
        wrong.run(llm, long=False, params=endless)
    with pytest.raises(ContextTooLong):
        wrong.run_batch(llm, [{"long": True}], params=endless)
    deadline = time.monotonic() + 10
    while llm.stats().num_running or not llm.engine.is_idle:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_begins_alike_waits_until_it_was_read() -> None:
    prefixes = Prefixes(4)
    prompt = list(range(13))
    end = prefixes.begin(prompt)
    waited = threading.Event()

    def other() -> None:
        prefixes.begin([*range(8), 50, 50, 50, 50, 50])()
        waited.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    prefixes.begin([9, 9, 9, 9, 9])()  # begins otherwise
    prefixes.begin([0, 1, 2])()  # no whole piece
    assert not waited.wait(0.01)
    end()
    assert waited.wait(5)
    prefixes.begin([*prompt, 1, 1, 1, 1])()
    thread.join()


def test_prefixes_forget_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.program.calls.MAX_PIECES", 3)
    prefixes = Prefixes(4)
    for start in range(3):
        prefixes.add([start] * 5)
    prefixes.add([0] * 5)  # read again
    prefixes.begin([7] * 5)()
    assert [prefixes.was_read([start] * 9) for start in range(3)] == [True, False, True]
