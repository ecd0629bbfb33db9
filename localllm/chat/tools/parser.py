"""One streamed answer to content and tool calls: `ToolParser`, for every format; gpt-oss's channels are `harmony.py`'s.

Text that only looked like a call comes out as content, whole. White space next to calls belongs to neither side. The
parts together do not depend on how the text was cut; the work is linear in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .answer import AnswerParser
from .calls import Calls, Part, new_call_id
from .cursor import Cursor, Malformed, Reading
from .space import HeldSpace

MAX_FAILURES = 16  # texts that looked like calls in one answer, after which nothing does: each is read once more


class Reader(Protocol):
    """What reads the calls of a format (`json_calls`, `tagged_calls`)."""

    def read(self, cursor: Cursor, calls: Calls, trigger: str) -> Reading[None]:
        """The calls after a trigger. Raises Malformed when there are none."""
        ...


class ToolParser(AnswerParser):
    """Splits one answer as it comes.

    reader      of the calls after a trigger
    triggers    begin calls anywhere
    at_start    begin calls where nothing was said before; they are part of what the reader reads
    most_calls  further ones are content
    """

    def __init__(
        self,
        reader: Reader,
        triggers: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
        *,
        at_start: Sequence[str] = (),
        streams: bool = False,
        most_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._reader = reader
        self._triggers = tuple(triggers)
        self._at_start = tuple(at_start)
        self._space = HeldSpace(self._emit_content)
        super().__init__(tools, streams=streams, most_calls=most_calls, new_id=new_id)

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

    @property
    def _is_full(self) -> bool:
        too_many = self._most_calls is not None and self._calls.count >= self._most_calls
        return too_many or self._failures >= MAX_FAILURES

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

    def _emit_content(self, text: str) -> None:
        self._parts.append(("content", text))

    def _emit_call(self, part: Part) -> None:
        self._space.drop()
        super()._emit_call(part)
