"""Models held to calls write valid ones in every format: random walks, read by the format's own parser."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from grammar_walks import allowed, controlled_tokenizer, walk

from localllm.chat.tools.formats import BY_NAME, FORMATS, ToolFormat
from localllm.chat.tools.parser import answer_parser
from localllm.errors import InvalidConstraint
from localllm.grammar import Compiler, Source
from localllm.grammar.call_rules import MAX_CALLS, call_grammar
from localllm.grammar.tools import whole_answer
from localllm.request import Constraint, ToolUse

PARAMETERS: list[Any] = [
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "minLength": 1, "maxLength": 6},
            "kind": {"type": "string", "enum": ["a b", "c"]},
            "limit": {"type": "integer", "minimum": 1, "maximum": 20},
            "Deep": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}, "names": {"type": "array", "items": {"type": "string"}}},
                "required": ["on"],
            },
            "either": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/size"}]},
        },
        "required": ["query", "limit"],
        "$defs": {"size": {"enum": [1, 2.5, "x"]}},
    },
    {},
    {"type": "object", "properties": {"p": {"type": ["integer", "null"]}}, "required": ["p"]},
]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in zip(("search", "now", "set-p"), PARAMETERS, strict=True)
]
CONTROL = sorted({text for one in FORMATS for text in one.shown})


@pytest.fixture(scope="session")
def controlled() -> Compiler:
    """A vocabulary in which every mark of every format is a control token."""
    tokenizer = controlled_tokenizer(CONTROL)
    return Compiler(tokenizer, tokenizer.vocab_size)


def source(compiler: Compiler, tool_format: ToolFormat, **options: Any) -> Source:
    def grammar(plain: bool) -> str:
        return call_grammar(tool_format, TOOLS, compiler.words(plain=plain), **options)

    return Source("lark", grammar(True), run_text=grammar(False), param="tools")


def calls_in(tool_format: ToolFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = answer_parser(tool_format, TOOLS)
    content, calls = "", []
    for kind, part in parser.push(text) + parser.finish():
        if kind != "tool_call":
            content += part if kind == "content" else ""
            continue
        delta = json.loads(part)
        if "name" in delta:
            calls.append((delta["name"], ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + delta["arguments"])
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def check(calls: list[tuple[str, Any]]) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])
        assert schemas[name] or arguments == {}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("vocabulary", [pytest.param("smollm2", marks=pytest.mark.slow), "controlled"])
@pytest.mark.parametrize(
    "after_trigger", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["required", "begun"]
)
def test_calls_are_valid(
    tool_format: ToolFormat, vocabulary: str, after_trigger: bool, request: pytest.FixtureRequest
) -> None:
    trigger = tool_format.trigger
    if after_trigger and not trigger:
        return
    compiler: Compiler = request.getfixturevalue(vocabulary)
    before = trigger if after_trigger else ""
    finished = most = 0
    one_only = tool_format.one_call or (after_trigger and not tool_format.shares)
    for seed in range(40):
        if seed > 4 and (one_only or most > 1):
            break
        mask = compiler.mask(source(compiler, tool_format, after_trigger=after_trigger))
        ids, ended = walk(compiler, mask, seed, most=1200)
        if not ended:
            continue
        finished += 1
        text = before + compiler.tokenizer.decode(ids, skip_special=False, continuing=True)
        for index in compiler.vocabulary.end_ids:
            text = text.removesuffix(compiler.tokenizer.id_to_token(index) or "x")
        content, calls = calls_in(tool_format, text)
        assert calls and not content, text
        assert len(calls) <= MAX_CALLS
        most = max(most, len(calls))
        check(calls)
    assert finished >= 3
    assert (most == 1) if one_only else (most > 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda one: one.name)
def test_one_call_where_one_is_wanted(tool_format: ToolFormat, smollm2: Compiler) -> None:
    for seed in range(4):
        mask = smollm2.mask(source(smollm2, tool_format, parallel=False))
        ids, ended = walk(smollm2, mask, seed, most=1200)
        if ended:
            assert len(calls_in(tool_format, smollm2.tokenizer.decode(ids))[1]) == 1


def test_a_lone_tool_needs_few_choices(smollm2: Compiler) -> None:
    """Everything but the values is forced."""
    grammar = call_grammar(BY_NAME["hermes"], TOOLS[1:2], smollm2.words(), parallel=False)
    mask = smollm2.mask(Source("lark", grammar))
    forced = smollm2.tokenizer.decode(mask.jump_forward())
    assert forced.startswith('<tool_call>\n{"name": "now", "arguments": {}')
    assert set(allowed(smollm2, mask)) == {mask.jump_forward()[0]}


def test_an_answer_beside_tools_leaves_out_what_its_schema_cannot_have_enforced(smollm2: Compiler) -> None:
    tools = ToolUse(({"type": "function", "function": {"name": "f"}},))
    schema = {"type": "object", "patternProperties": {"^a": {}, "^ab": {"type": "null"}}, "additionalProperties": False}
    whole_answer(smollm2, BY_NAME["hermes"], tools, Constraint("json_schema", schema, lenient=True))
    with pytest.raises(InvalidConstraint, match="not disjoint"):
        whole_answer(smollm2, BY_NAME["hermes"], tools, Constraint("json_schema", schema))
