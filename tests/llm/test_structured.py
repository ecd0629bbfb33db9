"""Structured output and tools from Python, with the starter model: valid though it has only 135 million parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from localllm import LLM, SamplingParams
from localllm.errors import InvalidConstraint, InvalidRequest
from localllm.request import Constraint, FinishReason, ToolUse

ASK = [{"role": "user", "content": "What is the weather in Lisbon?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "sky": {"enum": ["clear", "cloudy"]},
        "degrees": {"type": "integer", "minimum": -90, "maximum": 60},
    },
    "required": ["city", "sky", "degrees"],
}
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "store_weather", "description": "Store it", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": "The time"}},
)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, ctx=2048, debug_invariants=True) as made:
        yield made


def sampled(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": seed, "max_tokens": 200} | more))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 30))])
def test_answers_validate(llm: LLM, seed: int) -> None:
    answer = llm.chat(ASK, sampled(seed, n=2), constraint=Constraint("json_schema", SCHEMA))
    for one in answer.completions:
        assert one.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(one.text), SCHEMA)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 30))])
def test_required_calls_are_valid(llm: LLM, seed: int) -> None:
    answer = llm.chat(ASK, sampled(seed), tools=ToolUse(TOOLS, "required"))
    (call,) = answer.completions[0].tool_calls
    jsonschema.validate(
        json.loads(call["arguments"]), SCHEMA if call["name"] == "store_weather" else {"maxProperties": 0}
    )
    pieces = list(llm.chat(ASK, sampled(seed), tools=ToolUse(TOOLS, "required"), stream=True))
    deltas = [json.loads(text) for piece in pieces for kind, text in piece.parts if kind == "tool_call"]
    assert "".join(delta["arguments"] for delta in deltas) == call["arguments"]
    assert deltas[0]["name"] == call["name"] and "id" not in deltas[-1]


def test_a_result_goes_back_and_the_prefix_is_kept(llm: LLM) -> None:
    answer = llm.chat(ASK, sampled(1), tools=ToolUse(TOOLS, "required"))
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in answer.completions[0].tool_calls
    ]
    turns = [{"role": "assistant", "content": "", "tool_calls": calls},
             {"role": "tool", "tool_call_id": calls[0]["id"], "content": "stored"}]  # fmt: skip
    after = llm.chat([*ASK, *turns], sampled(1, max_tokens=4), tools=TOOLS)  # type: ignore[list-item]
    known = len(answer.prompt_token_ids) + len(answer.completions[0].token_ids)
    assert after.usage.cached_tokens >= known - 2 * 16
    assert llm.output_rules.support.keeps_prefix and not llm.output_rules.support.native


def test_forced_text_costs_no_steps(llm: LLM) -> None:
    before = llm.stats().num_steps
    answer = llm.generate(
        "Go", SamplingParams(temperature=0), constraint=Constraint("choice", ["a b c d e f g h " * 8])
    )
    assert answer.text == "a b c d e f g h " * 8
    assert llm.stats().num_steps - before <= 6 < answer.usage.completion_tokens


@pytest.mark.slow
def test_greedy_text_that_fits_anyway_stays_as_it_is(llm: LLM) -> None:
    """A mask takes away, and changes nothing where what the model says is allowed."""
    free = llm.chat(ASK, SamplingParams(temperature=0, max_tokens=40))
    bound = llm.chat(ASK, SamplingParams(temperature=0, max_tokens=40), constraint=Constraint("regex", r"(.|\n)*"))
    assert bound.completions[0].token_ids == free.completions[0].token_ids


def test_refusals(llm: LLM) -> None:
    with pytest.raises(InvalidConstraint, match="Invalid type"):
        llm.chat(ASK, constraint=Constraint("json_schema", {"type": "wrong"}))
    with pytest.raises(InvalidConstraint) as caught:
        llm.chat(ASK, tools=[TOOLS[1], {"type": "function", "function": {"name": "x", "parameters": {"type": 5}}}])
    assert caught.value.param == "tools[1].function.parameters"
    assert llm.chat(ASK, SamplingParams(max_tokens=2), tools=ToolUse(TOOLS, "none")).text
    with pytest.raises(InvalidRequest):
        llm.output_rules.spec([1], chat=False, tool_use=ToolUse(TOOLS))
