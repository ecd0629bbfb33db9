"""The official SDKs of OpenAI and Anthropic, synchronous and asynchronous, over real connections and unchanged."""

import json
from typing import Literal

import openai
import pydantic
import pytest

from .conftest import DOOR, live_server

GO = [{"role": "user", "content": "a point"}]


class Point(pydantic.BaseModel):
    x: int = pydantic.Field(ge=0, le=9)
    name: str = pydantic.Field(max_length=4)


class Choice(pydantic.BaseModel):
    """Anthropic's SDK takes bounds out of a schema, and checks them afterwards."""

    colour: Literal["red", "blue"]


TOOL = openai.pydantic_function_tool(Point)
CHAT = {"model": "tiny", "messages": GO, "temperature": 0, "max_tokens": 200}
RESPONSE = {"model": "tiny", "input": "a point", "temperature": 0, "max_output_tokens": 200}
MESSAGE = {"model": "tiny", "messages": GO, "max_tokens": 200, "extra_body": {"temperature": 0}}
ITS_TOOL = {"name": "Point", "input_schema": Point.model_json_schema()}


@pytest.fixture(scope="module")
def url(request):
    if DOOR:
        yield DOOR
        return
    with live_server(request.getfixturevalue("roomy_pool")) as live:
        yield live.url


@pytest.fixture
def sdk(url):
    with openai.OpenAI(api_key="x", base_url=f"{url}/v1", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def claude(anthropic, url):
    with anthropic.Anthropic(api_key="x", base_url=url, max_retries=0) as sdk:
        yield sdk


def test_openai_parses_and_calls(sdk):
    made = sdk.chat.completions.parse(**CHAT, response_format=Point)
    assert isinstance(made.choices[0].message.parsed, Point)
    called = sdk.chat.completions.parse(**CHAT, tools=[TOOL], tool_choice="required")
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Point)
    with sdk.chat.completions.stream(**CHAT, tools=[TOOL], tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert call.function.parsed_arguments == called.choices[0].message.tool_calls[0].function.parsed_arguments


def test_anthropic_lists_models(claude, sdk):
    (listed,) = [one for one in claude.models.list() if one.id == "tiny"]
    found = claude.models.retrieve("tiny")
    for one in (listed, found):
        assert (one.type, one.display_name, one.lifecycle) == ("model", "tiny", "active")
        assert int(one.created_at.timestamp()) == sdk.models.retrieve("tiny").created and one.max_input_tokens
    assert not hasattr(sdk.models.retrieve("tiny"), "display_name"), "OpenAI's shape stays its own"


def test_openai_goes_on_after_a_call(sdk):
    """The message that the SDK made of an answer is what it sends back."""
    message = sdk.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    more = sdk.chat.completions.create(**CHAT | {"messages": [*GO, message, result], "max_tokens": 4}, tools=[TOOL])
    assert more.usage.completion_tokens == 4


def test_openai_responses_parse_and_call(sdk):
    made = sdk.responses.parse(**RESPONSE, text_format=Point)
    assert isinstance(made.output_parsed, Point)
    tool = openai.pydantic_function_tool(Point)["function"] | {"type": "function"}
    called = sdk.responses.parse(**RESPONSE, tools=[tool], tool_choice="required")
    (item,) = [one for one in called.output if one.type == "function_call"]
    assert Point.model_validate(json.loads(item.arguments))
    with sdk.responses.stream(**RESPONSE, text_format=Point) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == made.output_parsed
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
    more = sdk.responses.create(**RESPONSE | {"input": [result], "max_output_tokens": 16},
                                previous_response_id=called.id, tools=[tool])  # fmt: skip
    assert more.usage.output_tokens == 16


def test_openai_raw_responses(sdk):
    short = {"max_tokens": 4}
    asked = [
        (sdk.chat.completions, CHAT | short, "chat.completion"),
        (sdk.completions, {"model": "tiny", "prompt": "a", **short}, "text_completion"),
        (sdk.responses, RESPONSE | {"max_output_tokens": 16}, "response"),
        (sdk.embeddings, {"model": "tiny", "input": "a"}, "list"),
    ]
    for of, fields, kind in asked:
        raw = of.with_raw_response.create(**fields, extra_headers={"X-Request-Id": "mine-2"})
        assert raw.headers["x-request-id"] == "mine-2" and raw.status_code == 200
        assert raw.parse().object == kind
    with sdk.chat.completions.with_streaming_response.create(**CHAT | short, stream=True) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert raw.headers["content-type"].startswith("text/event-stream") and lines[-1] == "data: [DONE]"
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.with_raw_response.create(**RESPONSE | {"max_output_tokens": 0})
    assert caught.value.param == "max_output_tokens" and caught.value.response.headers["x-request-id"]


async def test_openai_async_parses_responses(url):
    async with openai.AsyncOpenAI(api_key="x", base_url=f"{url}/v1") as sdk:
        made = await sdk.responses.parse(**RESPONSE, text_format=Point)
        assert isinstance(made.output_parsed, Point)
        raw = await sdk.chat.completions.with_raw_response.create(**CHAT | {"max_tokens": 4})
        assert raw.parse().usage.completion_tokens == 4


def test_anthropic_answers_streams_and_counts(claude):
    asked = MESSAGE | {"max_tokens": 8, "system": "be short"}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text and final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 8
    kinds = [event.type for event in claude.messages.create(**asked, stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    counted = claude.messages.count_tokens(model="tiny", messages=GO, system="be short")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    more = claude.messages.count_tokens(model="tiny", messages=GO, system="be short", tools=[ITS_TOOL])
    assert more.input_tokens > counted.input_tokens


def test_anthropic_calls_and_goes_on(claude):
    asked = MESSAGE | {"tools": [ITS_TOOL], "tool_choice": {"type": "tool", "name": "Point"}}
    called = claude.messages.create(**asked)
    (block,) = called.content
    assert called.stop_reason == "tool_use" and Point.model_validate(block.input)
    with claude.messages.stream(**asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert json.loads("".join(pieces)) == streamed.input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
    turns = [*GO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    more = claude.messages.create(**MESSAGE | {"messages": turns, "max_tokens": 4}, tools=[ITS_TOOL])
    assert more.usage.output_tokens == 4


def test_anthropic_parses(claude):
    made = claude.messages.parse(**MESSAGE, output_format=Choice)
    assert isinstance(made.parsed_output, Choice)


def test_anthropic_raw_responses(anthropic, claude):
    raw = claude.messages.with_raw_response.create(**MESSAGE | {"max_tokens": 4}, extra_headers={"X-Request-Id": "m-3"})
    assert raw.headers["x-request-id"] == "m-3" and raw.parse().usage.output_tokens == 4
    raw = claude.messages.with_raw_response.count_tokens(model="tiny", messages=GO)
    assert raw.parse().input_tokens > 0
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**MESSAGE | {"max_tokens": 0})
    assert caught.value.body["error"]["type"] == "invalid_request_error"


async def test_anthropic_async_calls_and_parses(anthropic, url):
    async with anthropic.AsyncAnthropic(api_key="x", base_url=url) as claude:
        made = await claude.messages.parse(**MESSAGE, output_format=Choice)
        assert isinstance(made.parsed_output, Choice)
        async with claude.messages.stream(**MESSAGE, tools=[ITS_TOOL], tool_choice={"type": "any"}) as stream:
            (block,) = (await stream.get_final_message()).content
        assert Point.model_validate(block.input)
        raw = await claude.messages.with_raw_response.create(**MESSAGE | {"max_tokens": 4})
        assert (await raw.parse()).stop_reason == "max_tokens"
