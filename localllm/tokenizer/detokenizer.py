"""Incremental detokenization: whole characters only, stop strings across token boundaries, no text taken back.

`IncrementalDetokenizer` decodes an answer's ids and searches for its stop strings once: in the engine's thread, as the
request's `StopCheck`, if there are stop strings, else where the answer is read. The cost is amortized O(1) per
character and stop string, and the text does not depend on how the ids were split into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.tokenizer.tokenizer import Tokenizer


class _Needle:
    """A stop string and how much of it the text ends with (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of the stop string that the text ends with; always less than its length
        self._falls = [0] * (len(text) + 1)
        fall = 0
        for at in range(1, len(text)):
            while fall and text[at] != text[fall]:
                fall = self._falls[fall]
            fall += text[at] == text[fall]
            self._falls[at + 1] = fall

    def feed(self, piece: str) -> int | None:
        """Read a piece of text. Returns the position in it where the stop string first ended, or None.

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


class IncrementalDetokenizer:
    """Turns ids into text that is safe to show: no partial stop strings and no partial characters.

    At most max(len(stop)) - 1 characters are held back. Without stop strings, the concatenated results of `push` equal
    `tokenizer.decode` of all ids.

    stop, min_tokens, include_stop  as in `SamplingParams`; a stop string completed before `min_tokens` tokens is
                                    ordinary text; if several end at the same character, the longest counts
    continuing                      keep the space before the first word
    keep_ids                        special tokens whose text is kept
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        *,
        skip_special: bool = True,
        continuing: bool = False,
        keep_ids: Iterable[int] = (),
    ) -> None:
        keep_ids = frozenset(keep_ids)
        self._fresh = partial(
            IncrementalDetokenizer, tokenizer, stop, min_tokens, include_stop,
            skip_special=skip_special, continuing=continuing, keep_ids=keep_ids,
        )  # fmt: skip
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids - keep_ids if skip_special else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._at_start = tokenizer.strips_first_space and not continuing
        self._needles = [_Needle(text) for text in dict.fromkeys(stop) if text]
        self._min_tokens, self._include_stop = min_tokens, include_stop
        self._num_tokens = self._num_chars = self._num_shown = 0
        self._waiting = ""
        self._end: int | None = None  # length of the final text, once a stop string has ended it
        self.stop_text: str | None = None  # the stop string that was found

    def fork(self) -> IncrementalDetokenizer:
        return self._fresh()

    def accept(self, token_id: int) -> bool:
        """Add one id; an incomplete character waits for the next. Returns True if a stop string has ended the text."""
        self._num_tokens += 1
        if token_id not in self._skip:
            data = self._token_bytes(token_id)
            if self._at_start and data:
                self._at_start = False
                data = data.removeprefix(b" ")
            text = self._decode(data)
            self._waiting += text
            if self._needles and text and self._end is None:
                self._match(text)
        return self._end is not None

    def _match(self, text: str) -> None:
        before, self._num_chars = self._num_chars, self._num_chars + len(text)
        read = [(before + at, -len(needle.text), needle.text) for needle in self._needles if (at := needle.feed(text))]
        if read and self._num_tokens >= self._min_tokens:
            end, minus_length, self.stop_text = min(read)
            self._end = end if self._include_stop else end + minus_length

    def take(self, last: bool = False) -> str:
        """Return the new text that is final; with `last`, all of it, with an incomplete character as U+FFFD."""
        if self._end is not None:
            count = max(self._end - self._num_shown, 0)
        elif last:
            self._waiting += self._decode(b"", True)
            count = len(self._waiting)
        else:
            count = len(self._waiting) - max((needle.matched for needle in self._needles), default=0)
        text, self._waiting = self._waiting[:count], self._waiting[count:]
        self._num_shown += len(text)
        return text

    def push(self, token_ids: Iterable[int], last: bool = False) -> str:
        """Add ids and `take` the new text."""
        for token_id in token_ids:
            self.accept(token_id)
        return self.take(last)
