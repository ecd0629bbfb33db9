"""Tools of type "mcp" in /v1/responses: those of the owner's servers, called by the server itself."""

import asyncio
import json
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from localllm.chat.mcp.client import Result
from localllm.chat.mcp.servers import ServerEntry
from localllm.errors import ConfigError
from localllm.server import Service, ServiceOptions
from localllm.server.mcp import OwnersTools
from localllm.server.openai.responses_mcp import offered
from localllm.server.openai.responses_schemas import ResponsesRequest, messages_of

RESPONSES = "/v1/responses"
ROGUE = Path(__file__).parents[1] / "chat" / "mcp" / "rogue_server.py"
TOOL = {"type": "mcp", "server_label": "rogue", "require_approval": "never", "allowed_tools": ["pick"]}


@pytest.fixture(scope="module")
def tools():
    tools = OwnersTools((ServerEntry("rogue", sys.executable, (str(ROGUE),)),))
    yield tools
    tools.close()


@pytest.fixture
def service(roomy_pool, tools):
    service = Service(roomy_pool, ServiceOptions(parallel=8))
    service.mcp = tools
    yield service
    service.mcp = None  # it stays connected for the other tests
    service.close()


@pytest.fixture
async def client(service, make_client):
    return make_client(service)


@pytest.fixture
def calls(service, monkeypatch):
    """The calls that are made, in place of making them."""
    made = []

    async def call(name, arguments):
        made.append((name, json.loads(arguments)))
        return Result("21 degrees")

    monkeypatch.setattr(service.mcp, "call", call)
    return made


def asked(**fields):
    made = {"model": "tiny", "input": "hi", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300}
    return made | {"temperature": 0, "parallel_tool_calls": False} | fields


async def test_the_server_calls_what_the_model_calls(client):
    whole = (await client.post(RESPONSES, json=asked())).json()
    listed, call, *rest = whole["output"]
    assert listed["type"] == "mcp_list_tools" and [one["name"] for one in listed["tools"]] == ["pick"]
    assert "annotations" not in listed["tools"][0] and "error" not in listed, "null is refused by the AI SDK"
    assert (call["type"], call["server_label"], call["status"]) == ("mcp_call", "rogue", "completed"), whole
    assert call["name"] == "pick" and json.loads(call["arguments"])["text"] == call["output"]
    assert call["error"] is None
    assert [item["type"] for item in rest][-1:] == ["message"], "the model goes on with the result"
    more = asked(previous_response_id=whole["id"], tool_choice="none", max_output_tokens=16)
    again = (await client.post(RESPONSES, json=more)).json()
    assert again["status"] in ("completed", "incomplete"), again


async def streamed(client, **fields):
    events = []
    async with client.stream("POST", RESPONSES, json=asked(stream=True, **fields)) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    return events


async def test_what_is_streamed_is_what_the_whole_holds(client):
    events = await streamed(client)
    kinds = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "response.mcp_list_tools.completed" in kinds and "response.mcp_call.completed" in kinds, events[-1]
    last = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    pieces = [event["delta"] for event in events if event["type"] == "response.mcp_call_arguments.delta"]
    assert "".join(pieces) == next(item["arguments"] for item in last["output"] if item["type"] == "mcp_call")


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"server_label": "other"}, "tools[0].server_label"),
        ({"server_url": "http://evil.example/mcp"}, "tools[0].server_url"),
        ({"authorization": "x"}, "tools[0].authorization"),
        ({"require_approval": "sometimes"}, "tools[0].require_approval"),
        ({"require_approval": {"once": {}}}, "tools[0].require_approval"),
        ({"require_approval": {"never": {"tool_names": "pick"}}}, "tools[0].require_approval.never"),
        ({"require_approval": {"always": {"read_only": True}}}, "tools[0].require_approval.always.read_only"),
        ({"allowed_tools": "echo"}, "tools[0].allowed_tools"),
        ({"allowed_tools": {"read_only": True}}, "tools[0].allowed_tools.read_only"),
    ],
)
async def test_only_what_the_owner_configured(client, changed, param):
    response = await client.post(RESPONSES, json=asked(tools=[TOOL | changed]))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_without_servers_there_are_none(make_client, make_service):
    response = await make_client(make_service()).post(RESPONSES, json=asked())
    assert response.status_code == 400 and "serve --mcp FILE" in response.json()["error"]["message"]


GUARDED = TOOL | {"require_approval": "always"}


def approval(request, **fields):
    return {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True} | fields


@pytest.mark.parametrize(
    ("policy", "guarded"),
    [
        ("always", {"pick", "fail"}),
        (None, {"pick", "fail"}),
        ({}, {"pick", "fail"}),
        ("never", set()),
        ({"never": {"tool_names": ["pick"]}}, {"fail"}),
        ({"always": {"tool_names": ["pick"]}, "never": {"tool_names": ["pick", "fail"]}}, {"pick"}),
    ],
)
async def test_which_calls_need_approval(service, policy, guarded):
    tool = TOOL | {"require_approval": policy, "allowed_tools": ["pick", "fail"]}
    tools, found = await offered(service, ResponsesRequest(input="hi", tools=[tool]))
    assert (set(tools), found) == ({"pick", "fail"}, guarded)


async def test_a_call_waits_for_approval(client, calls):
    whole = (await client.post(RESPONSES, json=asked(tools=[GUARDED]))).json()
    listed, request = whole["output"]
    assert (whole["status"], listed["type"], calls) == ("completed", "mcp_list_tools", [])
    assert set(request) == {"type", "id", "server_label", "name", "arguments"} and request["id"].startswith("mcpr_")
    assert (request["type"], request["server_label"], request["name"]) == ("mcp_approval_request", "rogue", "pick")

    more = asked(tools=[GUARDED], input=[approval(request)], previous_response_id=whole["id"], max_output_tokens=16)
    then = (await client.post(RESPONSES, json=more)).json()
    listed, call, *rest = then["output"]
    assert calls == [("pick", json.loads(request["arguments"]))]
    assert (call["type"], call["status"], call["output"]) == ("mcp_call", "completed", "21 degrees")
    assert (call["approval_request_id"], call["arguments"]) == (request["id"], request["arguments"])
    assert rest[-1]["type"] == "message", "a call that was required has been made"
    await client.post(RESPONSES, json=more)
    assert len(calls) == 1, "an approval that is sent again gets the same result"
    third = asked(tools=[GUARDED], previous_response_id=then["id"], tool_choice="none", max_output_tokens=16)
    assert (await client.post(RESPONSES, json=third)).status_code == 200 and len(calls) == 1


async def test_an_approval_needs_nothing_stored(client, calls):
    whole = (await client.post(RESPONSES, json=asked(tools=[GUARDED], store=False))).json()
    items = [{"role": "user", "content": "hi"}, *whole["output"], approval(whole["output"][-1])]
    events = await streamed(client, tools=[GUARDED], input=items)
    last = events[-1]["response"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == last["output"]
    assert len(calls) == 1 and last["output"][1]["output"] == "21 degrees"


async def test_a_request_for_approval_is_streamed_whole(client, calls):
    events = await streamed(client, tools=[GUARDED])
    *_, added, done, last = events
    assert [e["type"] for e in (added, done, last)] == [
        "response.output_item.added", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert added["item"] == done["item"] == last["response"]["output"][-1]
    json.loads(done["item"]["arguments"])


async def test_what_was_not_approved_is_not_called(client, calls):
    whole = (await client.post(RESPONSES, json=asked(tools=[GUARDED]))).json()
    request = whole["output"][-1]
    denied = approval(request, approve=False, reason="too far away")
    more = asked(
        tools=[GUARDED], input=[denied], previous_response_id=whole["id"], tool_choice="none", max_output_tokens=16
    )
    then = (await client.post(RESPONSES, json=more)).json()
    assert [item["type"] for item in then["output"]] == ["mcp_list_tools", "message"] and not calls
    call, result = messages_of([request, denied])
    assert call["tool_calls"][0]["function"]["name"] == "pick"
    assert (result["role"], result["content"]) == ("tool", "The user did not approve this call: too far away")
    assert messages_of([request])[1]["content"] == "The user did not approve this call."


REQUEST = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "rogue", "name": "pick", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([approval({"id": "mcpr_none"})], "input[0].approval_request_id"),
        ([approval({"id": ["mcpr_1"]})], "input[0].approval_request_id"),
        ([REQUEST, approval(REQUEST, approve="yes")], "input[1].approve"),
        ([REQUEST | {"name": "other"}, approval(REQUEST)], "tools"),
        ([REQUEST | {"server_label": "other"}, approval(REQUEST)], "tools"),
    ],
)
async def test_an_approval_that_cannot_be(client, calls, items, param):
    response = await client.post(RESPONSES, json=asked(tools=[GUARDED], input=items))
    assert (response.status_code, response.json()["error"]["param"], calls) == (400, param, [])


async def test_an_approval_that_is_sent_twice_at_once_makes_one_call(tools, monkeypatch):
    made, go = [], asyncio.Event()

    async def call(name, arguments):
        made.append(name)
        if len(made) == 1:
            raise ConfigError("the mcp package is missing")
        await go.wait()
        return Result("done")

    monkeypatch.setattr(tools, "call", call)
    with pytest.raises(ConfigError):
        await tools.call_once("a", "pick", "{}")
    calls = [asyncio.ensure_future(tools.call_once("a", "pick", "{}")) for _ in range(3)]
    await asyncio.sleep(0)
    calls[0].cancel()  # its client has left
    await asyncio.sleep(0)
    go.set()
    assert [result.text for result in await asyncio.gather(*calls[1:])] == ["done", "done"] and made == ["pick"] * 2


async def test_calls_that_take_long_leave_the_threads_that_parse_bodies_alone(tools, monkeypatch):
    called = threading.Event()
    monkeypatch.setattr(await tools.tools(), "call", lambda *_: called.wait(20) and Result("done"))
    calls = [asyncio.ensure_future(tools.call("pick", "{}")) for _ in range(40)]
    await asyncio.sleep(0.1)
    assert await asyncio.wait_for(asyncio.to_thread(str, 1), 10) == "1"
    called.set()
    assert {result.text for result in await asyncio.gather(*calls)} == {"done"}
