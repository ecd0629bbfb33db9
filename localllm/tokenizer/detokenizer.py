"""Token ids to text as they come: whole characters only, stop strings across token borders, nothing taken back.

`IncrementalDetokenizer` decodes an answer's ids once and looks for its stop strings once: in the engine's thread, as
the request's `StopCheck`, where there are stop strings; else where the answer is read. It costs O(1) amortised per
character and stop string, and the text does not depend on how the ids were cut into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.tokenizer.tokenizer import Tokenizer


class _Needle:
    """One stop string and how much of it the text ends with (Knuth-Morris-Pratt): never looks back."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of the stop string with which the text ends now, always less than its length
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


class IncrementalDetokenizer:
    """Ids in, text out that is safe to show: no part of a stop string, no part of a character.

    At most max(len(stop)) - 1 characters wait. Without stop strings, what `push` returns is together exactly
    `tokenizer.decode` of all ids.

    stop, min_tokens, include_stop  as in `SamplingParams`; a stop that is whole before `min_tokens` tokens is ordinary
                                    text; of stops that end at the same character the longest counts
    continuing                      keeps the space before the first word
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
        self._end: int | None = None  # how many characters of the whole text stay, once a stop string has ended it
        self.stop_text: str | None = None  # the stop string that was found

    def fork(self) -> IncrementalDetokenizer:
        return self._fresh()

    def accept(self, token_id: int) -> bool:
        """Take one id; an unfinished character waits for the next. Whether a stop string has ended the text."""
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
        """The new text that will not be taken back; with `last` the rest, a half character as U+FFFD."""
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
        """Take ids; what `take` returns then."""
        for token_id in token_ids:
            self.accept(token_id)
        return self.take(last)
