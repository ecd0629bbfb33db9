"""Base class of the answer parsers: incremental text, tool calls, and the white space next to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator

from ..parser import Part
from .calls import Calls, Tools
from .cursor import Cursor, Reading

MAX_FAILURES = 16  # failed calls per answer, after which all is content: each failure reads its text a second time
MAX_HELD = 64  # characters of white space held back


class HeldSpace:
    """Passes content on without the white space next to calls; trailing white space is held until more text follows."""

    def __init__(self, out: Callable[[str], None], *, after_call: bool = False) -> None:
        self._out = out
        self._held = ""
        self._after_call = after_call

    def push(self, text: str) -> None:
        if not text:
            return
        text = self._held + text
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        said = text.rstrip()
        self._held = text[len(said) :]
        if len(self._held) > MAX_HELD:
            said, self._held = text[:-MAX_HELD], text[-MAX_HELD:]
        if said:
            self._out(said)

    def drop(self) -> None:
        """A call follows: drop the white space before it, and later that after it."""
        self._held = ""
        self._after_call = True

    def flush(self) -> None:
        if self._held:
            self._out(self._held)
            self._held = ""


class AnswerParser(ABC):
    """Splits one streamed answer; the generator `_answer` reads it and appends to `_parts`.

    tools       the tools that may be called, in the OpenAI format
    streams     emit arguments piece by piece; only valid if a grammar constrains them
    most_calls  maximum number of calls; further ones are content
    """

    def __init__(self, tools: Tools, streams: bool, most_calls: int | None, new_id: Callable[[], str]) -> None:
        self._cursor = Cursor()
        self._parts: list[Part] = []
        self._calls = Calls(self._emit_call, tools, streams, new_id)
        self._most_calls = most_calls
        self._failures = 0
        self._run: Generator[None, None, None] | None = self._answer()

    def push(self, text: str) -> list[Part]:
        self._cursor.feed(text)
        return self._resume()

    def finish(self) -> list[Part]:
        """End the answer; an unfinished call becomes content."""
        self._cursor.end()
        return self._resume()

    def _resume(self) -> list[Part]:
        if self._run is not None and next(self._run, self) is self:
            self._run = None
        parts, self._parts = self._parts, []
        return parts

    @abstractmethod
    def _answer(self) -> Reading[None]:
        """Read the whole answer."""

    @property
    def _is_full(self) -> bool:
        """True when no further text is parsed as a call."""
        too_many = self._most_calls is not None and self._calls.count >= self._most_calls
        return too_many or self._failures >= MAX_FAILURES

    def _emit_content(self, text: str) -> None:
        if text:
            self._parts.append(("content", text))

    def _emit_call(self, part: Part) -> None:
        self._parts.append(part)
        self._cursor.mark()
