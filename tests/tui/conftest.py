"""A chat over the scripted engine, driven by keys."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from localllm.backend.scripted import FakeBackend
from localllm.config import Preset, UiConfig
from localllm.conversation.saver import Saver
from localllm.conversation.session import Session
from localllm.conversation.tools import Toolbox
from localllm.conversation.tree import Conversation
from localllm.history.store import History
from localllm.interface import ChatEvent, Delta, Turn
from localllm.request import Message, SamplingParams
from localllm.tui.app import ChatApp
from localllm.tui.chat.screen import ChatScreen
from localllm.tui.frame import ScreenOptions
from localllm.tui.widgets.messages import AssistantMessage
from localllm.tui.widgets.prompt import PromptArea

WAIT_S = 200.0  # ten times what takes longest on two busy cores


@pytest.fixture(autouse=True)
def _quick_fingers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person takes longer to press Esc after an answer."""
    monkeypatch.setattr("localllm.tui.chat.actions.LATE_S", 0.0)


class RecordingBackend(FakeBackend):
    """Keeps what was asked, and the text of every turn as the engine sees it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sent: list[tuple[list[Message], SamplingParams | None]] = []
        self.templates: list[dict[str, Any]] = []
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.emitted: dict[int, str] = {}
        self.stopped_at: dict[int, float] = {}

    def start(self, model: str | None, changes: Mapping[str, Any] | None = None) -> None:
        self.started.append((model or "fake", dict(changes or {})))
        super().start(model, changes)

    def stop(self, turn: int) -> None:
        self.stopped_at[turn] = time.monotonic()
        super().stop(turn)

    def tell(self, event: ChatEvent) -> None:
        if isinstance(event, Delta) and event.kind == "content":
            self.emitted[event.turn] = self.emitted.get(event.turn, "") + event.text
        super().tell(event)

    def _accept(self, turn: Turn) -> None:
        self.sent.append((turn.messages, turn.params))
        self.templates.append(dict(turn.template))
        super()._accept(turn)


class Chat:
    """The running application with what tests look at."""

    def __init__(self, app: ChatApp, backend: RecordingBackend, pilot: Pilot[None]) -> None:
        self.app, self.backend, self.pilot = app, backend, pilot

    @property
    def screen(self) -> ChatScreen:
        """The chat screen, also below a modal one."""
        return next(s for s in self.app.screen_stack if isinstance(s, ChatScreen))

    @property
    def prompt(self) -> PromptArea:
        """Where one types."""
        return self.screen.query_one(PromptArea)

    @property
    def answers(self) -> list[AssistantMessage]:
        """Answers on the screen, in order."""
        return list(self.screen.query(AssistantMessage))

    async def until(self, done: Callable[[], Any], seconds: float = WAIT_S) -> None:
        """Wait for something to become true."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "it never happened"
            await self.pilot.pause(0.02)

    async def ready(self) -> None:
        """Wait for the model."""
        await self.until(lambda: self.screen.phase == "ready")

    async def send(self, text: str) -> None:
        """Type a message and press Enter."""
        self.prompt.text = text
        await self.pilot.press("enter")
        await self.until(lambda: self.prompt.sent_before[-1:] == [text])

    async def ask(self, text: str) -> AssistantMessage:
        """Send, and wait for the end of the answer."""
        number = len(self.screen.conversation.exchanges)
        await self.send(text)
        await self.until(lambda: len(self.screen.conversation.exchanges) > number)
        exchange = self.screen.conversation.exchanges[-1]
        await self.until(lambda: exchange.stop)
        await self.until(lambda: [a for a in self.answers if a.exchange is exchange])
        await self.pilot.pause()
        return next(a for a in self.answers if a.exchange is exchange)

    @property
    def drawn(self) -> list[str]:
        """The lines on the screen."""
        return ["".join(segment.text for segment in strip) for strip in self.app.screen._compositor.render_strips()]

    def text(self, selector: str) -> str:
        """What a Static shows."""
        return str(self.screen.query_one(selector).render())  # type: ignore[attr-defined]


@asynccontextmanager
async def chat(
    *, model: str = "fake", tps: float = 0, load_s: float = 0, size: tuple[int, int] = (118, 34), first: str = "",
    ui: UiConfig | None = None, ctx: int = 32_768, sampling: dict[str, Any] | None = None, path: Path | None = None,
    talk: Conversation | None = None, presets: dict[str, Preset] | None = None, tools: Toolbox | None = None,
    **options: Any,
) -> AsyncIterator[Chat]:  # fmt: skip
    """Open a chat; it is closed at the end. `path` is a database to keep it in."""
    backend = RecordingBackend(tps=tps, load_s=load_s, ctx=ctx)
    saver = Saver(lambda: History(path)) if path is not None else Saver(None)
    conversation = talk or Conversation("", sampling)
    session = Session(backend, conversation, saver, model, presets or {}, first=first, tools=tools)
    app = ChatApp(session, ScreenOptions(ui or UiConfig(), **options))
    try:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            yield Chat(app, backend, pilot)
    finally:
        saver.close()
        backend.close()
