"""Tools of type "mcp" in /v1/responses: those of the owner's servers, called by the server itself."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from localllm.mcp.servers import ServerEntry
from localllm.server import Service, ServiceOptions

RESPONSES = "/v1/responses"
ROGUE = Path(__file__).parents[1] / "mcp" / "rogue_server.py"
TOOL = {"type": "mcp", "server_label": "rogue", "require_approval": "never", "allowed_tools": ["pick"]}


@pytest.fixture
async def client(roomy_pool, make_client):
    entries = (ServerEntry("rogue", sys.executable, (str(ROGUE),)),)
    service = Service(roomy_pool, ServiceOptions(parallel=8, mcp=entries))
    yield make_client(service)
    service.close()


def asked(**fields):
    made = {"model": "tiny", "input": "hi", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300}
    return made | {"temperature": 0, "parallel_tool_calls": False} | fields


async def test_the_server_calls_what_the_model_calls(client):
    whole = (await client.post(RESPONSES, json=asked())).json()
    listed, call, *rest = whole["output"]
    assert listed["type"] == "mcp_list_tools" and [one["name"] for one in listed["tools"]] == ["pick"]
    assert (call["type"], call["server_label"], call["status"]) == ("mcp_call", "rogue", "completed"), whole
    assert call["name"] == "pick" and json.loads(call["arguments"])["text"] == call["output"]
    assert call["error"] is None
    assert [item["type"] for item in rest][-1:] == ["message"], "the model goes on with the result"
    more = asked(previous_response_id=whole["id"], tool_choice="none", max_output_tokens=16)
    again = (await client.post(RESPONSES, json=more)).json()
    assert again["status"] in ("completed", "incomplete"), again


async def test_what_is_streamed_is_what_the_whole_holds(client):
    events = []
    async with client.stream("POST", RESPONSES, json=asked(stream=True)) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
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
        ({"require_approval": "always"}, "tools[0].require_approval"),
        ({"require_approval": None}, "tools[0].require_approval"),
        ({"allowed_tools": "echo"}, "tools[0].allowed_tools"),
    ],
)
async def test_only_what_the_owner_configured(client, changed, param):
    response = await client.post(RESPONSES, json=asked(tools=[TOOL | changed]))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_without_servers_there_are_none(make_client, make_service):
    response = await make_client(make_service()).post(RESPONSES, json=asked())
    assert response.status_code == 400 and "serve --mcp FILE" in response.json()["error"]["message"]
