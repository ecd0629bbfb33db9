"""One streamed answer to content and tool calls: `ToolParser`, and what it shares with that of gpt-oss's channels.

Text that only looked like a call comes out as content, whole. White space next to calls belongs to neither side. The
parts together do not depend on how the text was cut; the work is linear in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..parser import Part
from .calls import Calls, new_call_id
from .cursor import Cursor, Malformed, Reading

MAX_FAILURES = 16  # texts that looked like calls in one answer, after which nothing does: each is read once more
MAX_HELD = 64  # characters of white space that wait for what follows


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the parser of one answer is to know."""

    tools: Sequence[Mapping[str, Any]]  # what may be called, in the OpenAI shape
    streams: bool = False  # arguments are written as they come: only where a grammar keeps them valid
    most_calls: int | None = None  # further ones are content
    new_id: Callable[[], str] = new_call_id


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
    """Splits one answer as it comes; `_answer` reads it and puts what it finds into `_parts`."""

    def __init__(self, options: AnswerOptions) -> None:
        self._cursor = Cursor()
        self._parts: list[Part] = []
        self._calls = Calls(self._emit_call, options.tools, streams=options.streams, new_id=options.new_id)
        self._most_calls = options.most_calls
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


class Reader(Protocol):
    """What reads the calls of a format (`json_calls`, `tagged_calls`)."""

    def read(self, cursor: Cursor, calls: Calls, trigger: str) -> Reading[None]:
        """The calls after a trigger. Raises Malformed when there are none."""
        ...


class ToolParser(AnswerParser):
    """Content and calls; gpt-oss's channels are `harmony.HarmonyParser`'s.

    reader    of the calls after a trigger
    triggers  begin calls anywhere
    at_start  begin calls where nothing was said before; they are part of what the reader reads
    """

    def __init__(
        self, options: AnswerOptions, reader: Reader, triggers: Sequence[str], at_start: Sequence[str] = ()
    ) -> None:
        self._reader, self._triggers, self._at_start = reader, tuple(triggers), tuple(at_start)
        self._space = HeldSpace(self._emit_content)
        super().__init__(options)

    def _answer(self) -> Reading[None]:
        yield from self._start()
        while (trigger := (yield from self._talk())) is not None:
            yield from self._attempt(trigger, len(trigger))
        self._space.flush()

    def _start(self) -> Reading[None]:
        """Calls that begin without a trigger, if the answer begins with them."""
        while self._at_start and not self._is_full:
            self._space.push((yield from self._cursor.space()))
            self._cursor.mark()
            found = yield from self._cursor.literal(*self._at_start)
            if found is None:
                return
            self._cursor.give_back(0)
            if not (yield from self._attempt("", 1)):
                return

    def _talk(self) -> Reading[str | None]:
        """Content up to a trigger."""
        triggers = () if self._is_full else self._triggers
        self._cursor.mark()
        found = yield from self._cursor.rest(*triggers, into=self._say)
        return found

    def _say(self, text: str) -> None:
        self._space.push(text)
        self._cursor.mark()

    def _attempt(self, trigger: str, keep: int) -> Reading[bool]:
        """Read calls; what turns out to be none becomes content, its first `keep` characters without another look."""
        before = self._calls.count
        try:
            yield from self._reader.read(self._cursor, self._calls, trigger)
        except Malformed:
            self._failures += 1
            written = self._calls.drop() or self._calls.count > before
            if self._is_full:
                keep = len(self._cursor.read_since_mark())
            self._space.push(self._cursor.give_back(0 if written else keep))
            return False
        self._cursor.mark()
        return True

    def _emit_call(self, part: Part) -> None:
        self._space.drop()
        super()._emit_call(part)
