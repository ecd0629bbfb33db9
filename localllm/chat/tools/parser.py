"""Splits a streamed answer into content and tool calls: `answer_parser(tool_format, tools)`.

Text that only looked like a call is returned unchanged as content. White space next to calls is dropped. The
concatenated parts do not depend on how the text was split into pieces, and the work is linear in the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..parser import Part, Splitter
from .answers import AnswerParser, HeldSpace
from .call_reader import CallReader
from .calls import Tools, new_call_id, short_call_id
from .cursor import Malformed, Reading
from .formats import BY_NAME, ToolFormat
from .harmony import HarmonyParser


def answer_parser(
    tool_format: ToolFormat,
    tools: Tools,
    *,
    streams: bool = False,
    most_calls: int | None = None,
    new_id: Callable[[], str] | None = None,
    opening: str = "",
) -> Splitter:
    """Create a parser for one answer; the options are those of `AnswerParser`.

    opening  the part of the answer that the prompt ends with (`ToolFormat.opening`)
    """
    new_id = new_id or (short_call_id if tool_format.ids == "short" else new_call_id)
    if tool_format.final:
        return HarmonyParser(tool_format, tools, streams, most_calls, new_id)
    parser = ToolParser(tool_format, tools, streams, most_calls, new_id)
    if any(text.startswith(opening) for text in (*tool_format.hidden, *tool_format.triggers)):
        parser.push(opening)
    return parser


class ToolParser(AnswerParser):
    """Splits content and calls; `harmony.HarmonyParser` handles channels."""

    def __init__(self, tool_format: ToolFormat, *options: Any) -> None:
        self._format = tool_format
        self._space = HeldSpace(self._emit_content)
        super().__init__(*options)
        reads_as = BY_NAME[tool_format.reads_as or tool_format.name]
        self._reader = CallReader(reads_as, self._cursor, self._calls)

    def _answer(self) -> Reading[None]:
        yield from self._start()
        while (found := (yield from self._talk())) is not None:
            begun = [text for text in self._format.hidden if text.startswith(found)]
            if not begun or (yield from self._cursor.literal(*(text[len(found) :] for text in begun))) is None:
                yield from self._attempt(found, len(found))
        self._space.flush()

    def _start(self) -> Reading[None]:
        """Read calls without a trigger at the start of the answer."""
        while self._format.at_start and not self._is_full:
            self._space.push((yield from self._cursor.space()))
            self._cursor.mark()
            found = yield from self._cursor.literal(*self._format.at_start)
            if found is None:
                return
            self._cursor.give_back(0)
            if not (yield from self._attempt("", 1)):
                return

    def _talk(self) -> Reading[str | None]:
        """Read content up to a trigger or a hidden text."""
        triggers = () if self._is_full else self._format.triggers
        hidden = [text for text in self._format.hidden if not text.startswith(triggers or "\0")]
        self._cursor.mark()
        found = yield from self._cursor.rest(*triggers, *hidden, into=self._emit_text)
        return found

    def _emit_text(self, text: str) -> None:
        self._space.push(text)
        self._cursor.mark()

    def _attempt(self, trigger: str, keep: int) -> Reading[bool]:
        """Read calls. If malformed, the first `keep` characters become content and the rest is parsed again."""
        before = self._calls.count
        try:
            yield from self._reader.read(trigger)
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
