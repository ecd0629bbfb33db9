"""Structured output and tools over HTTP: read in one place, kept by a model of random weights."""

import json
from typing import Literal

import httpx
import httpx2
import jsonschema
import openai
import pydantic
import pytest

from localllm.request import Constraint, ToolUse
from localllm.server import AppOptions, Service, ServiceOptions, create_app
from localllm.server.errors import ApiError
from localllm.server.openai.reading import read_chat
from localllm.server.openai.schemas import ChatRequest

from .conftest import CHAT, MESSAGES, RESPONSES, TEXT, ask, client_of, events, named_events

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"type": "string", "maxLength": 5}},
    "required": ["a", "b"],
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


def form(schema=SCHEMA, **more):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.fixture
def roomy(roomy_pool):
    service = Service(roomy_pool, ServiceOptions(parallel=8))
    yield service
    service.close()


@pytest.fixture
async def client(roomy):
    async with client_of(create_app(roomy, AppOptions())) as client:
        yield client


async def post(client, path=CHAT, **fields):
    body = {"model": "tiny", "max_tokens": 300, "temperature": 0} | fields
    if path == CHAT:
        body = ask(**body)
    return await client.post(path, json=body)


# --- reading ---------------------------------------------------------------------------------------------------------


def read(**fields):
    return read_chat(ChatRequest(**ask(**fields)))


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json_object")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}},
         Constraint("json_schema", SCHEMA, lenient=True)),
        ({"response_format": form()}, Constraint("json_schema", SCHEMA, lenient=True)),
        ({"response_format": form(strict=True)}, Constraint("json_schema", SCHEMA)),
        ({"response_format": form(strict=False)}, Constraint("json_schema", SCHEMA, lenient=True)),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint("json_schema", SCHEMA, param="structured_outputs")),
        ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+", param="structured_outputs")),
        ({"structured_outputs": {"json_object": True}}, Constraint("json_object", param="structured_outputs")),
        ({"guided_json": json.dumps(SCHEMA)}, Constraint("json_schema", SCHEMA, param="guided_json")),
        ({"guided_choice": ["a", "b"]}, Constraint("choice", ("a", "b"), param="guided_choice")),
        ({"guided_regex": "x", "guided_decoding_backend": "auto"}, Constraint("regex", "x", param="guided_regex")),
        ({"guided_grammar": "start: X"}, Constraint("grammar", "start: X", param="guided_grammar")),
        ({"guided_json_object": False}, None),
        ({"json_schema": SCHEMA}, Constraint("json_schema", SCHEMA, param="json_schema")),
        ({"grammar": 'root ::= "x"'}, Constraint("grammar", 'root ::= "x"', param="grammar")),
        ({"grammar": None, "guided_json": None}, None),
    ],
)  # fmt: skip
def test_constraints_are_read(fields, constraint):
    assert read(**fields).constraint == constraint


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({"tools": TOOLS}, ToolUse(tuple(TOOLS))),
        ({"tools": TOOLS, "tool_choice": "none"}, ToolUse(tuple(TOOLS), "none")),
        ({"tools": TOOLS, "tool_choice": "required"}, ToolUse(tuple(TOOLS), "required", (), False)),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
         ToolUse(tuple(TOOLS), "required", (), False)),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True}, ToolUse(tuple(TOOLS), "required")),
        ({"tools": TOOLS, "parallel_tool_calls": True}, ToolUse(tuple(TOOLS))),
        ({"tools": TOOLS, "parallel_tool_calls": False}, ToolUse(tuple(TOOLS), parallel=False)),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
         ToolUse(tuple(TOOLS), "required", ("f",), False)),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": True},
         ToolUse(tuple(TOOLS), "required", ("f",))),
        ({"tools": TOOLS,
          "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[0]]}}},
         ToolUse(tuple(TOOLS), "auto", ("f",))),
        ({"functions": [TOOLS[0]["function"]], "function_call": {"name": "f"}},
         ToolUse((TOOLS[0],), "required", ("f",), False)),
        ({"functions": [TOOLS[0]["function"]], "function_call": "none"}, ToolUse((TOOLS[0],), "none", (), False)),
        ({"tools": [], "tool_choice": "auto"}, None),
        ({"tools": [], "tool_choice": "none"}, None),
        ({"tool_choice": None}, None),
    ],
)  # fmt: skip
def test_tools_are_read(fields, use):
    found = read(**fields)
    assert found.tool_use == use
    assert found.prompts.tools == (None if use is None or use.choice == "none" else list(use.tools))


REFUSED = [
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": form(strict="yes")}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "response_format"),
    *(({"response_format": form(bad)}, "response_format") for bad in ("", None, [], False, 5)),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": "x"}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "backend": "xgrammar"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[" * 100_000}, "guided_json"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    *(({"tool_choice": choice}, "tool_choice") for choice in ("none", "auto", "required")),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
    ({"tools": [TOOLS[0], {"type": "function", "function": {"name": "g", "parameters": "x"}}]},
     "tools[1].function.parameters"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": TOOLS * 100}, "tools"),
    ({"functions": 5}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_is_refused(fields, param):
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400 and caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": form({"type": "wrong"})}, "response_format", "invalid_json_schema"),
        ({"response_format": form({"$ref": "#/nope"})}, "response_format", "invalid_json_schema"),
        ({"response_format": form({"enum": []})}, "response_format", "invalid_json_schema"),
        ({"response_format": form({"$ref": "http://127.0.0.1:9/x"})}, "response_format", "invalid_json_schema"),
        ({"guided_regex": "(?<=a)"}, "guided_regex", "invalid_value"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "invalid_value"),
        ({"tools": [TOOLS[1], {"type": "function", "function": {"name": "g", "parameters": {"type": 5}}}]},
         "tools[1].function.parameters", "invalid_json_schema"),
        ({"tools": [{"type": "function", "function": {"name": "g", "parameters":
          {"properties": {"x": {"type": "string", "pattern": "["}}}}}], "tool_choice": "required"},
         "tools[0].function.parameters", "invalid_json_schema"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "invalid_json_schema"),
    ],
)  # fmt: skip
async def test_bad_schemas_are_400_on_every_way(fields, param, code, client, roomy):
    for stream in (False, True):
        answer = await post(client, stream=stream, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert (await post(client, max_tokens=2)).status_code == 200
    assert roomy.num_reserved == 0


BAD_SCHEMAS = [
    {"type": "wrong"}, {"type": 5}, {"$ref": "#/nope"}, {"type": "string", "pattern": "["}, {"pattern": "["}, "", None,
    [], {"enum": []}, False, 5, {"$ref": "file:///etc/passwd"}, {"properties": 1}, {"items": "x"},
]  # fmt: skip


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=str)
async def test_on_every_route(client, roomy, schema):
    """Empty values, too: other servers ended through them on one route or another."""
    message = [{"role": "user", "content": "x"}]
    strict = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    output = {"format": {"type": "json_schema", "schema": schema}}
    sent = [
        (CHAT, {"messages": message, "response_format": form(schema)}, "response_format"),
        (TEXT, {"prompt": "x", "response_format": form(schema)}, "response_format"),
        (RESPONSES, {"input": "x", "max_output_tokens": 16, "text": {"format": strict}}, "text.format"),
        (MESSAGES, {"messages": message, "output_config": output}, "output_config.format"),
        ("/api/chat", {"messages": message, "format": schema, "options": {"num_predict": 4}}, "format"),
    ]
    if isinstance(schema, dict) and "enum" not in schema:  # a property that no value fits can be left out
        bad = [{"name": "f", "input_schema": {"properties": {"x": schema}}}]
        sent.append((MESSAGES, {"messages": message, "tools": bad}, "tools[0].input_schema"))
    if isinstance(schema, dict):  # elsewhere null, or "", is leaving it out
        sent.append((CHAT, {"messages": message, "guided_json": schema}, "guided_json"))
        sent.append((TEXT, {"prompt": "x", "structured_outputs": {"json": schema}}, "structured_outputs"))
    for path, fields, param in sent:
        if path == "/api/chat" and schema in ("", None):
            continue
        answer = await client.post(path, json={"model": "tiny", "max_tokens": 4} | fields)
        assert answer.status_code == 400, (path, answer.text)
        error = answer.json()["error"]
        if path in (MESSAGES, "/api/chat"):
            assert (error["message"] if path == MESSAGES else error).startswith(param), answer.text
        else:
            assert error["param"] == param, (path, answer.text)
    assert (await client.get("/health")).status_code == 200 and roomy.num_reserved == 0
    assert (await post(client, max_tokens=2)).status_code == 200


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_answers_validate_streamed_and_whole(client, seed):
    fields = {"response_format": form(), "seed": seed, "temperature": 1.0, "n": 2}
    whole = (await post(client, **fields)).json()
    streamed = events((await post(client, stream=True, **fields)).text)
    for choice in whole["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        deltas = [c["delta"] for e in streamed for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(d.get("content") or "" for d in deltas) == choice["message"]["content"]


async def test_every_kind(client):
    kinds = [
        ({"response_format": {"type": "json_object"}, "max_tokens": 400, "temperature": 0.1}, None),
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, None),
        ({"grammar": 'root ::= "a" | "b" root'}, None),
    ]
    for fields, choices in kinds:
        choice = (await post(client, **fields)).json()["choices"][0]
        if choice["finish_reason"] == "stop" and choices:
            assert choice["message"]["content"] in choices
    choice = (await post(client, TEXT, prompt=["Say", "Or"], guided_choice=["one", "two"])).json()["choices"]
    assert [one["text"] in ("one", "two") for one in choice] == [True, True]
    refused = await post(client, TEXT, prompt="x", tools=TOOLS)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"


async def test_cut_answers_are_prefixes(client):
    whole = (await post(client, response_format=form())).json()["choices"][0]["message"]["content"]
    for limit in (1, 3, 6):
        choice = (await post(client, response_format=form(), max_tokens=limit)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert whole.startswith(choice["message"]["content"])
    choice = (await post(client, response_format=form(), stop=['"b"'])).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == whole.split('"b"')[0]


async def test_required_calls_stream_as_deltas(client):
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = (await post(client, **fields)).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    assert call["function"]["name"] in ("f", "now") and call["id"].startswith("call_")
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, SCHEMA if call["function"]["name"] == "f" else {"maxProperties": 0})
    streamed = events((await post(client, stream=True, **fields)).text)
    deltas = [d for e in streamed for c in e["choices"] for d in c["delta"].get("tool_calls", [])]
    assert deltas[0]["function"]["arguments"] == "" and deltas[0]["type"] == "function"
    assert all("id" not in d and d["index"] == 0 for d in deltas[1:])
    assert "".join(d["function"]["arguments"] for d in deltas) == call["function"]["arguments"]
    assert [c["finish_reason"] for e in streamed for c in e["choices"]][-1] == "tool_calls"


async def test_a_forced_call_is_one_call(client):
    named = {"type": "function", "function": {"name": "now"}}
    for seed in range(3):
        for forced in (named, "required"):
            asked = {"tools": TOOLS[1:], "tool_choice": forced, "seed": seed, "temperature": 1}
            choice = (await post(client, **asked)).json()["choices"][0]
            assert [c["function"] for c in choice["message"]["tool_calls"]] == [{"name": "now", "arguments": "{}"}]


def test_forced_calls_are_one_call_in_every_api_unless_more_are_asked_for():
    from localllm.server.anthropic.schemas import MessagesRequest
    from localllm.server.anthropic.schemas import to_chat as from_messages
    from localllm.server.openai.responses_schemas import ResponsesRequest
    from localllm.server.openai.responses_schemas import to_chat as from_responses

    for choice, free in (({"type": "auto"}, True), ({"type": "any"}, False), ({"type": "tool", "name": "f"}, False)):
        for disable, expected in ((None, free), (True, False), (False, True)):
            more = {} if disable is None else {"disable_parallel_tool_use": disable}
            body = MessagesRequest.model_validate(
                {"max_tokens": 9, "messages": [{"role": "user", "content": "go"}], "tool_choice": choice | more,
                 "tools": [{"name": "f", "input_schema": SCHEMA}]}
            )  # fmt: skip
            found = read_chat(from_messages(body)).tool_use
            assert found is not None and found.parallel is expected, (choice, disable)
    mode = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    for choice, free in (("auto", True), ("required", False), ({"type": "function", "name": "f"}, False),
                         (mode, False), (mode | {"mode": "auto"}, True)):  # fmt: skip
        for given, expected in ((None, free), (True, True), (False, False)):
            body = ResponsesRequest.model_validate(
                {"input": "go", "tool_choice": choice, "parallel_tool_calls": given,
                 "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
            )  # fmt: skip
            items = [{"type": "message", "role": "user", "content": "go"}]
            found = read_chat(from_responses(body, items)).tool_use
            assert found is not None and found.parallel is expected, (choice, given)


async def test_the_field_that_allows_one_call_only_is_true_or_false(client):
    choice = {"type": "any", "disable_parallel_tool_use": "no"}
    refused = await post(client, MESSAGES, messages=[{"role": "user", "content": "go"}], tool_choice=choice,
                         tools=[{"name": "f", "input_schema": SCHEMA}])  # fmt: skip
    assert refused.status_code == 400 and "disable_parallel_tool_use" in refused.json()["error"]["message"]


async def test_what_a_choice_without_tools_means_elsewhere(client):
    """Agents send `auto` with an empty list; a response says `auto` by itself, and may be asked for with it."""
    hello = {"messages": [{"role": "user", "content": "go"}]}
    for path, fields in (
        (CHAT, hello | {"tools": [], "tool_choice": "auto"}),
        (RESPONSES, {"input": "go", "max_output_tokens": 16, "tool_choice": "auto"}),
        (RESPONSES, {"input": "go", "max_output_tokens": 16, "tools": [], "tool_choice": "auto"}),
        (MESSAGES, hello | {"tools": [], "tool_choice": {"type": "auto"}}),
    ):
        assert (await post(client, path, **fields | {"max_tokens": 4})).status_code == 200, path
    for path, fields in (
        (CHAT, hello | {"tool_choice": "auto"}),
        (RESPONSES, {"input": "go", "tool_choice": "required"}),
        (MESSAGES, hello | {"tool_choice": {"type": "auto"}}),
    ):
        assert (await post(client, path, **fields | {"max_tokens": 4})).status_code == 400, path


async def test_calls_and_results_go_back_in(client):
    calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": "x"}'}}]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    answer = await post(client, messages=messages, tools=TOOLS, max_tokens=4)
    assert answer.status_code == 200
    prompt = (await client.post("/apply-template", json={"messages": messages, "tools": TOOLS})).json()["prompt"]
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>' in prompt
    assert "<tool_response>\ndone\n</tool_response>" in prompt and '"name": "now"' in prompt
    without = await client.post(
        "/apply-template", json={"messages": messages[:1], "tools": TOOLS, "tool_choice": "none"}
    )
    assert "now" not in without.json()["prompt"]


async def test_functions_are_answered_in_their_own_shape(client):
    """`functions` came before `tools`: one `function_call`, and messages with the role `function`."""
    named = {"functions": [TOOLS[0]["function"]], "function_call": {"name": "f"}}
    choice = (await post(client, **named)).json()["choices"][0]
    call = choice["message"]["function_call"]
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
    choices = [c for e in events((await post(client, stream=True, **named)).text) for c in e["choices"]]
    deltas = [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]]
    assert deltas[0]["name"] == "f" and "".join(d["arguments"] for d in deltas) == call["arguments"]
    assert choices[-1]["finish_reason"] == "function_call" and not any("tool_calls" in c["delta"] for c in choices)
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "done"},
    ]
    prompt = (await client.post("/apply-template", json={"messages": messages})).json()["prompt"]
    assert '<tool_call>\n{"name": "f"' in prompt and "<tool_response>\ndone\n</tool_response>" in prompt
    assert (await post(client, messages=messages, functions=named["functions"], max_tokens=4)).status_code == 200


@pytest.mark.parametrize("limit", [12, 20, 30])
async def test_a_call_that_is_cut_is_shown_without_arguments(client, limit):
    """Where they are an object: half a JSON text is none."""
    hello, tools = [{"role": "user", "content": "go"}], [{"name": "f", "input_schema": SCHEMA}]
    answer = await post(client, MESSAGES, messages=hello, tools=tools, max_tokens=limit,
                        tool_choice={"type": "tool", "name": "f"})  # fmt: skip
    assert answer.status_code == 200 and answer.json()["stop_reason"] == "max_tokens"
    assert all(block.get("input", {}) == {} for block in answer.json()["content"])
    asked = {"model": "tiny", "messages": hello, "tools": TOOLS[:1], "options": {"num_predict": limit}, "stream": False}
    assert (await client.post("/api/chat", json=asked | {"tool_choice": "required"})).status_code == 200


async def test_a_call_that_a_stop_string_cuts_is_not_called_one(client):
    """Clients would carry it out, with half of its arguments or none."""
    hello, tools = [{"role": "user", "content": "go"}], [{"name": "f", "input_schema": SCHEMA}]
    for stream in (False, True):
        answer = await post(client, tools=TOOLS[:1], tool_choice="required", stop=['"a"', '"b"'], stream=stream)
        choice = events(answer.text)[-1]["choices"][0] if stream else answer.json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"][0]) == ("stop", '"')
        answer = await post(client, MESSAGES, messages=hello, tools=tools, tool_choice={"type": "any"},
                            stop_sequences=['"a"', '"b"'], stream=stream)  # fmt: skip
        last = named_events(answer.text)[-2][1]["delta"] if stream else answer.json()
        assert (last["stop_reason"], last["stop_sequence"][0]) == ("stop_sequence", '"')


async def test_hosted_tools_are_left_out_of_a_response(client, caplog):
    """Agents offer them unasked."""
    flat = {"type": "function", "name": "f", "parameters": SCHEMA}
    hosted = [{"type": "web_search"}, {"type": "namespace", "name": "agents", "tools": [flat | {"name": "g"}]}]
    asked = {"model": "tiny", "input": "go", "max_output_tokens": 16}
    assert (await client.post(RESPONSES, json=asked | {"tools": hosted})).status_code == 200
    answer = await client.post(RESPONSES, json=asked | {
        "tools": [*hosted, flat], "tool_choice": "required", "max_output_tokens": 200,
    })  # fmt: skip
    assert answer.status_code == 200 and answer.json()["output"][0]["name"] == "f"
    assert "namespace, web_search" in caplog.text
    shown = answer.json()["tools"]
    assert shown == [*hosted, {"description": None, "strict": False, **flat}]
    forced = await client.post(RESPONSES, json=asked | {"tools": hosted, "tool_choice": "required"})
    assert forced.status_code == 400 and forced.json()["error"]["param"] == "tool_choice"


async def test_the_other_apis_call_too(client):
    tool = {"name": "f", "input_schema": SCHEMA}
    answer = (await post(client, MESSAGES, messages=[{"role": "user", "content": "go"}], tools=[tool],
                         tool_choice={"type": "tool", "name": "f"}, temperature=0)).json()  # fmt: skip
    (block,) = [one for one in answer["content"] if one["type"] == "tool_use"]
    jsonschema.validate(block["input"], SCHEMA)
    assert block["caller"] == {"type": "direct"}
    flat = {"type": "function", "name": "f", "parameters": SCHEMA}
    answer = (await client.post(RESPONSES, json={"model": "tiny", "input": "go", "tools": [flat], "temperature": 0,
                                                 "tool_choice": "required", "parallel_tool_calls": False,
                                                 "max_output_tokens": 200})).json()  # fmt: skip
    (item,) = [one for one in answer["output"] if one["type"] == "function_call"]
    jsonschema.validate(json.loads(item["arguments"]), SCHEMA)


async def test_the_sdk_parses(roomy):
    class Point(pydantic.BaseModel):
        x: int = pydantic.Field(ge=0, le=9)
        name: str = pydantic.Field(max_length=4)

    transport = httpx.ASGITransport(app=create_app(roomy, AppOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000/v1") as http:
        sdk = openai.AsyncOpenAI(api_key="x", base_url="http://127.0.0.1:8000/v1", http_client=http)
        messages = [{"role": "user", "content": "a point"}]
        made = await sdk.chat.completions.parse(
            model="tiny", messages=messages, response_format=Point, max_tokens=100, temperature=0
        )
        assert isinstance(made.choices[0].message.parsed, Point)
        made = await sdk.chat.completions.parse(
            model="tiny", messages=messages, tools=[openai.pydantic_function_tool(Point)], tool_choice="required",
            parallel_tool_calls=False, max_tokens=200, temperature=0,
        )  # fmt: skip
        assert isinstance(made.choices[0].message.tool_calls[0].function.parsed_arguments, Point)


async def test_the_tool_runner_of_anthropic_sends_the_whole_conversation(anthropic, roomy):
    """It asks for a thread first, and would send only what is new to a server that ignores that."""
    seen = []

    async def watched(request):
        seen.append(json.loads(request.content))

    @anthropic.beta_async_tool
    async def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather somewhere."""
        return f"sun in {city}"

    transport = httpx2.ASGITransport(app=create_app(roomy, AppOptions()))
    async with (
        httpx2.AsyncClient(transport=transport, event_hooks={"request": [watched]}) as http,
        anthropic.AsyncAnthropic(api_key="x", base_url="http://127.0.0.1:8000", http_client=http, max_retries=0) as sdk,
    ):
        runner = sdk.beta.messages.tool_runner(
            model="tiny", max_tokens=100, messages=[{"role": "user", "content": "go"}], tools=[weather],
            max_iterations=2, tool_choice={"type": "tool", "name": "weather"},
        )  # fmt: skip
        answers = [message async for message in runner]
    assert "thread" in seen[0] and "thread" not in seen[1]
    assert [m["role"] for m in seen[-1]["messages"]] == ["user", "assistant", "user"]
    assert seen[-1]["messages"][-1]["content"][0]["content"].startswith("sun in ") and len(answers) == 2
