"""The turns of the transcript: what was asked, what was answered, what failed, what the program has to say."""

from __future__ import annotations

import time
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.reactive import Reactive
from textual.widgets import Static

from localllm.request import Failed
from localllm.terminal import Cleaner, clean, seconds_short
from localllm.tui.conversation import Exchange, failure_lines, stats_text

from .markdown import Answer

THINKING_LINES = 3
"""Lines of reasoning shown while it goes on."""


class UserMessage(Horizontal):
    """A question, behind its mark."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Mark, text, and whether it waits."""
        yield Static("❯", classes="mark", markup=False)
        with Vertical():
            yield Static(clean(self._text), classes="text", markup=False)
            yield Static("queued: sent when the model is free", classes="queued", markup=False)

    def set_queued(self, queued: bool) -> None:
        """Show or hide that it waits."""
        self.set_class(queued, "-queued")


class Thought(Static):
    """Reasoning: its last lines while it goes on, one line afterwards, all of it after a click or Ctrl+T."""

    def __init__(self, mode: str = "auto") -> None:
        super().__init__("", markup=False)
        self._mode = mode
        self._text = ""
        self._pieces = 0
        self._start = 0.0
        self._took: float | None = None
        self.expanded = mode == "expanded"
        self.display = False

    def feed(self, text: str) -> None:
        """Take more reasoning; nothing is drawn yet."""
        if not self._text:
            self._start = time.monotonic()
        self._text += text
        self._pieces += 1

    def end(self, num_tokens: int = 0) -> None:
        """The answer begins."""
        if self._text and self._took is None:
            self._took = time.monotonic() - self._start
        if num_tokens:
            self._pieces = num_tokens
        self.draw()

    def draw(self) -> None:
        """Show what there is now."""
        if not self._text or self._mode == "hidden":
            return
        self.display = True
        lines = self._text.strip().split("\n")
        if self._took is None:
            head = f"▾ thinking… {seconds_short(time.monotonic() - self._start)}"
            body = lines if self.expanded else lines[-THINKING_LINES:]
        else:
            mark = "▾" if self.expanded else "▸"
            head = f"{mark} thought for {seconds_short(self._took)} · {self._pieces:,} tokens"
            body = lines if self.expanded else []
        self.update("\n".join([head, *(f"  {line}" for line in body)]))

    def on_click(self) -> None:
        """Open or close."""
        self.toggle()

    def toggle(self) -> None:
        """Open or close."""
        self.expanded = not self.expanded
        self.draw()


class AssistantMessage(Vertical):
    """An answer with its reasoning above and its numbers below."""

    virtual_size = Reactive(Size(0, 0))

    def __init__(self, exchange: Exchange, thinking: str = "auto") -> None:
        super().__init__()
        self.exchange = exchange
        self.thought = Thought(thinking)
        self.answer = Answer()
        self._footer = Static("", classes="stats", markup=False)
        self._footer_text = ""
        self._cleaner = Cleaner()

    def compose(self) -> ComposeResult:
        """Reasoning, answer, footer."""
        yield self.thought
        yield self.answer
        yield self._footer

    def feed(self, kind: str, text: str) -> None:
        """Take a piece: kept as it is for the model, cleaned for the screen."""
        if kind == "reasoning":
            self.exchange.reasoning += text
            self.thought.feed(clean(text))
            return
        if not self.exchange.text:
            self.thought.end()
        self.exchange.text += text
        self.answer.feed(self._cleaner.push(text))

    async def draw(self) -> None:
        """Show what came since the last time."""
        if not self.exchange.text:
            self.thought.draw()
        await self.answer.flush()

    def footer(self, text: str) -> None:
        """The line below: progress while it runs."""
        if text != self._footer_text:
            # one line in place of another moves nothing
            self._footer.update(text, layout=not self._footer_text)
            self._footer_text = text

    async def finish(self, show_stats: bool = True) -> None:
        """The turn has ended, one way or the other."""
        self.thought.end(self.exchange.usage.reasoning_tokens)
        await self.answer.finish()
        self._footer.update(stats_text(self.exchange) if show_stats or self.exchange.stop == "abort" else "")
        self._footer.add_class("-done")

    async def restore(self) -> None:
        """Show a turn of before, as it was."""
        if self.exchange.reasoning:
            self.thought.feed(clean(self.exchange.reasoning))
        self.answer.feed(clean(self.exchange.text))
        if self.exchange.failed is not None:
            await self.fail(self.exchange.failed)
        else:
            await self.finish()

    async def fail(self, failed: Failed) -> None:
        """The turn has ended in an error; what was there stays."""
        self.thought.end()
        await self.answer.finish()
        self._footer.update(failure_text(failed))
        self._footer.add_class("-failed")


class Notice(Static):
    """Something the program says, in the transcript."""

    def __init__(self, text: Any) -> None:
        super().__init__(text if isinstance(text, Content) else clean(str(text)), markup=False)


def failure_text(failed: Failed) -> Content:
    """A failure with its fixes, the first line marked."""
    first, *rest = failure_lines(failed)
    return Content("\n").join([Content.styled(clean(first), "$text-error"), *(Content(clean(line)) for line in rest)])


class Failure(Static):
    """A failure that belongs to no answer: loading, mostly."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failure_text(failed), markup=False)
