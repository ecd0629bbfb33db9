"""Token ids to text as they come: whole characters only, stop strings across token borders, nothing taken back.

`TextStream` is the incremental decoder, `StopStrings` the `request.StopCheck` that the engine asks,
`IncrementalDetokenizer` what the facade sends through: it holds back what might become a stop string. All cost O(1)
amortised per character and stop string, and the text does not depend on how the ids were cut into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    special_ids: frozenset[int]
    strips_first_space: bool

    def token_bytes(self, index: int) -> bytes:
        """The bytes a token stands for."""
        ...


class TextStream:
    """Ids in, text out. The pieces of `push` and `flush` together are exactly `tokenizer.decode` of all ids."""

    def __init__(
        self,
        tokenizer: TokenBytes,
        skip_special: bool = True,
        *,
        continuing: bool = False,
        keep_ids: Iterable[int] = (),
    ) -> None:
        """`continuing` keeps the space before the first word; `keep_ids` are special tokens whose text is kept."""
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids - frozenset(keep_ids) if skip_special else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._at_start = tokenizer.strips_first_space and not continuing

    def push(self, token_id: int) -> str:
        """The text that this id completes; an unfinished character is kept for the next call."""
        if token_id in self._skip:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decode(data)

    def flush(self) -> str:
        """The end: U+FFFD for a character that was never finished."""
        return self._decode(b"", True)


class _Needle:
    """One stop string and how much of it the text ends with (Knuth-Morris-Pratt): never looks back."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """characters of the stop string with which the text ends now, always less than its length"""
        self._falls = [0] * (len(text) + 1)
        fall = 0
        for at in range(1, len(text)):
            while fall and text[at] != text[fall]:
                fall = self._falls[fall]
            fall += text[at] == text[fall]
            self._falls[at + 1] = fall

    def feed(self, piece: str) -> int | None:
        """Take a piece of text. None, or how many of its characters were read when the stop string was first whole.

        The whole piece is read in any case.
        """
        needle, falls, state = self.text, self._falls, self.matched
        first, length = needle[0], len(needle)
        whole: int | None = None
        at, end = 0, len(piece)
        while at < end:
            if not state:
                at = piece.find(first, at)  # the common case, at the speed of C
                if at < 0:
                    break
                state = 1
            else:
                char = piece[at]
                while state and char != needle[state]:
                    state = falls[state]
                state += char == needle[state]
            at += 1
            if state == length:
                whole = at if whole is None else whole
                state = falls[state]
        self.matched = state
        return whole


class _Matcher:
    """Text in, the first stop out. Of stops that end at the same character the longest counts."""

    def __init__(self, stop: Iterable[str], min_tokens: int, include_stop: bool) -> None:
        self._needles = [_Needle(text) for text in dict.fromkeys(stop) if text]
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0
        self._num_chars = 0
        self.stop_text: str | None = None
        """the stop string that was found"""

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max((needle.matched for needle in self._needles), default=0)

    def feed(self, piece: str) -> int | None:
        """One token's text. None, or the number of characters of the whole text to keep."""
        self._num_tokens += 1
        before, self._num_chars = self._num_chars, self._num_chars + len(piece)
        found: tuple[int, int, str] | None = None
        for needle in self._needles if piece else ():
            read = needle.feed(piece)
            if read is not None:
                candidate = (before + read, -len(needle.text), needle.text)
                found = candidate if found is None else min(found, candidate)
        if found is None or self._num_tokens < self._min_tokens:
            return None
        end, minus_length, self.stop_text = found
        return end if self._include_stop else end + minus_length


class StopStrings:
    """`request.StopCheck` for stop strings. A stop that is whole before `min_tokens` tokens is ordinary text."""

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: Sequence[str],
        min_tokens: int = 0,
        include_stop: bool = False,
        *,
        skip_special: bool = True,
        continuing: bool = False,
        keep_ids: Iterable[int] = (),
    ) -> None:
        """The stream options must be those of the `IncrementalDetokenizer` that shows the text."""
        self._make = (tokenizer, tuple(stop), min_tokens, include_stop)
        self._options = (skip_special, continuing, frozenset(keep_ids))
        self._stream = TextStream(tokenizer, skip_special, continuing=continuing, keep_ids=keep_ids)
        self._matcher = _Matcher(stop, min_tokens, include_stop)

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.stop_text

    def accept(self, token_id: int) -> int | None:
        """Take one id. None: go on; else the number of characters of the whole text to keep."""
        return self._matcher.feed(self._stream.push(token_id))

    def fork(self) -> StopStrings:
        """A fresh one with the same settings."""
        skip_special, continuing, keep_ids = self._options
        return StopStrings(*self._make, skip_special=skip_special, continuing=continuing, keep_ids=keep_ids)


class IncrementalDetokenizer:
    """Ids in, text out that is safe to show: no part of a stop string, no part of a character.

    At most max(len(stop)) - 1 characters wait.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        *,
        skip_special: bool = True,
        continuing: bool = False,
        keep_ids: Iterable[int] = (),
    ) -> None:
        """The same settings as the `StopStrings` of the request."""
        self._stream = TextStream(tokenizer, skip_special, continuing=continuing, keep_ids=keep_ids)
        self._matcher = _Matcher(stop, min_tokens, include_stop)
        self._waiting = ""
        self._emitted = 0
        self._stopped_at: int | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that will not be taken back."""
        pieces = []
        for token_id in token_ids:
            text = self._stream.push(token_id)
            if self._stopped_at is None:
                self._stopped_at = self._matcher.feed(text)
            pieces.append(text)
        self._waiting += "".join(pieces)
        if self._stopped_at is None:
            return self._emit(len(self._waiting) - self._matcher.held)
        return self._emit(self._stopped_at - self._emitted)

    def finish(self, keep_chars: int | None = None) -> str:
        """The rest. `keep_chars` as in the last `TokenEvent`; None: all up to a stop, a half character as U+FFFD."""
        keep_chars = self._stopped_at if keep_chars is None else keep_chars
        if keep_chars is None:
            self._waiting += self._stream.flush()
            return self._emit(len(self._waiting))
        return self._emit(keep_chars - self._emitted)

    def _emit(self, count: int) -> str:
        count = max(min(count, len(self._waiting)), 0)
        text, self._waiting = self._waiting[:count], self._waiting[count:]
        self._emitted += count
        return text
