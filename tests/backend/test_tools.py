"""Tools through a backend: forced calls are always valid, and a scripted MCP server round-trips with a real model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from localllm.backend.in_process import InProcessBackend
from localllm.chat.mcp.client import McpTools
from localllm.chat.mcp.servers import ServerEntry
from localllm.conversation.answer import Answer
from localllm.conversation.tools import Toolbox
from localllm.request import Message, SamplingParams, ToolUse

ROGUE = Path(__file__).parents[1] / "chat" / "mcp" / "rogue_server.py"
ASKED: list[Message] = [{"role": "user", "content": "Repeat the word hello with the tool."}]


@pytest.fixture(scope="module")
def backend(smollm2_path: Path) -> Iterator[InProcessBackend]:
    with closing(InProcessBackend(offline=True, ctx=4096)) as made:
        made.start(str(smollm2_path))
        assert answer(made, ASKED, None).stop
        yield made


@pytest.fixture(scope="module")
def tools() -> Iterator[Toolbox]:
    made = Toolbox(lambda: McpTools([ServerEntry("rogue", sys.executable, (str(ROGUE),))]))
    made.connect()
    yield made
    made.close()


def answer(backend: InProcessBackend, messages: list[Message], tools: ToolUse | None, seed: int = 0) -> Answer:
    one = Answer()
    params = SamplingParams(temperature=1.5 if seed else 0, seed=seed, max_tokens=200)
    turn = backend.send(messages, params, None, tools)
    end = time.monotonic() + 60
    while not one.stop:
        assert time.monotonic() < end
        while backend.events():
            event = backend.events().popleft()
            if getattr(event, "turn", None) == turn:
                one.add(event)
        time.sleep(0.005)
    return one


@pytest.mark.slow
def test_an_mcp_server_round_trips(backend: InProcessBackend, tools: Toolbox) -> None:
    tools.only = {"echo"}
    assert tools.offered is not None
    forced = ToolUse(tools.offered.tools, "required", parallel=False)
    for seed in range(4):  # also hot: the model is held to calls that the schema takes
        one = answer(backend, ASKED, forced, seed)
        assert one.wants_results, (one.stop, one.text, one.failed)
        [call] = one.calls
        arguments = json.loads(call.arguments)
        assert call.name == "echo" and isinstance(arguments.get("text", ""), str)
        tools.run(call, 1000)
        assert call.result and not call.failed
    one.end_round()
    last = answer(backend, [*ASKED, *one.round_messages()], tools.offered)
    assert last.failed is None and last.usage.prompt_tokens > one.usage.prompt_tokens


def test_a_tool_whose_schema_is_wrong_is_left_out(backend: InProcessBackend, tools: Toolbox) -> None:
    tools.only = {"echo", "lies"}
    failed = answer(backend, ASKED, tools.offered).failed
    assert failed is not None and "no such type" in failed.message, failed
    assert tools.leave_out(failed.param, failed.message).startswith("skipping the tool lies: ")
    assert answer(backend, ASKED, tools.offered).failed is None
