"""What the parsers of an answer share: the text in pieces, the calls it makes, the white space next to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator

from ..parser import Part
from .calls import Calls, Tools
from .cursor import Cursor, Reading

MAX_FAILURES = 16  # texts that looked like calls in one answer, after which nothing does: each is read once more
MAX_HELD = 64  # characters of white space that wait for what follows


class HeldSpace:
    """Content on its way out, less the white space next to calls: it waits until it is known what it stands next to."""

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
        """A call follows: the white space before it is nothing, and so will be that after it."""
        self._held = ""
        self._after_call = True

    def flush(self) -> None:
        if self._held:
            self._out(self._held)
            self._held = ""


class AnswerParser(ABC):
    """Splits one answer as it comes; `_answer` reads it and puts what it finds into `_parts`.

    tools       what may be called, in the OpenAI shape
    streams     arguments are written as they come: only where a grammar keeps them valid
    most_calls  further ones are content
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
        """A call that was never finished is content."""
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
        """Whether nothing more is a call."""
        too_many = self._most_calls is not None and self._calls.count >= self._most_calls
        return too_many or self._failures >= MAX_FAILURES

    def _emit_content(self, text: str) -> None:
        if text:
            self._parts.append(("content", text))

    def _emit_call(self, part: Part) -> None:
        self._parts.append(part)
        self._cursor.mark()
