"""/v1/responses, Anthropic's and Ollama's APIs, embeddings, scores, tokens: the official SDKs, the written shapes."""

import base64
import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx2
import numpy as np
import openai
import pytest

from localllm.errors import ContextTooLong
from localllm.request import Message
from localllm.server import AppOptions, create_app
from localllm.server.errors import anthropic_body
from localllm.server.generation import without_oldest
from localllm.server.ollama.routes import _capabilities
from localllm.server.served_model import ServedModel

from .conftest import CHAT, DOOR, MESSAGES, RESPONSES, api_of, named_events

HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture
async def sdk(client):
    async with openai.AsyncOpenAI(api_key="x", base_url=api_of(client), http_client=client) as sdk:
        yield sdk


def respond(**fields):
    return {"model": "tiny", "input": "hello there", "max_output_tokens": 16, "temperature": 0, **fields}


# --- responses -------------------------------------------------------------------------------------------------------


async def test_responses_streamed_stored_and_continued(sdk):
    stop = {"stop": ["th"]}
    whole = await sdk.responses.create(**respond(), extra_body=stop)
    assert whole.status == "completed" and whole.output_text
    async with sdk.responses.stream(**respond(), extra_body=stop) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    again = await sdk.responses.retrieve(whole.id)
    assert again.model_dump() == whole.model_dump()
    with pytest.raises(openai.BadRequestError, match="stream is not supported"):
        await sdk.responses.retrieve(whole.id, stream=True)
    more = await sdk.responses.create(**respond(input="go on", previous_response_id=whole.id))
    assert more.usage.input_tokens > whole.usage.total_tokens
    items = (await sdk.responses.input_items.list(more.id, order="asc")).data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    page = await sdk.responses.input_items.list(more.id, order="asc", limit=2)
    assert page.data == items[:2] and page.has_more
    page = await sdk.responses.input_items.list(more.id, order="asc", limit=2, after=items[1].id)
    assert page.data == items[2:] and not page.has_more
    for wrong in ({"limit": 0}, {"limit": 101}, {"after": "gone"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.responses.input_items.list(more.id, **wrong)
        assert refused.value.param == next(iter(wrong))
    await sdk.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(whole.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.responses.create(**respond(previous_response_id=whole.id))
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_a_long_conversation_is_cut_where_that_is_wished(client):
    """Whole turns go, the oldest first; the system's words stay."""
    turns = [{"role": role, "content": f"{i} " + "x" * 60} for i in range(6) for role in ("user", "assistant")]
    sent = {"model": "tiny", "instructions": "be kind", "input": [*turns, {"role": "user", "content": "last"}],
            "max_output_tokens": 16}  # fmt: skip
    refused = await client.post(RESPONSES, json=sent)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    for stream in (False, True):
        made = await client.post(RESPONSES, json=sent | {"truncation": "auto", "stream": stream})
        assert made.status_code == 200, made.text
        whole = named_events(made.text)[-1][1]["response"] if stream else made.json()
        assert whole["truncation"] == "auto" and 0 < whole["usage"]["input_tokens"] < 256
    one = await client.post(RESPONSES, json=sent | {"truncation": "auto", "input": "x" * 3000})
    assert one.status_code == 400, "the last turn alone is too long"


def test_turns_go_as_a_whole():
    def messages(*roles):
        return [Message(role=role, content="x" * 10) for role in roles]

    def kept(roles, share):
        left = without_oldest(messages(*roles), share)
        return left and [m["role"][0] for m in left]

    calls = ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "user"]
    assert kept(calls, 0.01) == ["s", "u", "a", "u"], "a call without its result would be odd"
    assert kept(calls, 0.6) == kept(calls, 0.99) == ["s", "u"]
    assert kept(["user", "assistant", "user"], 0.1) == ["u"]
    assert kept(["system", "user"], 0.1) is None and kept(["system"], 0.1) is None


async def test_items_can_be_named(client):
    first = (await client.post(RESPONSES, json={"model": "tiny", "input": "a", "max_output_tokens": 16})).json()
    item = first["output"][0]
    answers = []
    for one in (item, {"type": "item_reference", "id": item["id"]}):
        asked = [{"role": "user", "content": "a"}, one, {"role": "user", "content": "b"}]
        sent = {"model": "tiny", "input": asked, "max_output_tokens": 16}
        answers.append((await client.post(RESPONSES, json=sent)).json())
    assert answers[0]["usage"]["input_tokens"] == answers[1]["usage"]["input_tokens"]
    lost = await client.post(RESPONSES, json={"model": "tiny", "input": [{"type": "item_reference", "id": "msg_x"}]})
    assert (lost.status_code, lost.json()["error"]["param"]) == (404, "input[0].id")


async def test_response_events_are_numbered_and_end_with_the_whole(client):
    sent = respond(stream=True, include=["message.output_text.logprobs"], top_logprobs=2)
    events = named_events((await client.post(RESPONSES, json=sent)).text)
    assert [e["sequence_number"] for _, e in events] == list(range(len(events)))
    assert all(name == event["type"] for name, event in events)
    last = events[-1][1]
    assert (
        last["type"] == "response.incomplete"
        and last["response"]["incomplete_details"]["reason"] == "max_output_tokens"
    )
    deltas = [e for _, e in events if e["type"] == "response.output_text.delta"]
    (part,) = last["response"]["output"][0]["content"]
    assert "".join(d["delta"] for d in deltas) == part["text"]
    assert [x for d in deltas for x in d["logprobs"]] == part["logprobs"] and len(part["logprobs"]) == 16
    assert all({"item_id", "output_index", "content_index"} <= set(d) for d in deltas)
    stored = (await client.get(f"{RESPONSES}/{last['response']['id']}")).json()
    assert stored == last["response"]


async def test_a_response_that_is_not_stored_is_gone(client):
    body = (await client.post(RESPONSES, json=respond(store=False))).json()
    assert (await client.get(f"{RESPONSES}/{body['id']}")).status_code == 404
    required = {
        "id", "object", "created_at", "error", "incomplete_details", "instructions", "metadata", "model", "output",
        "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p", "status", "usage",
    }  # fmt: skip
    assert required <= set(body)
    assert {"cached_tokens", "cache_write_tokens"} == set(body["usage"]["input_tokens_details"])


async def test_a_response_has_every_field_of_open_responses(client):
    body = (await client.post(RESPONSES, json=respond(presence_penalty=0.5))).json()
    assert (body["presence_penalty"], body["frequency_penalty"], body["text"]["verbosity"]) == (0.5, 0.0, "medium")


async def test_the_tokens_of_an_input_are_counted(client):
    first = (await client.post(RESPONSES, json=respond())).json()
    asked = {"model": "tiny", "input": "hello there"}
    counted = (await client.post(f"{RESPONSES}/input_tokens", json=asked)).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": first["usage"]["input_tokens"]}
    more = (await client.post(f"{RESPONSES}/input_tokens", json=asked | {"previous_response_id": first["id"]})).json()
    assert more["input_tokens"] > counted["input_tokens"]
    odd = {"previous_response_id": first["id"], "input": [{"type": "odd"}]}
    assert (await client.post(RESPONSES, json=odd)).json()["error"]["param"] == "input[0]"


BAD_RESPONSES = [
    (respond(background=True), "background"),
    (respond(conversation="c"), "conversation"),
    (respond(tools=[{"type": "web_search"}], tool_choice={"type": "web_search"}), "tool_choice"),
    (respond(tools=[{"type": "function", "name": "a b"}]), "tools[0].name"),
    (respond(tools=[{"type": "function", "name": "f", "parameters": 5}]), "tools[0].parameters"),
    (respond(max_output_tokens=8), "max_output_tokens"),
    (respond(input=[]), "input"),
    (respond(input=[{"role": "robot", "content": "x"}]), "input[0].role"),
    (respond(input=[{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0]"),
    (respond(input=[{"type": "web_search_call"}]), "input[0]"),
    (respond(input="x" * 3000), "input"),
    (respond(chat_template="x"), "chat_template"),
    (respond(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("sent", "param"), BAD_RESPONSES, ids=range(len(BAD_RESPONSES)))
async def test_responses_that_are_refused(client, sent, param):
    response = await client.post(RESPONSES, json=sent)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_a_choice_among_ignored_tools_says_so(client):
    sent = respond(tools=[{"type": "web_search"}], tool_choice="required")
    error = (await client.post(RESPONSES, json=sent)).json()["error"]
    assert error["param"] == "tool_choice" and "ignores tools of other types" in error["message"]
    assert (await client.post(RESPONSES, json=sent | {"tool_choice": "auto"})).status_code == 200


def test_items_become_messages():
    from localllm.server.openai.responses_schemas import messages_of

    items = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]
    user, call, result = messages_of(items)
    assert user == {"role": "user", "content": "weather?"}
    assert [c["id"] for c in call["tool_calls"]] == ["c1", "c2"] and call["reasoning_content"] == "hm"
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "sun"}


async def test_messages_are_listed_in_full(sdk):
    """Also those that were given without a type, or with their content as a string."""
    given = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": []}]
    made = await sdk.responses.create(**respond(input=given))
    items = (await sdk.responses.input_items.list(made.id, order="asc")).data
    assert [(item.type, item.status, item.role) for item in items] == [
        ("message", "completed", role) for role in ("user", "assistant", "user")
    ]
    assert [[(part.type, part.text) for part in item.content] for item in items] == [
        [("input_text", "hi")], [("output_text", "yo")], [],
    ]  # fmt: skip


def test_calls_and_reasoning_become_items_and_events():
    from localllm.llm.outputs import OutputDelta
    from localllm.request import FinishReason, Usage
    from localllm.server.openai.responses_events import ResponseBuilder
    from localllm.server.openai.responses_schemas import ResponsesRequest

    body = ResponsesRequest.model_validate(respond())
    one = ResponseBuilder(body)
    call = [{"index": 0, "id": "call_1", "name": "f", "arguments": ""}, {"index": 0, "arguments": '{"a":1}'}]
    parts = [("reasoning", "so"), ("content", "well "), *(("tool_call", json.dumps(d)) for d in call)]
    raw = one.begin() + one.take(OutputDelta(0, parts))
    raw += one.take(OutputDelta(0, finish_reason=FinishReason.STOP, usage=Usage(3, 0, 4, 1)))
    kinds = [name.removeprefix("response.") for name, _ in named_events(b"".join(raw).decode())]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", "output_item.added", "content_part.added",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "output_item.added",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    made = one.json()
    assert [item["type"] for item in made["output"]] == ["reasoning", "message", "function_call"]
    assert (
        made["output"][2]["arguments"] == '{"a":1}' and made["usage"]["output_tokens_details"]["reasoning_tokens"] == 1
    )


async def test_a_response_has_log_probabilities_of_all_its_text_and_of_no_other(client):
    """Of a token that is a part of a character, too; not of the reasoning before it, which many deltas bring."""
    from localllm.llm.outputs import OutputDelta
    from localllm.request import FinishReason, TokenLogprob, Usage
    from localllm.server.openai.responses_events import ResponseBuilder
    from localllm.server.openai.responses_schemas import ResponsesRequest
    from localllm.server.response_stream import MAX_PENDING, keep

    include = ["message.output_text.logprobs"]
    for stream in (False, True):
        sent = respond(guided_regex="\U0001f600a", include=include, stream=stream)
        answer = await client.post(RESPONSES, json=sent)
        made = named_events(answer.text)[-1][1]["response"] if stream else answer.json()
        (part,) = made["output"][0]["content"]
        assert bytes(b for one in part["logprobs"] for b in one["bytes"]).decode() == part["text"] == "\U0001f600a"

    one, pending = ResponseBuilder(ResponsesRequest.model_validate(respond(include=include))), []
    one._names = SimpleNamespace(entry=lambda entry: entry.token_id)
    kinds = ["reasoning"] * (MAX_PENDING + 3) + ["", "content", "content"]
    for number, kind in enumerate(kinds):
        keep(pending, 0, OutputDelta(0, [(kind, "x")] if kind else [], [number], [TokenLogprob(number, -1.0)]))
    keep(pending, 0, OutputDelta(0, finish_reason=FinishReason.STOP, usage=Usage()))
    for _, delta in pending:
        one.take(delta)
    assert one.json()["output"][1]["content"][0]["logprobs"] == [MAX_PENDING + 4, MAX_PENDING + 5]


async def test_a_long_list_of_tokens_is_written_slice_by_slice_in_a_thread(client, monkeypatch):
    """In one go it held up every other request for seconds."""
    from localllm.server import reply

    written = []

    def dumps(item, real=reply.dumps):
        if isinstance(item, list):
            written.append((len(item), threading.current_thread() is threading.main_thread()))
        return real(item)

    monkeypatch.setattr(reply, "dumps", dumps)
    sent = {"model": "tiny", "prompt": "ab" * reply.SLICE_ROWS, "return_token_strs": True}
    answer = (await client.post("/tokenize", json=sent)).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > reply.SLICE_ROWS
    assert "".join(answer["token_strs"]) == sent["prompt"]
    assert max(size for size, _ in written) == reply.SLICE_ROWS and not any(in_loop for _, in_loop in written)


def test_the_store_forgets_the_oldest():
    from localllm.server.openai.responses_store import ResponseStore

    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for number in range(5):
        store.put({"id": str(number)}, [])
    assert [store.get(str(n)) is not None for n in range(5)] == [False, False, True, True, True]
    store.put({"id": "large"}, [{"text": "x" * 9_965}])
    assert store.get("4") is None and store.get("large") is not None
    store.put({"id": "too large"}, [{"text": "x" * 20_000}])
    assert store.get("too large") is None
    assert store.remove("large") and not store.remove("large")


# --- Anthropic -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def claude(anthropic, service):
    transport = httpx2.ASGITransport(app=create_app(service, AppOptions()), raise_app_exceptions=False)
    client = httpx2.AsyncClient(transport=None if DOOR else transport)
    address = DOOR or "http://127.0.0.1:8000"
    async with anthropic.AsyncAnthropic(api_key="x", base_url=address, http_client=client) as sdk:
        yield sdk


async def test_anthropic_whole_streamed_and_counted(claude):
    asked = {
        "model": "tiny",
        "max_tokens": 8,
        "messages": HELLO,
        "system": "be short",
        "extra_body": {"temperature": 0},
    }
    whole = await claude.messages.create(**asked)
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "max_tokens")
    async with claude.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    used = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    counted = await claude.messages.count_tokens(model="tiny", messages=HELLO, system="be short")
    assert counted.input_tokens == used
    stopped = await claude.messages.create(**asked, stop_sequences=[text[2:4]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[2:4])
    prefilled = await claude.messages.create(**asked | {"messages": [*HELLO, {"role": "assistant", "content": "Well"}]})
    assert prefilled.usage.output_tokens == 8


async def test_anthropic_thinking_is_on_or_off_and_its_budget_no_bound(client):
    """As docs/server.md says: agents send one always."""
    sent = {"model": "tiny", "max_tokens": 8, "messages": HELLO, "temperature": 0}
    for thinking in ({"type": "enabled", "budget_tokens": 1}, {"type": "adaptive"}, {"type": "disabled"}):
        answer = (await client.post(MESSAGES, json=sent | {"thinking": thinking})).json()
        assert answer["usage"]["output_tokens"] == 8
    refused = await client.post(MESSAGES, json=sent | {"thinking": {"type": "enabled", "budget_tokens": 0}})
    assert refused.status_code == 400


def test_anthropic_effort_is_told_to_the_template():
    """gpt-oss thinks as much as it is told; a template that knows no effort reads nothing of it."""
    from localllm.server.anthropic.schemas import MessagesRequest, to_chat

    asked = {"max_tokens": 8, "messages": HELLO, "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}
    kwargs = to_chat(MessagesRequest.model_validate(asked)).chat_template_kwargs
    assert kwargs == {"enable_thinking": True, "reasoning_effort": "high"}


async def test_anthropic_errors_are_its_own(anthropic, claude, client, make_client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.messages.create(model="other", max_tokens=8, messages=HELLO)
    assert caught.value.body["error"]["type"] == "not_found_error"
    bad = await client.post(MESSAGES, json={"model": "tiny", "messages": HELLO})
    assert bad.status_code == 400
    assert bad.json()["type"] == "error" and bad.json()["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in bad.json()["error"]["message"]
    async with make_client(api_keys=("secret-key",)) as locked:
        refused = await locked.post(MESSAGES, json={})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        sent = {"model": "tiny", "max_tokens": 4, "messages": HELLO}
        assert (await locked.post(MESSAGES, json=sent, headers={"x-api-key": "secret-key"})).status_code == 200


async def test_anthropic_errors_of_a_route_that_openai_has_too(anthropic, claude, client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.models.retrieve("other")
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "not_found_error"
    assert caught.value.body["request_id"] == caught.value.request_id
    assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"type": "text"}, "messages[0].content[0].text: is missing."),
        ({"type": "tool_use", "id": 5, "name": "f"}, "messages[0].content[0].id: must be a string."),
        ({"text": "hi"}, "messages[0].content[0].type: A block must have a type."),
    ],
)
async def test_anthropic_errors_name_the_field_of_a_block(client, block, said):
    sent = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}
    assert (await client.post(MESSAGES, json=sent)).json()["error"]["message"] == said


async def test_anthropic_threads_are_refused_as_its_sdks_expect(client):
    """They then send the whole conversation; a thread that is ignored would lose all but the last message."""
    sent = {"model": "tiny", "max_tokens": 4, "messages": HELLO, "thread": {"type": "create"}}
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        refused = await client.post(path, json=sent)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["details"]["error_code"] == "thread_unsupported_request"
        assert refused.json()["request_id"] == refused.headers["request-id"]
    assert (await client.post(MESSAGES, json=sent | {"thread": None})).status_code == 200


async def test_anthropic_messages_have_every_field(client):
    sent = {"model": "tiny", "max_tokens": 4, "messages": HELLO, "temperature": 0}
    answer = await client.post(MESSAGES, json=sent)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    whole = answer.json()
    assert whole["container"] is None and whole["stop_details"] is None and whole["content"][0]["citations"] == []
    assert whole["usage"]["service_tier"] == "standard" and whole["usage"]["output_tokens_details"] == {
        "thinking_tokens": 0
    }
    streamed = dict(named_events((await client.post(MESSAGES, json=sent | {"stream": True})).text))
    start, end = streamed["message_start"]["message"]["usage"], streamed["message_delta"]["usage"]
    assert set(start) == set(whole["usage"]) and set(end) < set(start)
    for name in ("input_tokens", "cache_read_input_tokens"):
        assert start[name] == end[name]
    assert start["cache_read_input_tokens"] + start["input_tokens"] == sum(
        whole["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )


async def test_too_long_is_said_in_the_words_that_clients_look_for(client):
    long = [{"role": "user", "content": "x" * 3000}]
    error = (await client.post(CHAT, json={"model": "tiny", "messages": long})).json()["error"]
    assert re.search(r"maximum context length is \d+ tokens\. .* resulted in \d{4} tokens", error["message"])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    error = (await client.post(MESSAGES, json={"model": "tiny", "max_tokens": 4, "messages": long})).json()["error"]
    assert re.fullmatch(r"prompt is too long: \d{4} tokens > \d+ maximum", error["message"])
    error = (await client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 256})).json()["error"]
    assert error["message"].endswith("your messages resulted in 256 tokens, and the answer needs one.")
    full = ContextTooLong("too long", context={"prompt_tokens": 256, "max_context": 256})
    assert anthropic_body(full)["error"]["message"] == "prompt is too long: 256 tokens > 255 maximum"


async def test_anthropic_events_in_order(client):
    sent = {"model": "tiny", "max_tokens": 6, "messages": HELLO, "stream": True, "temperature": 0}
    kinds = [name for name, _ in named_events((await client.post(MESSAGES, json=sent)).text)]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}


def test_anthropic_blocks_become_messages():
    from localllm.server.anthropic.schemas import MessagesRequest, to_chat

    body = MessagesRequest.model_validate(
        {
            "max_tokens": 5, "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "messages": [
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I ask"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                ]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sun"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
        }
    )  # fmt: skip
    chat = to_chat(body)
    assert [m.role for m in chat.messages] == ["system", "user", "assistant", "tool"]
    assert chat.messages[0].content == "a\nb" and chat.messages[2].reasoning_content == "hm"
    assert json.loads(chat.messages[2].tool_calls[0]["function"]["arguments"]) == {"x": 1}
    assert chat.messages[3].tool_call_id == "t1" and chat.tool_choice == "required"
    assert chat.tools[0]["function"] == {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize("content", [5, 1.5, True, {"type": "image"}])
async def test_a_tool_result_of_a_wrong_type_is_a_400(client, content):
    results = [{"type": "tool_result", "tool_use_id": "t1", "content": content}]
    sent = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": results}]}
    refused = await client.post(MESSAGES, json=sent)
    assert refused.status_code == 400 and "messages[0].content[0]" in refused.json()["error"]["message"]


async def test_a_prompt_of_claude_code_is_cached_though_its_first_line_changes(client):
    """`cch` is another one in every request."""
    line = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
    rules = {"type": "text", "text": "You are Claude Code. " * 4, "cache_control": {"type": "ephemeral"}}
    cached = []
    for number in ("fa690", "0b1c2", "d3e4f"):
        system = [{"type": "text", "text": line.format(number)}, rules] if number != "d3e4f" else [rules]
        sent = {"model": "tiny", "max_tokens": 1, "system": system, "messages": HELLO}
        used = (await client.post(MESSAGES, json=sent)).json()["usage"]
        cached.append((used["cache_read_input_tokens"] > 64, used["cache_read_input_tokens"] + used["input_tokens"]))
    assert cached[1] == cached[2] and cached[1][0] and cached[0][1] == cached[1][1]


async def test_a_tool_of_an_mcp_server_may_have_a_name_of_128_characters(client):
    """Agents make it of the names of a plugin, a server and a tool; both APIs take as many elsewhere."""
    tool = {"name": "mcp__" + "x" * 123}
    sent = {"model": "tiny", "messages": HELLO, "tools": [tool | {"input_schema": {"type": "object"}}]}
    assert (await client.post(f"{MESSAGES}/count_tokens", json=sent)).status_code == 200
    sent = {"model": "tiny", "input": "hi", "tools": [tool | {"type": "function", "parameters": {"type": "object"}}]}
    assert (await client.post(f"{RESPONSES}/input_tokens", json=sent)).status_code == 200


def test_an_image_that_a_tool_gives_is_shown_after_its_results():
    """Claude Code and Codex look at files so; templates take images in the user's messages alone."""
    from localllm.server.anthropic.schemas import MessagesRequest, to_chat
    from localllm.server.openai.responses_schemas import messages_of

    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    said = {"type": "text", "text": "a file"}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [said, {"type": "image", "source": source}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "sun"}, {"type": "text", "text": "go on"},
    ]  # fmt: skip
    asked = {"max_tokens": 5, "messages": [{"role": "user", "content": results}]}
    one, two, user = to_chat(MessagesRequest.model_validate(asked)).messages
    assert [(one.tool_call_id, one.content), (two.tool_call_id, two.content)] == [("t1", "a file"), ("t2", "sun")]
    assert user.role == "user" and [part.type for part in user.content] == ["image_url", "text"]
    url = "data:image/png;base64,AAAA"
    items = [
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": url}]},
        {"type": "function_call_output", "call_id": "c2", "output": "sun"},
    ]
    for more, roles in (
        ([], ["tool", "tool", "user"]),
        ([{"role": "user", "content": "go"}], ["tool"] * 2 + ["user"] * 2),
    ):
        messages = messages_of([*items, *more])
        assert [message["role"] for message in messages] == roles
        assert messages[2]["content"] == [{"type": "image_url", "image_url": {"url": url}}]


def test_anthropic_tool_use_streams_as_blocks():
    from localllm.llm.outputs import OutputDelta
    from localllm.server.anthropic.messages import MessageRendering

    stream = MessageRendering(None)
    call = [{"index": 0, "id": "t1", "name": "f", "arguments": ""}, {"index": 0, "arguments": '{"x":1}'}]
    raw = stream.take(OutputDelta(0, [("reasoning", "hm"), ("content", "so")]))
    for delta in call:
        raw += stream.take(OutputDelta(0, [("tool_call", json.dumps(delta))]))
    events = [event for _, event in named_events(b"".join(raw).decode())]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    assert events[-1]["delta"] == {"type": "input_json_delta", "partial_json": '{"x":1}'}


# --- Ollama ----------------------------------------------------------------------------------------------------------


def ollama(**fields):
    return {"model": "tiny", "messages": HELLO, "options": {"temperature": 0, "num_predict": 6}, **fields}


async def test_ollama_streams_lines_unless_told_otherwise(client):
    streamed = await client.post("/api/chat", json=ollama())
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    whole = (await client.post("/api/chat", json=ollama(stream=False))).json()
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["eval_count"] == whole["eval_count"] == 6 and whole["done_reason"] == "length"
    assert lines[-1]["total_duration"] > 0


async def test_ollama_generates_raw_and_through_the_template(client):
    sent = {"model": "tiny:latest", "prompt": "hello", "stream": False, "options": {"num_predict": 3, "temperature": 0}}
    templated = (await client.post("/api/generate", json=sent)).json()
    raw = (await client.post("/api/generate", json=sent | {"raw": True})).json()
    assert templated["prompt_eval_count"] > raw["prompt_eval_count"] == 5
    unset = {"system": "", "template": "", "suffix": "", "context": []}  # as clients in Go send it
    assert (await client.post("/api/generate", json=sent | unset)).json()["response"] == templated["response"]
    for more in ({"context": [1, 2]}, {"template": "x"}, {"raw": True, "template": "x"}, {"raw": True, "system": "x"}):
        refused = await client.post("/api/generate", json=sent | more)
        assert refused.status_code == 400 and list(more)[-1] in refused.json()["error"]
    assert (await client.post("/api/generate", json={"model": "tiny"})).json()["done_reason"] == "load"


async def test_ollama_lists_and_describes(client):
    tags = (await client.get("/api/tags")).json()["models"]
    details = {"format": "gguf", "family": "llama", "families": ["llama"], "quantization_level": "Q8_0"}
    assert [m["name"] for m in tags] == ["tiny"]
    assert tags[0]["details"] == details | {"parent_model": "", "parameter_size": "109K"}
    shown = (await client.post("/api/show", json={"model": "tiny"})).json()
    running = (await client.get("/api/ps")).json()["models"][0]
    assert shown["details"] == running["details"] == tags[0]["details"]
    assert shown["model_info"]["llama.context_length"] == 256 and shown["capabilities"] == ["completion"]
    assert (await client.get("/api/ps")).json()["models"][0]["context_length"] == 256
    assert (await client.get("/api/version")).json()["version"]
    vectors = (await client.post("/api/embed", json={"model": "tiny", "input": ["a", "b"]})).json()
    assert len(vectors["embeddings"]) == 2 and vectors["pooling"] == "mean"


def test_ollama_details_are_those_of_the_files(tmp_path, tiny_path, empty_home):
    """Named by path or by name, GGUF or safetensors."""
    import tiny_models

    from localllm import paths
    from localllm.cli.names import Choice
    from localllm.cli.served_models import named_offers
    from localllm.server.ollama.routes import details

    folder = tiny_models.tiny_safetensors(tmp_path / "dense")
    installed = paths.models_dir() / "mine" / "mine.Q8_0.gguf"
    installed.parent.mkdir(parents=True)
    installed.write_bytes(tiny_path.read_bytes())
    choices = [Choice(str(tiny_path), "tiny.gguf"), Choice(str(folder), "dense"), Choice("mine", "mine")]
    models = {model.name: model for model in named_offers(choices, ["other"])}
    found = {name: details(model) for name, model in models.items()}
    assert {name: (d["format"], d["quantization_level"]) for name, d in found.items()} == {
        "tiny.gguf": ("gguf", "Q8_0"), "dense": ("safetensors", "f32"), "mine": ("gguf", "Q8_0"),
    }  # fmt: skip
    assert {(d["family"], d["parameter_size"]) for d in found.values()} == {("llama", "109K")}
    assert models["tiny.gguf"].aliases == ("other",) and models["tiny.gguf"].size_bytes == tiny_path.stat().st_size
    assert str(tiny_path) in models["tiny.gguf"].also and str(tiny_path) not in models["tiny.gguf"].ids
    assert models["dense"].size_bytes > 100_000 and models["dense"].max_context > 0
    assert "im_start" in models["mine"].template_of() and not (models["mine"].embeds or models["mine"].sees)


def test_capabilities_are_those_of_the_files():
    model = ServedModel("m", "m", sees=True)
    assert _capabilities(model, "{% if tools %}<think>") == ["completion", "vision", "tools", "thinking"]
    assert _capabilities(replace(model, sees=False), "") == ["completion"]
    assert _capabilities(replace(model, embeds=True), "tools") == ["embedding"]


BAD_OLLAMA = [
    (ollama(model="other"), 404, "model"),
    (ollama(options={"temperature": -1}), 400, "options.temperature"),
    (ollama(options={"num_predict": 0}), 400, "options.num_predict"),
    (ollama(keep_alive="soon"), 400, "keep_alive"),
    (ollama(keep_alive=True), 400, "keep_alive"),
    (ollama(messages=[], keep_alive=0), 400, "pinned"),
    (ollama(messages=[{"role": "user", "content": "x", "images": ["aaaa"]}]), 400, "messages[0].images"),
    (ollama(format="yaml"), 400, "format"),
]


@pytest.mark.parametrize(("sent", "status", "param"), BAD_OLLAMA, ids=range(len(BAD_OLLAMA)))
async def test_ollama_refusals(client, sent, status, param):
    response = await client.post("/api/chat", json=sent)
    assert response.status_code == status and response.json().keys() == {"error"}
    assert param in response.json()["error"], response.text


async def test_ollama_integers_may_be_written_as_floats(client):
    floats = {"num_predict": 3.0, "seed": 7.0, "top_k": 5.0}
    texts = []
    for options in (floats, {name: int(value) for name, value in floats.items()}):
        answer = (await client.post("/api/chat", json=ollama(options=options, stream=False))).json()
        assert answer["eval_count"] == 3
        texts.append(answer["message"]["content"])
    assert texts[0] == texts[1]
    refused = await client.post("/api/chat", json=ollama(options={"top_k": 5.5}))
    assert refused.json()["error"] == "options.top_k: must be an integer, not 5.5."


def test_times_to_keep_a_model():
    from localllm.server.ollama.schemas import keep_alive_s

    values = {None: "default", 0: 0.0, "0": 0.0, -1: None, "-1m": None, "5m": 300.0, "1h30m": 5400.0, 60: 60.0}
    values |= {"99999999h": 359_999_996_400.0, 1e10: 1e10}
    assert {value: keep_alive_s(value) for value in values} == values


# --- texts -----------------------------------------------------------------------------------------------------------


async def test_embeddings_of_the_sdk_and_as_numbers(sdk, client, tiny_llm):
    """openai-python asks for base64 by default."""
    answer = await sdk.embeddings.create(model="tiny", input=["hello", "bye"])
    floats = (await client.post("/v1/embeddings", json={"model": "tiny", "input": ["hello", "bye"]})).json()
    assert floats["pooling"] == "mean" and floats["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    for mine, theirs in zip(answer.data, floats["data"], strict=True):
        assert np.allclose(mine.embedding, theirs["embedding"], atol=1e-6)
        assert np.linalg.norm(mine.embedding) == pytest.approx(1, abs=1e-5)
    sent = {"input": tiny_llm.encode_prompt("hello"), "encoding_format": "base64", "dimensions": 8, "pooling": "last"}
    short = (await client.post("/v1/embeddings", json=sent)).json()["data"][0]["embedding"]
    assert len(np.frombuffer(base64.b64decode(short), "<f4")) == 8


@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_embeddings_are_the_pooled_states_whatever_the_chunks(client, tiny_llm, pooling):
    """Long texts are read in chunks of 256 rows, and others run beside them."""
    texts = ["a long text, " * 18, "b", "c " * 60]
    sent = {"input": texts, "pooling": pooling, "normalize": False}
    together = [d["embedding"] for d in (await client.post("/v1/embeddings", json=sent)).json()["data"]]
    for text, vector in zip(texts, together, strict=True):
        alone = (await client.post("/v1/embeddings", json=sent | {"input": text})).json()["data"][0]["embedding"]
        assert np.allclose(alone, vector, atol=1e-5)
    assert tiny_llm.stats().pages_free + tiny_llm.stats().pages_cached == tiny_llm.stats().pages_total


async def test_ollama_cuts_long_texts_unless_told_not_to(client, tiny_llm):
    long = {"model": "tiny", "input": "x" * 3000}
    made = (await client.post("/api/embed", json=long)).json()
    assert made["prompt_eval_count"] == tiny_llm.plan.ctx and len(made["embeddings"]) == 1
    refused = await client.post("/api/embed", json=long | {"truncate": False})
    assert refused.status_code == 400 and "256" in refused.json()["error"]


async def test_scores_and_ranks_say_how(client):
    ranked = (
        await client.post(
            "/rerank", json={"query": "hello", "documents": ["bye bye", "hello", {"text": "x"}], "top_n": 2}
        )
    ).json()
    assert [r["index"] for r in ranked["results"]][0] == 1 and len(ranked["results"]) == 2
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1) and "cosine" in ranked["method"]
    scored = (await client.post("/v1/score", json={"text_1": "a", "text_2": ["a", "b"]})).json()
    assert scored["data"][0]["score"] == pytest.approx(1) and len(scored["data"]) == 2
    bad = await client.post("/v1/score", json={"queries": ["a", "b"], "documents": ["x", "y", "z"]})
    assert bad.status_code == 400


@pytest.mark.parametrize(
    ("path", "sent", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "x" * 3000}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_texts_that_are_refused(client, path, sent, param):
    response = await client.post(path, json={"model": "tiny", **sent})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_tokens_there_and_back_in_both_dialects(client, tiny_llm):
    text = "hello there, the end"
    theirs = (await client.post("/tokenize", json={"model": "tiny", "prompt": text, "return_token_strs": True})).json()
    assert theirs["count"] == len(theirs["tokens"]) and "".join(theirs["token_strs"]) == text
    assert theirs["max_model_len"] == 256
    pieces = (await client.post("/tokenize", json={"content": text, "with_pieces": True})).json()["tokens"]
    assert [p["id"] for p in pieces] == theirs["tokens"]
    back = (await client.post("/detokenize", json={"tokens": theirs["tokens"]})).json()
    assert back == {"prompt": text, "content": text}
    chat = (await client.post("/tokenize", json={"messages": HELLO})).json()["tokens"]
    assert chat == tiny_llm.encode_chat(HELLO)


async def test_sampling_that_is_not_stated_is_the_models_and_is_told(client, tiny_llm):
    (model, _) = (await client.get("/v1/models")).json()["data"]
    told = {name: value for name, (value, _) in model["meta"]["sampling"].items()}
    assert told == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert {why for _, why in model["meta"]["sampling"].values()} == {"default"}
    assert model["meta"]["loaded"] is True
    assert model["meta"]["size"] == tiny_llm.path.stat().st_size, "as where the model is not loaded yet"
    body = {"input": "hi", "max_output_tokens": 16}
    response = (await client.post(RESPONSES, json=body)).json()
    assert (response["temperature"], response["top_p"]) == (0.8, 0.95)
    response = (await client.post(RESPONSES, json=body | {"temperature": 0, "top_p": 0.5})).json()
    assert (response["temperature"], response["top_p"]) == (0, 0.5)
