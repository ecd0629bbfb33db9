"""Guesses above the engine: bound answers, calls, stop strings, streams and log-probabilities stay the same."""

import json
from dataclasses import replace

import pytest

from localllm import LLM, SamplingParams
from localllm.errors import ConfigError, ModelNotFound
from localllm.request import Constraint, ToolUse

TEXT = "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog"
COPY = [{"role": "user", "content": f"Repeat this text word for word: {TEXT}"}]
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"enum": ["cat", "dog", "mat"]}, "minItems": 6, "maxItems": 9}},
    "required": ["names"],
}
TOOL = {"name": "find", "description": "Find an animal", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def pair(smollm2_path):
    """The same model that guesses nothing, and that checks every guess."""
    made = [
        LLM(smollm2_path, ctx=1024, max_parallel=4, speculation=mode, debug_invariants=True)
        for mode in ("off", "ngram")
    ]
    yield made
    for llm in made:
        llm.close()


def answered(output):
    return [(c.token_ids, c.text, c.tool_calls, c.logprobs, c.finish_reason, c.stop_reason) for c in output.completions]


WISHES = {
    "greedy": SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, max_tokens=32, logprobs=2),
    "two answers": SamplingParams(temperature=0.8, seed=4, max_tokens=32, n=2),
    "penalties": SamplingParams(temperature=0.7, seed=1, max_tokens=32, repetition_penalty=1.1, frequency_penalty=0.3),
    "dry and xtc": SamplingParams(temperature=0.9, seed=2, max_tokens=32, dry_multiplier=0.5, xtc_probability=0.3),
    "stop string": SamplingParams(temperature=0, max_tokens=48, stop=("the log", " a "), min_tokens=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WISHES)
def test_text_that_repeats_is_the_same_in_fewer_steps(pair, name):
    off, on = pair
    before = on.stats()
    expected = answered(off.generate([TEXT, TEXT + " sat", "One two"], WISHES[name])[0])
    found = on.generate([TEXT, TEXT + " sat", "One two"], WISHES[name])
    assert answered(found[0]) == expected
    streamed = list(on.generate(TEXT, WISHES[name], stream=True))
    assert "".join(delta.text for delta in streamed if delta.index == 0) == expected[0][1]
    after = on.stats()
    assert after.num_draft_tokens > before.num_draft_tokens and off.stats().num_draft_tokens == 0
    if name == "greedy":
        assert found[0].timing.accepted_tokens > 8 and "n-gram tokens accepted" in on.run_summary


@pytest.mark.slow
def test_bound_answers_and_calls_are_the_same(pair):
    off, on = pair
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=80)
    bound = [llm.chat(COPY, params, constraint=Constraint("json_schema", SCHEMA)) for llm in pair]
    assert answered(bound[0]) == answered(bound[1]) and set(json.loads(bound[1].text)["names"]) <= {"cat", "dog", "mat"}
    tools = ToolUse(({"type": "function", "function": TOOL},), choice="required")
    called = [
        [(call["name"], call["arguments"]) for call in llm.chat(COPY, params, tools=tools).completions[0].tool_calls]
        for llm in pair
    ]
    assert called[0] == called[1] and called[1][0][0] == "find"


def test_a_draft_model_changes_no_token_and_is_counted(tiny_path):
    """It drafts for itself here: greedily it is always right."""
    wishes = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    two = SamplingParams(temperature=0.8, seed=4, max_tokens=16, n=2, repetition_penalty=1.1, ignore_eos=True)
    with LLM(tiny_path, ctx=256, speculation="off") as off:
        expected = [answered(one) for one in off.generate([TEXT, "One two"], wishes)]
        expected_two = answered(off.generate(TEXT, two))
        planned, state = off.plan, off.state()
    with LLM(tiny_path, ctx=256, draft=str(tiny_path), speculation="draft", debug_invariants=True) as llm:
        found = llm.generate([TEXT, "One two"], wishes)
        assert [answered(one) for one in found] == expected and answered(llm.generate(TEXT, two)) == expected_two
        assert found[0].timing.accepted_tokens == found[0].timing.draft_tokens > 12
        assert found[0].timing.drafters == ("draft",) and "draft tokens accepted" in llm.run_summary
        assert llm.plan.weight_bytes == 2 * planned.weight_bytes and llm.plan.kv_bytes == 2 * planned.kv_bytes
        assert llm.state().weight_bytes == 2 * state.weight_bytes and llm.state().kv_bytes == 2 * state.kv_bytes
        assert any(line.startswith("draft ") and "as requested" in line for line in llm.plan.reasons)
        assert llm.generate(TEXT, replace(wishes, max_tokens=80)).timing.accepted_tokens > 40
        assert llm.stats().fastest_tps == 0, "what was mostly guessed says nothing of the model's pace"
        llm.sleep()
        llm.wake()
        assert answered(llm.generate("One two", wishes)) == expected[1]


def test_a_draft_of_another_vocabulary_is_refused_by_name(tiny_path, smollm2_path):
    with pytest.raises(ConfigError, match=r"SmolLM2.* cannot draft for .*tiny.gguf.*token \d+ is") as refused:
        LLM(tiny_path, ctx=256, draft=str(smollm2_path))
    assert "--draft" in refused.value.hint
    with pytest.raises(ModelNotFound, match="draft model: no model 'nope'"):
        LLM(tiny_path, draft="nope")
    with pytest.raises(ConfigError, match="no draft model is named"):
        LLM(tiny_path, ctx=256, speculation="draft")
    with LLM(tiny_path, ctx=256, draft=str(smollm2_path), speculation="off") as llm:  # nobody asks it
        assert llm.plan.speculation == "off"
