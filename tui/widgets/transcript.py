"""The turns on screen: mounts new ones, removes the oldest and brings them back, shows notices.

A hundred mounted answers slow down every key (1.9 s per resize), so only the last ones stay; `Conversation` keeps all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.reactive import Reactive
from textual.widget import Widget
from textual.widgets import Static

from localllm.conversation import load_times
from localllm.conversation.tree import Conversation, Exchange
from localllm.interface import Failed
from localllm.terminal import clean

from .loading import LoadCard
from .messages import AssistantMessage, Failure, Notice, UserMessage, failure_text

EARLIER_STEP = 5  # turns brought back at a time


class Transcript(VerticalScroll):
    """The conversation, newest at the bottom. `window` is how many messages stay on screen."""

    virtual_size = Reactive(Size(0, 0))  # like all growing widgets in it: a new size needs no second layout

    def __init__(self, conversation: Conversation, *, window: int, thinking: str) -> None:
        super().__init__(id="transcript")
        self._conversation = conversation
        self._window = max(2, (window + 1) // 2)
        self._thinking = thinking
        self._follows = False
        self._first = 0  # index in the branch of the first mounted turn

    def compose(self) -> ComposeResult:
        earlier = Static("", id="earlier", markup=False)
        earlier.display = False
        yield earlier

    @property
    def card(self) -> LoadCard | None:
        cards = self.query(LoadCard)
        return cards.first() if cards else None

    @property
    def messages(self) -> list[UserMessage | AssistantMessage]:
        return [one for one in self.children if isinstance(one, UserMessage | AssistantMessage)]

    async def begin_loading(self, model: str) -> None:
        await self._remove("LoadCard, Failure")
        await self.mount(LoadCard(model, load_times.expected_s(model)))
        self.anchor()

    async def end_loading(self) -> None:
        await self._remove("LoadCard")

    async def _remove(self, widgets: str | Iterable[Widget]) -> None:
        """Remove widgets. Shielded because a worker that ends meanwhile would also cancel the widgets' tasks
        (Textual 8.2), and the program would fail on them when it exits."""
        await asyncio.shield(self.remove_children(widgets))

    def anchor(self, anchor: bool = True) -> None:
        """Follow the end, once the text is taller than the screen: Textual would move a short text to the bottom."""
        self._follows = anchor
        super().anchor(anchor and self.virtual_size.height > self.size.height)

    def watch_virtual_size(self, size: Size) -> None:
        """Anchor or release when the text starts or stops being taller than the screen."""
        more = size.height > self.size.height
        if self._follows and more != self.is_anchored:
            super().anchor(more)

    async def add_question(self, exchange: Exchange) -> UserMessage:
        """Show a question and follow the end again."""
        question = UserMessage(exchange)
        await self.mount(question)
        self.anchor()
        self._mark_branches()
        return question

    async def add_answer(self, exchange: Exchange, question: UserMessage) -> AssistantMessage:
        answer = AssistantMessage(exchange, self._thinking)
        await self.mount(answer, after=question)
        self._mark_branches()
        return answer

    async def drop_answer(self, exchange: Exchange) -> UserMessage | None:
        """Remove an answer so that it can be written again under its question."""
        await self._remove([one for one in self.query(AssistantMessage) if one.exchange is exchange])
        return self._question(exchange)

    async def questions(self, exchanges: Sequence[Exchange]) -> list[UserMessage]:
        """Their questions, all brought to the screen."""
        for one in exchanges[:1]:
            await self.reveal(one)
        return [shown for one in exchanges if (shown := self._question(one)) is not None]

    def _question(self, exchange: Exchange) -> UserMessage | None:
        return next((one for one in self.query(UserMessage) if one.exchange is exchange), None)

    async def take_back(self, exchange: Exchange) -> None:
        await self._remove([one for one in self.messages if one.exchange is exchange])

    async def say(self, text: str, kind: str = "", after: Widget | None = None) -> None:
        """Show a notice of the program. `kind` is "" or "warning"."""
        await self.mount(Notice(clean(text), markup=False, classes=kind and f"-{kind}"), after=after)

    async def fail(self, failed: Failed) -> None:
        await self._remove("Failure")
        await self.mount(Failure(failure_text(failed), markup=False))

    async def clear(self) -> None:
        self._first = 0
        await self._remove("UserMessage, AssistantMessage, Notice")
        self._show_earlier_line()

    async def sync(self, conversation: Conversation | None = None) -> None:
        """Show the branch as it is now: keep matching turns, remove the rest, add missing ones."""
        self._conversation = conversation or self._conversation
        turns = self._conversation.exchanges
        both = takewhile(lambda pair: pair[0] is pair[1], zip(self._shown, turns[self._first :], strict=False))
        same = [exchange for exchange, _ in both]
        if not same or len(turns) - self._first - len(same) > self._window:
            same, self._first = [], max(0, len(turns) - self._window)
        with self.app.batch_update():
            await self._remove([one for one in self.messages if one.exchange not in same])
            for exchange in turns[self._first + len(same) :]:
                await self._restored(exchange)
        self._mark_branches()
        self._show_earlier_line()
        self.anchor()

    @property
    def _shown(self) -> list[Exchange]:
        return list(dict.fromkeys(one.exchange for one in self.messages))

    async def _restored(self, exchange: Exchange, before: Widget | None = None) -> None:
        answer = AssistantMessage(exchange, self._thinking) if exchange.stop else None
        shown = UserMessage(exchange), *filter(None, (answer,))
        await self.mount(*shown, before=before)  # together: `before` could be removed in between
        if answer is not None:
            await answer.restore()

    def _mark_branches(self) -> None:
        for one in self.messages:
            if one.is_mounted:
                one.set_branch(self._conversation.place(one.exchange, isinstance(one, UserMessage)))

    async def trim(self) -> None:
        """Remove the oldest finished turns from the screen."""
        shown = self._shown
        while len(shown) > self._window and shown[0].stop:  # an unfinished turn waits or is being written
            self._first += 1
            await self.take_back(shown.pop(0))
        self._show_earlier_line()

    async def on_click(self, event: Any) -> None:
        if getattr(event.widget, "id", None) == "earlier":
            await self.load_earlier()

    async def load_earlier(self) -> None:
        """Bring back some earlier turns, keeping the scroll position."""
        messages = self.messages
        if not messages or not self._first:
            return
        height, at = self.virtual_size.height, self.scroll_y
        start = max(0, self._first - EARLIER_STEP)
        with self.app.batch_update():
            for exchange in self._conversation.exchanges[start : self._first]:
                if messages[0].parent is None:  # another conversation was opened in the meantime
                    return
                await self._restored(exchange, before=messages[0])
        self._first = start
        self._mark_branches()
        self._show_earlier_line()
        self.call_after_refresh(lambda: self.scroll_to(y=at + self.virtual_size.height - height, animate=False))

    async def reveal(self, exchange: Exchange) -> None:
        """Bring back turns until this one is on screen."""
        turns = self._conversation.exchanges
        while exchange in turns and self._first > turns.index(exchange):
            await self.load_earlier()

    def _show_earlier_line(self) -> None:
        line = self.query_one("#earlier", Static)
        line.display = self._first > 0
        line.update(f"↑ {self._first:,} earlier: click or press Home to show")
