"""The turns on the screen: mounts what is new, takes the oldest off and brings them back, says what the program says.

A hundred mounted answers make every key slow (1.9 s per resize), so only the last ones stay; `Conversation` keeps all.
"""

from __future__ import annotations

from typing import Any

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.reactive import Reactive
from textual.widget import Widget
from textual.widgets import Static

from localllm.request import Failed
from localllm.terminal import clean
from localllm.tui.conversation import Conversation, Exchange

from .loading import LoadCard
from .messages import AssistantMessage, Failure, Notice, UserMessage

EARLIER_STEP = 10
"""Turns brought back at once."""


class Transcript(VerticalScroll):
    """What was said, newest below. `window` is how many turns stay on the screen."""

    virtual_size = Reactive(Size(0, 0))  # as with all that grows in it: a new size needs no second layout

    def __init__(self, conversation: Conversation, model: str, *, window: int, thinking: str) -> None:
        super().__init__(id="transcript")
        self._conversation = conversation
        self._model = model
        self._window = max(2, window)
        self._thinking = thinking
        self._pairs: list[tuple[UserMessage, AssistantMessage | None]] = []
        self._first = 0
        """the conversation's number of the first turn that is mounted"""

    def compose(self) -> ComposeResult:
        """A line for what is not shown, and the card that shows loading."""
        earlier = Static("", id="earlier", markup=False)
        earlier.display = False
        yield earlier
        yield LoadCard(self._model)

    @property
    def card(self) -> LoadCard | None:
        """The loading card, while it is there."""
        cards = self.query(LoadCard)
        return cards.first() if cards else None

    async def add_question(self, exchange: Exchange) -> UserMessage:
        """Show a question, follow the end again, and take the oldest turn off if there are too many."""
        question = UserMessage(exchange.user)
        await self.mount(question)
        self._pairs.append((question, None))
        self.anchor()
        return question

    async def add_answer(self, exchange: Exchange, question: UserMessage) -> AssistantMessage:
        """Open the answer to a question."""
        answer = AssistantMessage(exchange, self._thinking)
        await self.mount(answer, after=question)
        self._pairs = [(user, answer if user is question else old) for user, old in self._pairs]
        return answer

    async def take_back(self, exchange: Exchange) -> None:
        """Remove a question that was not answered."""
        for question, answer in list(self._pairs):
            if answer is not None and answer.exchange is exchange:
                self._pairs.remove((question, answer))
                await question.remove()
                await answer.remove()

    async def say(self, text: str, kind: str = "", after: Widget | None = None) -> None:
        """Something from the program. `kind` is "" or "warning"."""
        notice = Notice(clean(text))
        if kind:
            notice.add_class(f"-{kind}")
        await self.mount(notice, after=after)

    async def fail(self, failed: Failed) -> None:
        """A failure that belongs to no answer."""
        await self.mount(Failure(failed))

    async def clear(self) -> None:
        """Remove all turns and notices."""
        self._pairs.clear()
        self._first = 0
        for kind in (UserMessage, AssistantMessage, Notice):
            await self.query(kind).remove()
        self._show_earlier_line()

    async def trim(self) -> None:
        """Take the oldest finished turns off the screen."""
        while len(self._pairs) > self._window:
            question, answer = self._pairs[0]
            if answer is None or not answer.exchange.stop:
                break  # it waits, or is being written
            self._pairs.pop(0)
            self._first += 1
            await question.remove()
            await answer.remove()
        self._show_earlier_line()

    async def on_click(self, event: Any) -> None:
        """Bring earlier turns back."""
        if getattr(event.widget, "id", None) != "earlier" or not self._pairs:
            return
        last = self._pairs[0][0]
        for number in range(self._first - 1, max(-1, self._first - 1 - EARLIER_STEP), -1):
            exchange = self._conversation.exchanges[number]
            question, answer = UserMessage(exchange.user), AssistantMessage(exchange, self._thinking)
            await self.mount(question, answer, before=last)
            await answer.restore()
            self._pairs.insert(0, (question, answer))
            self._first, last = number, question
        self._show_earlier_line()

    def _show_earlier_line(self) -> None:
        line = self.query_one("#earlier", Static)
        line.display = self._first > 0
        line.update(f"↑ {self._first} earlier: click to show")
