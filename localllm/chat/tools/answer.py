"""One streamed answer read by a generator over a cursor: what all parsers of answers are.

Parts are ("content" | "reasoning", text) and ("tool_call", JSON of a delta).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from .calls import Calls, Part
from .cursor import Cursor, Reading


class AnswerParser(ABC):
    """Splits one answer as it comes; `_answer` reads it and puts what it finds into `_parts`."""

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        streams: bool,
        most_calls: int | None,
        new_id: Callable[[], str],
    ) -> None:
        self._cursor = Cursor()
        self._parts: list[Part] = []
        self._calls = Calls(self._emit_call, tools, streams=streams, new_id=new_id)
        self._most_calls = most_calls
        self._failures = 0
        self._run: Generator[None, None, None] | None = self._answer()

    def push(self, text: str) -> list[Part]:
        """The parts that this text completes, in order."""
        self._cursor.feed(text)
        return self._resume()

    def finish(self) -> list[Part]:
        """What was held back. A call that was never finished is content."""
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

    def _emit_call(self, part: Part) -> None:
        self._parts.append(part)
        self._cursor.mark()
