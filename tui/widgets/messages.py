"""The parts of the transcript: questions, answers, failures, and notices of the program."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.reactive import Reactive
from textual.widgets import Static

from localllm.conversation.answer import Call, Round, failure_lines
from localllm.conversation.tools import shown_call, shown_result
from localllm.conversation.tree import Exchange
from localllm.interface import Delta, Failed
from localllm.terminal import Cleaner, clean, counted, fit, seconds_short

if TYPE_CHECKING:
    from .markdown import Answer

THINKING_LINES = 3  # lines of reasoning shown while it streams
RESULT_LINES = 400  # of an opened tool result
LONG_QUESTION = 40  # lines shown of a question; the rest is only counted


class UserMessage(Horizontal):
    """A question after its mark; its files above, its branch and time on the right."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.display = bool(exchange.user or exchange.attachments)
        self._queued = Static("", classes="queued", markup=False)
        self._waits_for = ""

    def compose(self) -> ComposeResult:
        yield Static("❯", classes="mark", markup=False)
        with Vertical():
            if self.exchange.attachments:
                names = "   ".join(f"+ {one.label}" for one in self.exchange.attachments)
                yield Static(names, classes="files", markup=False)
            yield Static(_shortened(clean(self.exchange.user)), classes="text", markup=False)
            yield self._queued
        yield Static("", classes="meta", markup=False)

    def on_mount(self) -> None:
        self.set_branch((1, 1))

    def queue(self, waits_for: str) -> None:
        """Say what it waits for; "" once it is sent."""
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            self._queued.update(f"queued: {waits_for}")
            self.set_class(bool(waits_for), "-queued")

    def set_branch(self, place: tuple[int, int]) -> None:
        when = time.strftime("%H:%M", time.localtime(self.exchange.asked_at))
        branch = f"‹{place[0]}/{place[1]}›  " if place[1] > 1 else ""
        self.query_one(".meta", Static).update(branch + when)


def _shortened(text: str) -> str:
    lines = text.split("\n")
    if len(lines) <= LONG_QUESTION:
        return text
    return "\n".join([*lines[: LONG_QUESTION // 2], f"… {len(lines) - LONG_QUESTION:,} more lines …"] + lines[-20:])


class Thought(Static):
    """Reasoning: its last lines while it streams, then one line; all of it after a click or Ctrl+T."""

    def __init__(self, mode: str = "auto") -> None:
        super().__init__("", markup=False)
        self._mode = mode
        self._text = ""
        self._pieces = 0
        self._start = 0.0
        self.took: float | None = None
        self.expanded = mode == "expanded"
        self.display = False

    def feed(self, text: str) -> None:
        """Add reasoning without drawing it."""
        if not self._text:
            self._start = time.monotonic()
        self._text += text
        self._pieces += 1

    def end(self, num_tokens: int = 0, took: float = 0.0) -> None:
        """The answer begins, after `took` seconds if known."""
        if self._text and self.took is None:
            self.took = took or time.monotonic() - self._start
        if num_tokens:
            self._pieces = num_tokens
        self.draw()

    def draw(self) -> None:
        if not self._text or self._mode == "hidden":
            return
        self.display = True
        lines = self._text.strip().split("\n")
        if self.took is None:
            head = f"▾ thinking… {seconds_short(time.monotonic() - self._start)}"
            body = lines if self.expanded else lines[-THINKING_LINES:] if self._mode != "collapsed" else []
        else:
            mark = "▾" if self.expanded else "▸"
            head = f"{mark} thought for {seconds_short(self.took)} · {counted(self._pieces, 'token')}"
            body = lines if self.expanded else []
        self.update("\n".join([head, *(f"  {line}" for line in body)]))

    def on_click(self) -> None:
        self.toggle()

    def toggle(self) -> None:
        self.expanded = not self.expanded
        self.draw()


class ToolCall(Static):
    """A tool call: shown in full while waiting for permission, then as one line; its result after a click or Ctrl+T."""

    def __init__(self, call: Call) -> None:
        super().__init__("", markup=False)
        self._call = call
        self.expanded = False
        self.draw()

    def draw(self) -> None:
        call = shown_call(self._call)
        if self._call.result is None:
            self.update(f"◦ {call}")
        elif self.expanded:
            self.update(f"▾ {call}\n{shown_result(self._call, RESULT_LINES)}")
        else:
            self.update(f"▸ {fit(call, 60)} {shown_result(self._call)}")

    def on_click(self) -> None:
        self.toggle()

    def toggle(self) -> None:
        self.expanded = not self.expanded
        self.draw()


class AssistantMessage(Vertical):
    """An answer with its reasoning above and its statistics below."""

    virtual_size = Reactive(Size(0, 0))

    def __init__(self, exchange: Exchange, thinking: str = "auto") -> None:
        from .markdown import Answer  # its parser and highlighter load with the model, not before the first frame

        super().__init__()
        self.exchange = exchange
        self._thinking = thinking
        self.thought = Thought(thinking)
        self.answer: Answer = Answer()
        self._footer = Static("", classes="stats", markup=False)
        self._footer_text = ""
        self._place = (1, 1)
        self._cleaner = Cleaner()

    def compose(self) -> ComposeResult:
        yield self.thought
        yield self.answer
        yield self._footer

    def feed(self, delta: Delta) -> None:
        """Add a piece: unchanged for the model, cleaned for the screen."""
        if delta.kind == "reasoning":
            self.thought.feed(clean(delta.text))
        elif delta.kind == "content":
            if not self.exchange.text:
                self.thought.end()
                self.exchange.thought_s = self.thought.took or 0.0
            self.answer.feed(self._cleaner.push(delta.text))
        self.exchange.add(delta)

    async def draw(self) -> None:
        if not self.exchange.text:
            self.thought.draw()
        await self.answer.flush()

    def footer(self, text: str) -> None:
        """The line below the answer: progress while it runs."""
        if text != self._footer_text:
            # replacing one line by another moves nothing
            self._footer.update(text, layout=not self._footer_text)
            self._footer_text = text

    def set_branch(self, place: tuple[int, int]) -> None:
        if place != self._place:
            self._place = place
            if self.exchange.stop:
                self._end_footer()

    async def show_calls(self) -> None:
        """Show the calls of the exchange below the text before them."""
        self.thought.end()
        await self.answer.finish()
        await self.mount(*map(ToolCall, self.exchange.calls), before=self._footer)

    def draw_calls(self) -> None:
        for one in self.query(ToolCall):
            one.draw()

    async def next_round(self) -> None:
        """Add widgets for the text after the calls."""
        self.draw_calls()
        await self._room()

    async def _room(self) -> None:
        from .markdown import Answer

        self.thought, self.answer, self._cleaner = Thought(self._thinking), Answer(), Cleaner()
        await self.mount(self.thought, self.answer, before=self._footer)

    async def restore_rounds(self) -> None:
        """Show the rounds before the final text again."""
        for one in self.exchange.rounds:
            await self._restored(one)

    async def _restored(self, one: Round) -> None:
        if one.reasoning:
            self.thought.feed(clean(one.reasoning))
        self.thought.end()
        self.answer.feed(clean(one.text))
        await self.answer.finish()
        await self.mount(*map(ToolCall, one.calls), before=self._footer)
        await self._room()

    def toggle(self) -> bool:
        """Fold or unfold reasoning and calls. False when there are none."""
        found = [*(one for one in self.query(Thought) if one.display), *self.query(ToolCall)]
        for one in found:
            one.toggle()
        return bool(found)

    async def finish(self) -> None:
        exchange = self.exchange
        self.thought.end(exchange.usage.reasoning_tokens, exchange.thought_s)
        exchange.thought_s = self.thought.took or 0.0
        await self.answer.finish()
        if self.is_attached:  # it may have been taken off the screen in the meantime
            self._end_footer()

    def _end_footer(self) -> None:
        exchange = self.exchange
        if exchange.failed is not None:
            self._footer.update(failure_text(exchange.failed))
            self._footer.add_class("-failed")
            return
        branch = f"‹{self._place[0]}/{self._place[1]}›  " if self._place[1] > 1 else ""
        silent = self.screen.has_class("-no-stats") and exchange.stop in ("stop", "length")
        left = "dropped from the context ·  " if exchange.forgotten else ""
        self._footer.update(left + branch + ("" if silent else exchange.stats))

    async def restore(self) -> None:
        await self.restore_rounds()
        if self.exchange.reasoning:
            self.thought.feed(clean(self.exchange.reasoning))
        self.answer.feed(clean(self.exchange.text))
        await self.finish()


class Notice(Static):
    """A notice of the program in the transcript."""


def failure_text(failed: Failed) -> Content:
    """A failure with its fixes; the first line is highlighted."""
    first, *rest = failure_lines(failed)
    return Content("\n").join([Content.styled(clean(first), "$text-error"), *(Content(clean(line)) for line in rest)])


class Failure(Static):
    """A failure outside an answer, mostly during loading."""
