"""Incremental reading of streamed text with generators that wait for more; results do not depend on the pieces.

Everything read since the last `mark` is kept, so malformed text can be given back. The work is linear in the text, and
no more text stays unread than a decision needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields when it needs more text
Sink = Callable[[str], None]

MAX_DEPTH = 256  # of nested JSON; Python's parser allows about a thousand levels
MAX_SCALAR = 1024  # characters of a number or a word
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SPACE = re.compile(r"\s*")
_SCALAR_END = re.compile(r"[\s,\]}]")
_PAIRS = {"{": "}", "[": "]"}


class Malformed(Exception):
    """The text is not in the expected format."""


class Cursor:
    """The unread text, and the text read since the last mark."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._read: list[str] = []

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._ended = True

    @property
    def is_at_end(self) -> bool:
        return self._ended and self._at >= len(self._text)

    def mark(self) -> None:
        """Forget the text read so far; it can no longer be given back."""
        self._read.clear()

    def read_since_mark(self) -> str:
        """The text read since the mark."""
        return "".join(self._read)

    def give_back(self, keep: int) -> str:
        """Unread the text since the mark, except for its first `keep` characters, which are returned."""
        text = self.read_since_mark()
        self._text = text[keep:] + self._text[self._at :]
        self._at = 0
        self.mark()
        return text[:keep]

    # --- reading -----------------------------------------------------------------------------------------------------

    def until(self, *needles: str, into: Sink | None = None, most: int | None = None) -> Reading[tuple[str, str]]:
        """Read up to and including the first of the needles. Returns (text before it, needle).

        into  receives the text as it arrives; the returned text is then empty
        most  maximum number of characters before the needle

        Raises Malformed at the end of the text or beyond `most`.
        """
        search = _any_of(needles)
        parts: list[str] = []
        take = into or parts.append
        count = 0
        while True:
            found = search.search(self._text, self._at)
            end = found.start() if found else len(self._text) - self._open_end(needles)
            count += end - self._at
            if most is not None and count > most:
                raise Malformed
            if end > self._at:
                take(self._take(end))
            if found:
                self._take(found.end())
                return "".join(parts), found[0]
            yield from self._more()

    def rest(self, *needles: str, into: Sink) -> Reading[str | None]:
        """Like `until`, but return None at the end of the text."""
        search = _any_of(needles) if needles else None
        while True:
            found = search.search(self._text, self._at) if search else None
            end = found.start() if found else len(self._text) - (0 if self._ended else self._open_end(needles))
            if end > self._at:
                into(self._take(end))
            if found:
                self._take(found.end())
                return found[0]
            if self.is_at_end:
                return None
            yield

    def space(self) -> Reading[str]:
        parts: list[str] = []
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            parts.append(self._take(found.end()))
            if self._at < len(self._text) or self._ended:
                return "".join(parts)
            yield

    def literal(self, *options: str) -> Reading[str | None]:
        """Read the longest option that the text continues with; None if it continues with none of them."""
        while True:
            ahead = self._text[self._at : self._at + 64]
            waits = any(option.startswith(ahead) and option != ahead for option in options)
            if not waits or self._ended:
                best = max((option for option in options if ahead.startswith(option)), key=len, default=None)
                self._take(self._at + len(best or ""))
                return best
            yield

    def expect(self, *options: str) -> Reading[str]:
        """Like `literal`, but raise Malformed if the text continues with none of them."""
        found = yield from self.literal(*options)
        if found is None:
            raise Malformed
        return found

    def peek(self) -> Reading[str]:
        """The next character, without reading it; "" at the end."""
        while self._at >= len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self, count: int) -> Reading[str]:
        """Read the next `count` characters. Raises Malformed at the end of the text."""
        while len(self._text) - self._at < count:
            yield from self._more()
        return self._take(self._at + count)

    def scalar(self, *ends: str) -> Reading[str]:
        """Read up to white space or one of `ends`, which stays unread. Raises Malformed if that is empty."""
        parts: list[str] = []
        yield from self._scalar(parts.append, _any_of((*ends, " ", "\t", "\r", "\n")))
        return "".join(parts)

    def json_value(self, into: Sink | None = None) -> Reading[str]:
        """Read one JSON value as text, checking only brackets and quotes. Raises Malformed.

        into  receives the text as it arrives; the returned text is then empty
        """
        parts: list[str] = []
        take = into or parts.append
        first = yield from self.peek()
        if first and first in '{["':
            yield from self._nested(take)
        else:
            yield from self._scalar(take)
        return "".join(parts)

    def _scalar(self, take: Sink, ends: re.Pattern[str] = _SCALAR_END) -> Reading[None]:
        size = 0
        while True:
            found = ends.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            size += end - self._at
            if size > MAX_SCALAR:
                raise Malformed
            if end > self._at:
                take(self._take(end))
            if found or self._ended:
                if not size:
                    raise Malformed
                return
            yield

    def _nested(self, take: Sink) -> Reading[None]:
        closing: list[str] = []
        in_string = escaped = False
        while True:
            at, text = self._at, self._text
            while at < len(text):
                if escaped:
                    escaped = False
                    at += 1
                    continue
                found = (_STRING_END if in_string else _STRUCTURE).search(text, at)
                if found is None:
                    at = len(text)
                    break
                at, char = found.end(), found[0]
                if in_string:
                    escaped, in_string = char == "\\", char == "\\"
                elif char == '"':
                    in_string = True
                elif char in _PAIRS:
                    closing.append(_PAIRS[char])
                    if len(closing) > MAX_DEPTH:
                        self._stop_before(at, take)
                elif not closing or closing.pop() != char:
                    self._stop_before(at, take)
                if not in_string and not closing:
                    take(self._take(at))
                    return
            if at > self._at:
                take(self._take(at))
            yield from self._more()

    def _stop_before(self, at: int, take: Sink) -> None:
        take(self._take(at - 1))
        raise Malformed

    # --- the text ----------------------------------------------------------------------------------------------------

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if text:
            self._read.append(text)
        return text

    def _more(self) -> Reading[None]:
        if self._ended:
            raise Malformed
        yield

    def _open_end(self, needles: tuple[str, ...]) -> int:
        """Number of characters at the end of the unread text that may begin a needle."""
        unread = len(self._text) - self._at
        longest = min(max(map(len, needles), default=1) - 1, unread)
        for size in range(longest, 0, -1):
            tail = self._text[-size:]
            if any(needle.startswith(tail) for needle in needles):
                return size
        return 0


@lru_cache(maxsize=256)
def _any_of(needles: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that finds the leftmost needle, and the longest one at that position."""
    return re.compile("|".join(re.escape(needle) for needle in sorted(needles, key=len, reverse=True)))
