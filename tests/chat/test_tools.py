"""Tool calls of every family: read from any pieces, nothing lost, nothing evaluated."""

# ruff: noqa: E501 - answers stand here as models write them
from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localllm.chat.tools.calls import json_loads
from localllm.chat.tools.formats import BY_NAME, FORMATS, ToolFormat, find_format, read_format
from localllm.chat.tools.parser import answer_parser

(HARMONY, GEMMA, FUNCTION_GEMMA, MISTRAL_NAMED, MISTRAL, DEEPSEEK_TAGS, DEEPSEEK_FENCED, DEEPSEEK, GLM, QWEN_CODER,
 HERMES, PHI, LLAMA3, GENERIC) = (BY_NAME[name] for name in (
    "harmony", "gemma", "function-gemma", "mistral-named", "mistral", "deepseek-tags", "deepseek-fenced", "deepseek",
    "glm", "qwen-coder", "hermes", "phi", "llama3", "generic"))  # fmt: skip

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"enum": ["C", "F"]},
                    "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

Read = tuple[str, str, list[tuple[str, str]]]


def read(tool_format: ToolFormat, pieces: list[str], **options: Any) -> Read:
    """(content, reasoning, calls as (name, arguments))"""
    ids = iter(range(10_000))
    parser = answer_parser(tool_format, TOOLS, new_id=lambda: f"id{next(ids)}", **options)
    content, reasoning = "", ""
    calls: list[dict[str, str]] = []
    for kind, text in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        assert text
        if kind == "tool_call":
            delta = json.loads(text)
            if "id" in delta:
                assert delta["index"] == len(calls) and delta["arguments"] == ""
                calls.append({"id": delta["id"], "name": delta["name"], "arguments": ""})
            else:
                assert delta["index"] == len(calls) - 1 and set(delta) == {"index", "arguments"}
                calls[-1]["arguments"] += delta["arguments"]
        elif kind == "reasoning":
            reasoning += text
        else:
            content += text
    assert len({call["id"] for call in calls}) == len(calls)
    return content, reasoning, [(call["name"], call["arguments"]) for call in calls]


def m3(*tags: str) -> str:
    """Tags as MiniMax-M3 writes them."""
    return "".join(f"]<]minimax[>[{tag}" for tag in tags)


ARGS = '{"city": "Köln \\"é\\"", "days": 3, "where": {"lat": 1.5}, "tags": ["a", "}"]}'
PARIS = '{"city": "Paris"}'
WRITTEN: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    # format, answer, content, calls
    (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>', "", [("get_weather", ARGS)]),
    (HERMES, f'Let me look.\n\n<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>\n', "Let me look.",
     [("get_weather", PARIS)]),
    (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n{{"name": "now"}}'
     "\n</tool_call> Done.", "Done.", [("get_weather", PARIS), ("now", "{}")]),
    (HERMES, f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}', "", [("get_weather", PARIS)]),
    (HERMES, f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}</tool_call>', "",
     [("get_weather", PARIS)]),
    (HERMES, f'<tool_call>{{"type": "function", "function": {{"name": "get_weather", "parameters": {PARIS}}}}}', "",
     [("get_weather", PARIS)]),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    (GENERIC, f'{{"name": "get_weather", "parameters": {PARIS}}}', "", [("get_weather", PARIS)]),
    (GENERIC, f'{{"name": "now"}}\n{{"name": "get_weather", "arguments": {PARIS}}}', "",
     [("now", "{}"), ("get_weather", PARIS)]),
    (QWEN_CODER, "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nK\"öln\n 2\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n<parameter=tags>\n[\"a\"]\n</parameter>\n</function>\n</tool_call>", "I look.",
     [("get_weather", '{"city": "K\\"öln\\n 2", "days": 3, "tags": ["a"]}')]),
    (QWEN_CODER, "<function=now>\n</function>", "", [("now", "{}")]),
    (QWEN_CODER, "<tool_call><function=get_weather><parameter=city>7</parameter><parameter=days>x y</parameter>"
     "<parameter=other>True</parameter></function></tool_call>", "",
     [("get_weather", '{"city": "7", "days": "x y", "other": true}')]),
    (GLM, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>3</arg_value>\n</tool_call>", "", [("get_weather", '{"city": "Köln", "days": 3}')]),
    (GLM, "<tool_call>now</tool_call><tool_call>now\n</tool_call>", "", [("now", "{}")] * 2),
    (LLAMA3, f'{{"name": "get_weather", "parameters": {PARIS}}}', "", [("get_weather", PARIS)]),
    (LLAMA3, f'<|python_tag|>{{"name": "now", "parameters": {{}}}}; {{"name": "get_weather", "parameters": {PARIS}}}', "",
     [("now", "{}"), ("get_weather", PARIS)]),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGS}}}, {{"name": "now", "arguments": {{}}, "id": "x"}}]',
     "", [("get_weather", ARGS), ("now", "{}")]),
    (MISTRAL_NAMED, f"Yes.[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}", "Yes.",
     [("get_weather", ARGS), ("now", "{}")]),
    (GEMMA, '<|tool_call>call:get_weather{city:<|"|>Kö"ln {x}<|"|>,days:3,tags:[<|"|>a<|"|>,<|"|>b<|"|>],where:{lat:1.5}}'
     "<tool_call|>", "",
     [("get_weather", '{"city": "Kö\\"ln {x}", "days": 3, "tags": ["a", "b"], "where": {"lat": 1.5}}')]),
    (FUNCTION_GEMMA, "<start_function_call>call:get_weather{city:<escape>London<escape>}<end_function_call>", "",
     [("get_weather", '{"city": "London"}')]),
    (FUNCTION_GEMMA, "<start_function_call>call:now{}<end_function_call>", "", [("now", "{}")]),
    (DEEPSEEK, f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "",
     [("get_weather", PARIS), ("now", "{}")]),
    (DEEPSEEK_FENCED, f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{PARIS}\n```"
     "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     "Hm.", [("get_weather", PARIS), ("now", "{}")]),
    (DEEPSEEK_TAGS, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
     '5</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', "",
     [("get_weather", '{"city": "5", "days": 3}'), ("now", "{}")]),
    (PHI, f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}]<|/tool_call|>', "", [("get_weather", PARIS)]),
    (HARMONY, f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>", "",
     [("get_weather", PARIS)]),
    (HARMONY, f" to=functions.get_weather<|channel|>commentary json<|message|>{PARIS}<|call|><|start|>assistant"
     "<|channel|>final<|message|>Sun.<|return|>", "Sun.", [("get_weather", PARIS)]),
    *[(BY_NAME[name], text, content, calls) for name, text, content, calls in [
        ("kimi-k2", f"I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
         f"{ARGS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
         "<|tool_calls_section_end|>", "I look.", [("get_weather", ARGS), ("now", "{}")]),
        ("kimi-k2", "<|tool_call_begin|>now:12<|tool_call_argument_begin|>{}<|tool_call_begin|>functions.get_weather:13"
         f"<|tool_call_argument_begin|>{PARIS}", "", [("now", "{}"), ("get_weather", PARIS)]),
        ("kimi-k3", "<|open|>response<|sep|>Yes.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"get_weather\" "
         "index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>Köln <<|close|>argument<|sep|><|open|>argument "
         "key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|open|>argument key=\"where\" type=\"object\"<|sep|>"
         "{\"lat\": 1}<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool=\"now\" index=\"2\"<|sep|><|close|>call"
         "<|sep|><|close|>tools<|sep|><|close|>message<|sep|>", "Yes.",
         [("get_weather", '{"city": "Köln <", "days": 3, "where": {"lat": 1}}'), ("now", "{}")]),
        ("minimax-m2", "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">7\n</parameter>\n<parameter "
         "name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>", "",
         [("get_weather", '{"city": "7\\n", "days": 3}'), ("now", "{}")]),
        ("minimax-m3", m3("<tool_call>\n", '<invoke name="get_weather">', "<city>K\"öln", "</city>", "<days>3", "</days>",
         "<where>", "<lat>-1.5", "</lat>", "</where>", "<tags>", "<item>7", "</item>", "<item>b", "</item>", "</tags>",
         "<other>", "</other>", "</invoke>\n", '<invoke name="now">', "</invoke>\n", "</tool_call>"), "",
         [("get_weather", '{"city": "K\\"öln", "days": 3, "where": {"lat": -1.5}, "tags": ["7", "b"], "other": ""}'),
          ("now", "{}")]),
        ("lfm2", "Yes.<|tool_call_start|>[get_weather(city='it\\'s \\u00e9 \"x\"', days=3, where={\"lat\": 1.5, 'x': [True, None]}, "
         "tags=['a', \"b\\n\"]), now()]<|tool_call_end|>", "Yes.",
         [("get_weather", '{"city": "it\'s \\u00e9 \\"x\\"", "days": 3, "where": {"lat": 1.5, "x": [true, null]}, '
           '"tags": ["a", "b\\n"]}'), ("now", "{}")]),
        ("deepseek-v4", '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
         '5</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
         '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', "",
         [("get_weather", '{"city": "5", "days": 3}'), ("now", "{}")]),
        ("seed", "<seed:tool_call>\n<function=get_weather>\n<parameter=city>a\nb\n</parameter>\n<parameter=days>3</parameter>\n"
         "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>", "",
         [("get_weather", '{"city": "a\\nb\\n", "days": 3}'), ("now", "{}")]),
        ("command-a", "<|START_RESPONSE|>So.<|END_RESPONSE|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": "
         f'"get_weather", "parameters": {ARGS}}},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]<|END_ACTION|>',
         "So.", [("get_weather", ARGS), ("now", "{}")]),
        ("command-r", f'Action:\n```json\n[\n    {{\n        "tool_name": "get_weather",\n        "parameters": {PARIS}\n    }}\n]\n```',
         "", [("get_weather", PARIS)]),
        ("apertus", f'Hm.<|tools_prefix|>[{{"get_weather": {ARGS}}}, {{"now": {{}}}}]<|tools_suffix|>', "Hm.",
         [("get_weather", ARGS), ("now", "{}")]),
        ("gigachat", f'Hm.<|function_call|>{{"name": "get_weather", "arguments": {PARIS}}}', "Hm.", [("get_weather", PARIS)]),
        ("gigachat-message", f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "get_weather", "arguments": {PARIS}}}', "",
         [("get_weather", PARIS)]),
        ("functionary", f"<function=get_weather>{ARGS}</function><function=now>{{}}</function>", "",
         [("get_weather", ARGS), ("now", "{}")]),
        ("functionary-parts", f">>>all\nI look.>>>get_weather\n{PARIS}>>>now\n{{}}", "I look.",
         [("get_weather", PARIS), ("now", "{}")]),
        ("hunyuan-3", "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city"
         "</arg_key:opensource>\n<arg_value:opensource>5</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>"
         "now<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>", "",
         [("get_weather", '{"city": "5"}'), ("now", "{}")]),
        ("ifm", "<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n<ifm|arg_value>a < b"
         "</ifm|arg_value>\n<ifm|arg_key>days</ifm|arg_key>\n<ifm|arg_value>3</ifm|arg_value>\n</ifm|tool_call>\n"
         "<ifm|tool_call>now\n</ifm|tool_call>\n</ifm|tool_calls>", "",
         [("get_weather", '{"city": "a < b", "days": 3}'), ("now", "{}")]),
        ("ifm", "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>5</ifm|arg_value>"
         "</ifm|tool_call></ifm|tool_calls>", "", [("get_weather", '{"city": "5"}')]),
        ("minicpm", '<function name="get_weather"><param name="city">Kö\nln</param><param name="days">3</param></function>\n'
         '<function name="get_weather"><param name="city"><![CDATA[a </param> < b]]></param></function>'
         '<function name="now"></function>', "",
         [("get_weather", '{"city": "Kö\\nln", "days": 3}'), ("get_weather", '{"city": "a </param> < b"}'), ("now", "{}")]),
        ("apriel", f'<tool_calls>[{{"name": "get_weather", "arguments": {ARGS}, "id": "x"}}, {{"name": "now", "arguments": {{}}}}]'
         "</tool_calls>", "", [("get_weather", ARGS), ("now", "{}")]),
        ("nemotron", f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}]</TOOLCALL>\n', "", [("get_weather", PARIS)]),
        ("firefunction", f' functools[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]', "",
         [("get_weather", PARIS), ("now", "{}")]),
        ("muse", ' to=user<|message|>I look.<|eom|><|start|>assistant to=get_weather<|message|><atem:function_calls>\n<atem:invoke '
         'name="get_weather">\n<atem:parameter name="city">5</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>'
         'assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls><|eot|>',
         "I look.", [("get_weather", '{"city": "5"}'), ("now", "{}")]),
        ("atem", '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">5</atem:parameter>\n'
         '</atem:invoke>\n</atem:function_calls>', "", [("get_weather", '{"city": "5"}')]),
        ("glm-inline", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>5\n</arg_value><arg_key>days</arg_key><arg_value>3"
         "</arg_value></tool_call><tool_call>now</tool_call>", "", [("get_weather", '{"city": "5\\n", "days": 3}'), ("now", "{}")]),
        ("ling", "Let me see.\n<tool_call>get_weather<arg_key>city</arg_key>\n<arg_value>K\n öln</arg_value><arg_key>where</arg_key>\n"
         '<arg_value>{"lat": 1.5, "in": [{"a": null}]}</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>', "Let me see.",
         [("get_weather", '{"city": "K\\n öln", "where": {"lat": 1.5, "in": [{"a": null}]}}'), ("now", "{}")]),
        ("ling", "<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>5</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3"
         r"</arg_value></tool_call><tool_call>get_weather\n<arg_key>city</arg_key><arg_value>\n</arg_value></tool_call>", "",
         [("get_weather", '{"city": "5", "days": 3}'), ("get_weather", r'{"city": "\\n"}')]),
        ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}]', "", [("get_weather", PARIS)]),
        ("ernie", f'<response>\nIt is.\n</response>\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', "It is.", [("get_weather", PARIS)]),
        ("ernie", "<response>\n<response in> a\n\nb\n</response>", "<response in> a\n\nb", []),
        ("granite", f'<tool_call>[{{"name": "get_weather", "arguments": {PARIS}}}]', "", [("get_weather", PARIS)]),
    ]],
]  # fmt: skip
IDS = [f"{case[0].name}-{number}" for number, case in enumerate(WRITTEN)]


def cuts(text: str) -> list[list[str]]:
    return [[text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]]


@pytest.mark.parametrize("case", WRITTEN, ids=IDS)
def test_calls_as_families_write_them(case: tuple[ToolFormat, str, str, list[tuple[str, str]]]) -> None:
    tool_format, text, content, calls = case
    for streams in (False, True):
        for pieces in cuts(text):
            found = read(tool_format, pieces, streams=streams)
            assert found == (content, "", calls)
            for _, arguments in found[2]:
                assert isinstance(json.loads(arguments), dict)


def test_every_format_is_tried() -> None:
    assert {case[0].name for case in WRITTEN} == set(BY_NAME)


def test_arguments_stream_where_calls_are_kept_valid() -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>'
    parser = answer_parser(HERMES, TOOLS, streams=True)
    parts = [parser.push(char) for char in text]
    first = next(i for i, part in enumerate(parts) if part)
    assert text[: first + 1].endswith('"arguments": {')
    assert sum(map(len, parts)) > len(ARGS) // 2
    whole = answer_parser(HERMES, TOOLS)
    assert not any(whole.push(char) for char in text[: -len("\n</tool_call>") - 1])


NO_CALLS = [
    (HERMES, "The tag <tool_call> begins a call."),
    (HERMES, '<tool_call>{"name": "rm_rf", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": NaN}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": }}</tool_call> and on'),
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'),
    (HERMES, '<tool_call>{"name": "get_weather"'),
    (HERMES, "<tool_call>__import__('os').system('x')</tool_call>"),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": "__import__(1)"}</tool_call>'),
    (HERMES, "<tool_call>{}</tool_call>"),
    (HERMES, "<tool_cal"),
    (HERMES, "  \n"),
    (GENERIC, '{"city": "Paris", "name": "now"}'),
    (GENERIC, '{"answer": 42}'),
    (GENERIC, '{"name": "Bob", "age": 5}'),
    (GENERIC, '{"na'),
    (QWEN_CODER, "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis"),
    (QWEN_CODER, "<tool_call>\n<function=nothing>\n</function>\n</tool_call>"),
    (QWEN_CODER, "use <function=f> here"),
    (GLM, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par"),
    (GLM, "<tool_call>" + "x" * 300),
    (LLAMA3, '{"type": "object", "x": 1}'),
    (LLAMA3, "<|python_tag|>print(1)"),
    (MISTRAL, '[TOOL_CALLS] [{"name": "nothing", "arguments": {}}]'),
    (MISTRAL_NAMED, "[TOOL_CALLS]get_weather[ARGS]no"),
    (GEMMA, "<|tool_call>call:get_weather{city:}<tool_call"),
    (GEMMA, '<|tool_call>call:get_weather{city:<|"|>Paris'),
    (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>[1]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (DEEPSEEK_TAGS, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="no">\n</｜DSML｜invoke>'),
    (PHI, "<|tool_call|>[]<|/tool_call|>"),
    (HARMONY, "plain words"),
]


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}  # as Pydantic writes `str | None`


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (OPTIONAL, "12345", "12345"),
        (OPTIONAL, '{"a": 1}', '{"a": 1}'),
        (OPTIONAL, "True", "True"),
        (OPTIONAL, "null", None),
        ({"type": ["string", "null"]}, "007", "007"),
        ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "7", "7"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1.5", "1.5"),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {}]}, "12", 12),
        ({"type": "integer"}, "x", "x"),
        ({}, "12", 12),
    ],
)
@pytest.mark.parametrize("name", ["qwen-coder", "glm", "minimax-m3"])
def test_text_between_tags_becomes_what_its_schema_allows(name: str, schema: Any, text: str, expected: Any) -> None:
    parameters = {"type": "object", "properties": {"value": schema}, "$defs": {"Code": {"enum": ["7", "8"]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    parser = answer_parser(BY_NAME[name], tools)
    parts = [*parser.push(BY_NAME[name].write("f", {"value": text})), *parser.finish()]
    said = "".join(json.loads(part)["arguments"] for kind, part in parts if kind == "tool_call")
    assert json.loads(said) == {"value": expected}


@pytest.mark.parametrize(("tool_format", "text"), NO_CALLS, ids=[f"{f.name}-{i}" for i, (f, _) in enumerate(NO_CALLS)])
def test_what_is_no_call_is_content(tool_format: ToolFormat, text: str) -> None:
    """Not one character changes."""
    for pieces in cuts(text):
        assert read(tool_format, pieces) == (text, "", [])


def test_a_malformed_call_does_not_hide_the_next() -> None:
    good = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    bad = '<tool_call>{"name": "get_weather", "arguments": {"city": "Par</tool_call>'
    for pieces in cuts(f"{bad} {good} end"):
        assert read(HERMES, pieces) == (f"{bad}end", "", [("get_weather", PARIS)])


def test_one_call_only() -> None:
    call = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    content, _, calls = read(HERMES, [call + call], most_calls=1)
    assert calls == [("get_weather", PARIS)] and content == call


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Think\nhard.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>"
    )
    for pieces in cuts(text):
        assert read(HARMONY, pieces) == ("Wait.", "Think\nhard.", [("get_weather", PARIS)])
        assert read(HARMONY, pieces, streams=True) == ("Wait.", "Think\nhard.", [("get_weather", PARIS)])
    for pieces in cuts("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|> b \n"):
        assert read(HARMONY, pieces) == (" b \n", "a", [])
    broken = f"<|channel|>commentary to=functions.nothing <|constrain|>json<|message|>{PARIS}<|call|>"
    for pieces in cuts(broken):
        assert read(HARMONY, pieces) == (PARIS, "", [])


def test_tools_that_gpt_oss_was_trained_with() -> None:
    """What goes to one that was not offered is no answer to the user."""
    for to in ("python code", "browser.search", "container.exec"):
        text = f"<|channel|>analysis to={to}<|message|>print(1)<|call|><|start|>assistant<|channel|>final<|message|>Two.<|return|>"
        for pieces in cuts(text):
            assert read(HARMONY, pieces) == ("Two.", "print(1)", [])
    for pieces in cuts(f"<|channel|>commentary to=get_weather<|message|>{PARIS}<|call|>"):
        assert read(HARMONY, pieces) == ("", "", [("get_weather", PARIS)])
    assert read(HARMONY, [" to=user<|channel|>final<|message|>Yes.<|end|>"]) == ("Yes.", "", [])


def test_recipients_of_muse_glimmer() -> None:
    text = " to=self<|message|>I could call <atem:function_calls> now.<|eom|><|start|>assistant to=user<|message|>Hello!<|eot|>"
    for pieces in cuts(text):
        assert read(BY_NAME["muse"], pieces) == ("Hello!", "I could call <atem:function_calls> now.", [])


# --- any text, any cut -----------------------------------------------------------------------------------------------

SNIPPETS = sorted(
    {piece for case in WRITTEN for piece in case[1].split(" ")}
    | {one for f in FORMATS for one in (*f.triggers, *f.shown)}
    | {'{"name": "now"', '"arguments": {', "}", "{", '"', "\\", "\n", " ", "é", "🙂", "]", "[", ",", "get_weather", "now", "<", "a"}
)  # fmt: skip


TEXTS = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=5)), max_size=14).map("".join)
CUTS = st.lists(st.integers(0, 300), max_size=12)


def check_any_cut(name: str, text: str, places: list[int], streams: bool) -> None:
    tool_format = BY_NAME[name]
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    whole = read(tool_format, [text], streams=streams)
    assert read(tool_format, pieces, streams=streams) == whole
    assert read(tool_format, list(text), streams=streams) == whole
    if not streams:
        assert all(isinstance(json_loads(arguments), dict) for _, arguments in whole[2])
    if not whole[2] and not tool_format.final and not tool_format.hidden:
        assert whole == (text, "", [])


@given(st.sampled_from([*BY_NAME]), TEXTS, CUTS, st.booleans())
@settings(max_examples=300)
@example("hermes", '<tool_call>{"name": "now"}</tool_call>' * 20, [5, 40], False)
def test_any_cut_gives_the_same(name: str, text: str, places: list[int], streams: bool) -> None:
    check_any_cut(name, text, places, streams)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BY_NAME])
def test_any_cut_gives_the_same_at_length(name: str) -> None:
    settings(max_examples=2000)(given(st.just(name), TEXTS, CUTS, st.booleans())(check_any_cut))()


PLAIN = st.text(st.sampled_from("ab .,é\n"), max_size=12).map(str.strip)
CALLS = st.fixed_dictionaries({"city": st.text(max_size=8)}, optional={"days": st.integers(-9, 9)})


@given(st.lists(st.tuples(PLAIN, CALLS), min_size=1, max_size=4), PLAIN)
@settings(max_examples=150)
def test_nothing_is_lost(parts: list[tuple[str, dict[str, Any]]], last: str) -> None:
    text, expected = "", []
    for words, arguments in parts:
        written = json.dumps(arguments, ensure_ascii=False)
        text += f'{words}\n<tool_call>\n{{"name": "get_weather", "arguments": {written}}}\n</tool_call>\n'
        expected.append(("get_weather", written))
    content, _, calls = read(HERMES, [text + last])
    assert calls == expected
    assert "".join(content.split()) == "".join("".join([*(words for words, _ in parts), last]).split())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*BY_NAME])
@pytest.mark.parametrize("size", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_the_work_is_linear(name: str, size: int) -> None:
    """Long arguments in very many pieces, nothing but triggers, depth, a call cut short: a fraction of the line each."""
    text = next(case[1] for case in WRITTEN if case[0].name == name and "get_weather" in case[1])
    huge = re.sub("Paris|London|K.{0,3}ln", "x" * size, text)
    trigger = (BY_NAME[name].triggers or ("<|channel|>",))[0]
    texts = [huge, trigger * (size // len(trigger)), f'{trigger}{{"name": "now", "arguments": ' + '{"a":' * (size // 5)]
    texts.append(huge[: len(huge) - 200])
    for one in texts:
        began = time.monotonic()
        step = max(len(one) * 10 // size, 1)
        read(BY_NAME[name], [one[i : i + step] for i in range(0, len(one), step)])
        read(BY_NAME[name], [one])
        assert time.monotonic() - began < 20  # the line is 1 s for 1 MB


def test_formats_are_found_in_templates() -> None:
    found = {
        "{{ messages }}": "generic",
        '<tool_call>\n{"name": ': "hermes",
        '<tool_call>\n{"name": <response>': "ernie",
        "<tool_call>\n<function=": "qwen-coder",
        "<tool_call>{{ name }}<arg_key>": "glm",
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>": "glm-inline",
        "<role>ASSISTANT</role> <tool_call>{function-name}\\n<arg_key>": "ling",
        '<role>ASSISTANT</role> <tool_call>\\n{"name": ': "hermes",
        "[TOOL_CALLS] [": "mistral",
        "[TOOL_CALLS]{{ name }}[ARGS]": "mistral-named",
        "<|tool_call>call:<tool_call|>": "gemma",
        "<start_function_call>call:": "function-gemma",
        "<｜tool▁calls▁begin｜>": "deepseek",
        "<｜tool▁calls▁begin｜>```json": "deepseek-fenced",
        "<｜DSML｜function_calls>": "deepseek-tags",
        "<|tool_call|>": "phi",
        "<|start|><|channel|><|message|>": "harmony",
        "'\"parameters\": ' ipython": "llama3",
        "<atem:function_calls>": "atem",
        "<|start|> <|message|> <atem:function_calls>": "muse",
        "<|tool_calls_section_begin|>": "kimi-k2",
        "{{ '<|open|>' }} {{ '<|close|>' }} open_tag('call') open_tag('argument')": "kimi-k3",
        "<minimax:tool_call>": "minimax-m2",
        "set ns = ']<]minimax[>[' macro to_xml <tool_call>": "minimax-m3",
        "List of tools: <|tool_list_start|>[": "lfm2",
        "List of tools: [": "lfm2",
        "<|tool_call_start|>": "lfm2",
        "set dsml = '｜DSML｜' '<' + dsml + 'function_calls>'": "deepseek-tags",
        "set dsml = '｜DSML｜' '<' + dsml + 'tool_calls>'": "deepseek-v4",
        "<seed:tool_call>": "seed",
        "<|START_ACTION|>": "command-a",
        "Action:\\n```json [ tool_name": "command-r",
        "<|tools_prefix|>": "apertus",
        "<|function_call|> <|role_sep|>": "gigachat",
        "'function call' <|role_sep|>": "gigachat-message",
        "{{ '<function=' + name }} {{ '</function>' }}": "functionary",
        "{{ '>>>all\\n' }}": "functionary-parts",
        "'<tool_sep{}>'.format(':opensource')": "hunyuan-3",
        "<ifm|tool_calls><ifm|tool_call>{{ name }}<ifm|arg_key>": "ifm",
        '<function name="f"><param name="k">': "minicpm",
        "within <tool_call> tags: <tool_calls>[": "apriel",
        "<TOOLCALL>[": "nemotron",
        "functools[": "firefunction",
        "respond only with <|tool_call|> followed by a JSON list": "granite",
    }
    assert {template: find_format(template).name for template in found} == found
    assert set(found.values()) == set(BY_NAME)


def test_ids() -> None:
    def ids(tool_format: ToolFormat, text: str) -> list[str]:
        parser = answer_parser(tool_format, TOOLS)
        parts = [json.loads(part) for kind, part in parser.push(text) + parser.finish() if kind == "tool_call"]
        return [delta["id"] for delta in parts if "id" in delta]

    (one,) = ids(MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {}}]')
    assert len(one) == 9 and one.isalnum()
    (one,) = ids(HERMES, '<tool_call>{"name": "now"}')
    assert one.startswith("call_") and len(one) == 29


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"colour": "red"}, "colour"),
        ({"triggers": "<tool_call>"}, "triggers"),
        ({"shares": "yes"}, "shares"),
        ({"call": '{"name": "NAME"}'}, '{"name": "NAME"}'),
        ({"argument": "<KEY>"}, "<KEY>"),
    ],
)
def test_wrong_rows_of_the_table_are_refused(row: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(named)):
        read_format({"name": "new", "call": "NAMEARGUMENTS"} | row)
