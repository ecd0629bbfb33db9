"""Tools in the full screen: every call is shown and asked for, what it gave is folded, Esc ends it all."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.conversation.storage import restored
from localllm.conversation.tools import MAX_ROUNDS, Toolbox
from localllm.history.store import History
from localllm.tui.widgets.choices import Choices
from localllm.tui.widgets.messages import ToolCall

from .conftest import WAIT_S, Chat, chat


class Servers:
    """Three tools; `hang` returns when it is stopped."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []
        self.problems = ["files: no such program"]
        self.tools = [self.tool(name) for name in ("echo", "long", "hang")]

    def tool(self, name: str) -> Any:
        shape = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        return SimpleNamespace(name=name, server="test", about="", in_openai_shape=lambda: shape)

    def connect(self) -> None:
        pass

    def call(self, name: str, arguments: str, cancel: threading.Event | None = None) -> Any:
        self.ran.append((name, arguments))
        if name == "hang":
            assert cancel is not None and cancel.wait(WAIT_S)
        return SimpleNamespace(text="x\n" * 4000 if name == "long" else arguments, failed=False)

    def close(self) -> None:
        pass


@pytest.fixture
def servers() -> Servers:
    return Servers()


def asks(running: Chat) -> str:
    banner = running.screen.query_one(Choices)
    return str(banner.border_title) if banner.display else ""


def shown(running: Chat) -> str:
    return "\n".join(str(one.render()) for one in running.screen.query(ToolCall))


async def test_calls_are_asked_for_and_folded(servers: Servers, tmp_path: Path) -> None:
    async with chat(tools=Toolbox(lambda: servers), path=tmp_path / "chats.db") as running:
        await running.ready()
        await running.send('!call echo {"a": 1}\n!call long {}')
        await running.until(lambda: asks(running).startswith('Run echo {"a": 1}?'))
        assert servers.ran == [] and '◦ echo  {"a": 1}' in shown(running)
        await running.pilot.press("tab", "y")
        await running.until(lambda: asks(running).startswith("Run long"))
        await running.pilot.press("tab", "a")
        exchange = running.screen.conversation.exchanges[0]
        await running.until(lambda: exchange.stop == "stop" and exchange.rounds)
        assert servers.ran == [("echo", '{"a": 1}'), ("long", "{}")]
        assert '▸ echo  {"a": 1} → {"a": 1}' in shown(running)
        assert "▸ long  {} → 4,001 lines, 8,000 characters" in shown(running)
        await running.pilot.press("ctrl+t")
        assert "… 3,601 more lines" in shown(running)
        await running.send("!call long {}")  # allowed from now on
        second = await running.ask("bye")
        assert len(servers.ran) == 3 and second.exchange.text == "bye"
        roles = [message["role"] for message in running.backend.sent[-1][0]]
        assert roles == [
            "user",
            "assistant",
            "tool",
            "tool",
            "assistant",
            "user",
            "assistant",
            "tool",
            "assistant",
            "user",
        ]
        await running.screen.open_chat(running.screen.conversation.id)
        await running.until(lambda: "4,001 lines" in shown(running))
    with History(tmp_path / "chats.db") as history:
        saved = history.find("last")
        talk = restored(saved, history.messages(saved.id))
        assert [call.result for call in talk.exchanges[0].rounds[0].calls][0] == '{"a": 1}'


async def test_a_refused_call_is_told_to_the_model(servers: Servers) -> None:
    async with chat(tools=Toolbox(lambda: servers)) as running:
        await running.ready()
        await running.send("!call echo {}")
        await running.until(lambda: asks(running))
        await running.pilot.press("tab", "v")
        exchange = running.screen.conversation.exchanges[0]
        await running.until(lambda: exchange.text)
        assert servers.ran == [] and exchange.rounds[0].calls[0].result == "the user refused this call"
        assert [tool["function"]["name"] for tool in running.screen.session.tools.offered.tools] == ["long", "hang"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("key", ["escape", pytest.param("ctrl+c", marks=pytest.mark.slow)])
@pytest.mark.parametrize("answers", [False, True])
async def test_a_call_can_be_stopped(servers: Servers, key: str, answers: bool) -> None:
    async with chat(tools=Toolbox(lambda: servers)) as running:
        await running.ready()
        await running.send("!call hang {}")
        await running.until(lambda: asks(running))
        if answers:
            await running.pilot.press("tab", "y")
            await running.until(lambda: servers.ran)
        await running.pilot.press(key)
        exchange = running.screen.conversation.exchanges[0]
        await running.until(lambda: running.screen.current is None)
        assert (exchange.stop, exchange.rounds[0].calls[0].result) == ("abort", "stopped by the user")
        assert not asks(running) and "stopped by the user" in shown(running)
        assert (await running.ask("and now")).exchange.text == "and now"


@pytest.mark.slow
async def test_calls_without_end_are_ended(servers: Servers) -> None:
    tools = Toolbox(lambda: servers, asks=False)
    async with chat(tools=tools) as running:
        await running.ready()
        servers.call = lambda name, arguments, cancel: SimpleNamespace(text="!call echo {}", failed=False)  # type: ignore[method-assign]
        answer = await running.ask("!call echo {}")
        await running.until(lambda: running.screen.current is None)
        assert len(answer.exchange.rounds) == MAX_ROUNDS + 1 and answer.exchange.stop == "abort"
        await running.until(lambda: "stopped after 16 rounds" in "\n".join(running.drawn))


async def test_what_is_typed_answers_nothing(servers: Servers) -> None:
    async with chat(tools=Toolbox(lambda: servers)) as running:
        await running.ready()
        await running.send("!call echo {}")
        await running.until(lambda: asks(running))
        await running.pilot.press("y", "a")
        assert asks(running) and servers.ran == [] and running.prompt.text == "ya"
