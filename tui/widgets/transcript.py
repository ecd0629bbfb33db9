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

from localllm.conversation import load_times
from localllm.conversation.tree import Conversation, Exchange
from localllm.interface import Failed
from localllm.terminal import clean

from .loading import LoadCard
from .messages import AssistantMessage, Failure, Notice, UserMessage

EARLIER_STEP = 5  # turns brought back at once
Pair = tuple[UserMessage, AssistantMessage | None]


class Transcript(VerticalScroll):
    """What was said, newest below. `window` is how many messages stay on the screen."""

    virtual_size = Reactive(Size(0, 0))  # as with all that grows in it: a new size needs no second layout

    def __init__(self, conversation: Conversation, *, window: int, thinking: str) -> None:
        super().__init__(id="transcript")
        self._conversation = conversation
        self._window = max(2, (window + 1) // 2)
        self._thinking = thinking
        self._pairs: list[Pair] = []
        self._follows = False
        self._first = 0  # the branch's number of the first turn that is mounted

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
        return [one for pair in self._pairs for one in pair if one is not None]

    async def begin_loading(self, model: str) -> None:
        await self.query("LoadCard, Failure").remove()
        await self.mount(LoadCard(model, load_times.expected_s(model)))
        self.anchor()

    def anchor(self, anchor: bool = True) -> None:
        """Follow the end, once there is more than fits: Textual would move a short text to the bottom."""
        self._follows = anchor
        super().anchor(anchor and self.virtual_size.height > self.size.height)

    def watch_virtual_size(self, size: Size) -> None:
        """There is more than fits now, or less."""
        more = size.height > self.size.height
        if self._follows and more != self.is_anchored:
            super().anchor(more)

    async def add_question(self, exchange: Exchange) -> UserMessage:
        """Show a question, follow the end again."""
        question = UserMessage(exchange)
        await self.mount(question)
        self._pairs.append((question, None))
        self.anchor()
        self._mark_branches()
        return question

    async def add_answer(self, exchange: Exchange, question: UserMessage) -> AssistantMessage:
        """Open the answer to a question."""
        answer = AssistantMessage(exchange, self._thinking)
        await self.mount(answer, after=question)
        self._pairs = [(user, answer if user is question else old) for user, old in self._pairs]
        self._mark_branches()
        return answer

    async def drop_answer(self, exchange: Exchange) -> UserMessage | None:
        """Take an answer off, to be written anew under its question."""
        for place, (question, answer) in enumerate(self._pairs):
            if question.exchange is exchange:
                self._pairs[place] = (question, None)
                if answer is not None:
                    await answer.remove()
                return question
        return None

    async def take_back(self, exchange: Exchange) -> None:
        question = await self.drop_answer(exchange)
        if question is not None:
            self._pairs.remove((question, None))
            await question.remove()

    async def say(self, text: str, kind: str = "", after: Widget | None = None) -> None:
        """Something from the program. `kind` is "" or "warning"."""
        notice = Notice(clean(text))
        if kind:
            notice.add_class(f"-{kind}")
        await self.mount(notice, after=after)

    async def fail(self, failed: Failed) -> None:
        await self.query(Failure).remove()
        await self.mount(Failure(failed))

    async def clear(self) -> None:
        self._pairs.clear()
        self._first = 0
        await self.query("UserMessage, AssistantMessage, Notice").remove()
        self._show_earlier_line()

    async def sync(self, conversation: Conversation | None = None) -> None:
        """Show the branch as it is now: what still holds stays, the rest goes, what is missing comes."""
        self._conversation = conversation or self._conversation
        turns = self._conversation.exchanges
        same = 0
        while same < len(self._pairs) and self._first + same < len(turns):
            if self._pairs[same][0].exchange is not turns[self._first + same]:
                break
            same += 1
        gone = [one for pair in self._pairs[same:] for one in pair if one is not None]
        self._pairs = self._pairs[:same]
        if not self._pairs:
            self._first = max(0, len(turns) - self._window)
        with self.app.batch_update():
            if gone:
                await self.remove_children(gone)
            missing = turns[self._first + same :]
            if len(missing) > self._window:
                await self.remove_children(self.messages)
                self._pairs, self._first = [], len(turns) - self._window
                missing = missing[-self._window :]
            made = [await self._restored(exchange) for exchange in missing]
            self._pairs += made
        self._mark_branches()
        self._show_earlier_line()
        self.anchor()

    async def _restored(self, exchange: Exchange, before: Widget | None = None) -> Pair:
        question = UserMessage(exchange)
        if not exchange.stop:
            await self.mount(question, before=before)
            return question, None
        answer = AssistantMessage(exchange, self._thinking)
        await self.mount(question, answer, before=before)
        await answer.restore()
        return question, answer

    def _mark_branches(self) -> None:
        for question, answer in self._pairs:
            if not question.is_mounted:
                continue
            question.set_branch(self._conversation.place(question.exchange, True))
            if answer is not None and answer.is_mounted:
                answer.set_branch(self._conversation.place(answer.exchange, False))

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
        if getattr(event.widget, "id", None) == "earlier":
            await self.load_earlier()

    async def load_earlier(self) -> None:
        """Bring some earlier turns back; the place one looks at stays."""
        if not self._pairs or not self._first:
            return
        height = self.virtual_size.height
        at = self.scroll_y
        last = self._pairs[0][0]
        with self.app.batch_update():
            for number in range(self._first - 1, max(-1, self._first - 1 - EARLIER_STEP), -1):
                pair = await self._restored(self._conversation.exchanges[number], before=last)
                self._pairs.insert(0, pair)
                self._first, last = number, pair[0]
        self._mark_branches()
        self._show_earlier_line()
        self.call_after_refresh(lambda: self.scroll_to(y=at + self.virtual_size.height - height, animate=False))

    async def reveal(self, exchange: Exchange) -> None:
        """Bring turns back until this one is on the screen."""
        turns = self._conversation.exchanges
        while exchange in turns and self._first > turns.index(exchange):
            await self.load_earlier()

    def _show_earlier_line(self) -> None:
        line = self.query_one("#earlier", Static)
        line.display = self._first > 0
        line.update(f"↑ {self._first:,} earlier: click or Home to show")
