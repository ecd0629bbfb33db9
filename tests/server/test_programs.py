"""Programs on a server: what they write there is what they write in process."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from localllm import LLM, SamplingParams
from localllm.errors import LocalLLMError, ServerError, ServerGone
from localllm.program import Endpoint, assistant, function, gen, select, user
from localllm.server.pool import ModelPool

from .conftest import live_server

GREEDY = SamplingParams(temperature=0)


@function
def text(s):
    s += "the sea and the sky and the sea and the sky and the sea"
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += f" {number}:" + gen("made", max_tokens=4, stop="zzz") + select("chosen", [" sun", " the moon"])
    forks.join()


@function
def talk(s):
    s += user("Hi") + assistant(gen("first", max_tokens=4))
    s += user("And?") + assistant("It is", gen("second", max_tokens=2), select("third", [" sun", " moon"]))


@pytest.mark.parametrize("program", [pytest.param(text, marks=pytest.mark.slow), talk], ids=["text", "talk"])
def test_a_server_gives_what_the_model_gives(live, tiny_llm, program):
    here, there = (program.run(model, params=GREEDY) for model in (tiny_llm, Endpoint(f"{live.url}/v1")))
    assert there.variables == here.variables and there.text() == here.text()
    name = "third" if program is talk else "made"
    assert there.tokens.generated == here.tokens.generated and there.tokens.reused > 0
    if program is talk:
        scores = [state.get_meta_info(name)["logprobs"] for state in (here, there)]
        assert scores[1] == pytest.approx(scores[0], abs=1e-4)


@pytest.mark.slow
def test_the_pages_example_of_dspy(smollm2_path, capsys):
    pytest.importorskip("dspy")
    page = Path(__file__).parents[2] / "docs/programs.md"
    code = page.read_text().split("## DSPy")[1].split("```python\n")[1].split("```")[0]
    with LLM(smollm2_path, ctx=2048) as llm, live_server(ModelPool.holding(llm, ("smollm2",))) as live:
        here = code.replace("http://127.0.0.1:8000", live.url)
        exec(compile(here, "page", "exec", dont_inherit=True), {"__name__": "page"})
    assert capsys.readouterr().out == "good\n"


@pytest.mark.slow
def test_select_reads_what_is_before_the_choices_once(live, tiny_llm):
    choices = [" sun", " moon", " sky", " sea"]

    @function
    def choose(s, beginning):
        s += beginning + "the sea and the sky and the sun and the moon " * 4 + select("chosen", choices)

    for number in (1, 2):  # from nothing, and with a beginning that is in the cache
        states = [choose.run(model, "one") for model in (tiny_llm, Endpoint(live.url))]
        assert states[0]["chosen"] == states[1]["chosen"]
        told = [state.get_meta_info("chosen")["logprobs"] for state in states]
        assert told[1] == pytest.approx(told[0], abs=1e-4)
        tiny_llm.engine.clear_prefix_cache()
        tokens = choose.run(Endpoint(live.url), "two" * number).tokens
        length = tokens.computed + tokens.reused
        assert tokens.reused >= 0.6 * length, tokens


@pytest.mark.slow
def test_refusals_and_servers_that_are_not_there_are_named(live):
    @function
    def long(s):
        s += "sea " * 2000 + gen("a", max_tokens=4)

    with pytest.raises(ServerError) as raised:
        long.run(Endpoint(live.url))
    assert raised.value.code == "E901"
    with pytest.raises(LocalLLMError, match="other"):
        text.run(Endpoint(live.url, "other"))
    with pytest.raises(ServerGone) as raised:
        text.run(Endpoint("http://127.0.0.1:9"))
    assert raised.value.hint


@pytest.mark.slow
def test_a_program_that_fails_hangs_up(live, tiny_llm):
    @function
    def wrong(s):
        s += "the sea" + gen("a", max_tokens=200)
        while not tiny_llm.stats().num_running:
            time.sleep(0)
        raise KeyError("the program's own")

    with pytest.raises(KeyError):
        wrong.run(Endpoint(live.url), params=SamplingParams(temperature=1, ignore_eos=True))
    deadline = time.monotonic() + 10
    while tiny_llm.stats().num_running or any(one.name == "program" for one in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
