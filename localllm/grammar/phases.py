"""Masks that change while an answer goes on: free reasoning before a grammar, free text around tool calls.

Where a phase ends is found in the bytes of the tokens, control tokens spelled out, so a tag may be one token or many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from .mask import GrammarMask, Vocabulary

MAX_ROLLBACK = 64
MAX_LINE_ENDS = 4  # tokens of line ends after a closing tag

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tags of a model that thinks before it answers."""

    opens: str
    closes: str
    opened: bool = False  # the prompt has opened the tag already
    open_id: int | None = None  # the token that is `opens`, where there is one: else only the prompt can open it
    must: bool = False  # there is always a first part that ends with `closes`, though nothing opens it


class AfterReasoning:
    """A grammar for what follows the reasoning. Until then everything is allowed but the end of the answer."""

    def __init__(self, inner: GrammarMask, vocabulary: Vocabulary, token_bytes: TokenBytes, tags: Reasoning) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._token_bytes = token_bytes
        self._tags = tags
        self._closes = tags.closes.encode()
        self._open_id = tags.open_id
        begins = tags.opened or tags.must
        self._state = _Thinking("reasoning" if begins else "start" if self._open_id is not None else "inner")
        # per accepted id: the state before it, and how many ids the grammar took
        self._before: deque[tuple[_Thinking, int]] = deque(maxlen=MAX_ROLLBACK)

    def fill(self, bitmask_row: np.ndarray) -> bool:
        phase = self._state.phase
        if phase == "reasoning":
            bitmask_row[:] = self._vocabulary.no_end
            return True
        self._inner.fill(bitmask_row)
        if phase == "start" and self._open_id is not None:
            bitmask_row |= self._vocabulary.bits([self._open_id])
        elif phase == "gap" and self._state.line_ends < MAX_LINE_ENDS:
            bitmask_row |= self._vocabulary.line_ends
        return True

    def accept(self, token_id: int) -> None:
        before, taken = self._state, 0
        if before.phase == "reasoning":
            self._state, taken = self._think(before, token_id)
        elif before.phase == "start" and token_id == self._open_id:
            self._state = _Thinking("reasoning")
        elif before.phase == "gap" and token_id in self._vocabulary.line_end_ids and not self._inner.allows(token_id):
            self._state = replace(before, line_ends=before.line_ends + 1)
        else:
            self._inner.accept(token_id)
            self._state, taken = _Thinking("inner"), 1
        self._before.append((before, taken))

    def _think(self, state: _Thinking, token_id: int) -> tuple[_Thinking, int]:
        data = state.tail + self._token_bytes(token_id)
        at = data.find(self._closes)
        if at < 0:
            return replace(state, tail=_tail(data, self._closes)), 0
        rest = data[at + len(self._closes) :].lstrip(b"\r\n")
        if not rest:
            return _Thinking("gap"), 0
        taken = self._inner.accept_text(rest)
        # a token that goes on past the tag with what the grammar refuses: the reasoning is taken to go on
        return (_Thinking("inner"), taken) if taken >= 0 else (_Thinking("reasoning"), 0)

    def jump_forward(self, last: int | None = None) -> list[int]:
        if self._state.phase != "inner":
            return [] if last is None else [last]
        if last is not None and self._before and self._before[-1][1] != 1:  # it closed the reasoning
            return [last, *self._inner.jump_forward()]
        return self._inner.jump_forward(last)

    @property
    def is_done(self) -> bool:
        return self._state.phase == "inner" and self._inner.is_done

    def fork(self) -> AfterReasoning:
        made = AfterReasoning(self._inner.fork(), self._vocabulary, self._token_bytes, self._tags)
        made._state = self._state
        return made

    def rollback(self, count: int) -> None:
        for _ in range(count):
            self._state, taken = self._before.pop()
            self._inner.rollback(taken)


@dataclass(frozen=True, slots=True)
class _Thinking:
    phase: Literal["start", "reasoning", "gap", "inner"]
    tail: bytes = b""  # the end of the reasoning so far, shorter than the closing tag
    line_ends: int = 0


class ToolTriggers:
    """Free text in which the beginning of a tool call commits to a whole, valid one."""

    def __init__(
        self,
        call: GrammarMask,
        trigger: str,
        token_bytes: TokenBytes,
        *,
        tags: Reasoning | None = None,
        only_one: bool = False,
    ) -> None:
        """call      at the beginning of what follows the trigger
        trigger   begins a call anywhere in the answer, but not in its reasoning
        only_one  the answer ends with its first call
        """
        self._call = call
        self._trigger = trigger.encode()
        self._token_bytes = token_bytes
        self._tags = tags
        self._only_one = only_one
        self._state = _Talking("free" if tags is None else "reasoning" if tags.opened or tags.must else "start")
        self._before: deque[tuple[_Talking, int]] = deque(maxlen=MAX_ROLLBACK)

    def fill(self, bitmask_row: np.ndarray) -> bool:
        call = self._state.call
        return call is not None and call.fill(bitmask_row)

    def accept(self, token_id: int) -> None:
        before, taken = self._state, 0
        if before.call is not None:
            before.call.accept(token_id)
            taken = 1
            if before.call.is_done:
                self._state = _Talking("done" if self._only_one else "free")
        else:
            self._state, taken = self._listen(before, before.tail + self._token_bytes(token_id))
        self._before.append((before, taken))

    def _listen(self, state: _Talking, data: bytes) -> tuple[_Talking, int]:
        if state.phase == "start" and self._tags is not None:
            said, opens = data.lstrip(), self._tags.opens.encode()
            if opens.startswith(said):
                return replace(state, tail=data[-256:]), 0
            state = _Talking("reasoning" if said.startswith(opens) else "free")
        if state.phase == "reasoning" and self._tags is not None:
            closes = self._tags.closes.encode()
            at = data.find(closes)
            if at < 0:
                return _Talking("reasoning", _tail(data, closes)), 0
            data = data[at + len(closes) :]
            state = _Talking("free")
        at = data.find(self._trigger)
        if state.phase != "free" or at < 0:
            return replace(state, tail=_tail(data, self._trigger)), 0
        call, rest = self._call.fork(), data[at + len(self._trigger) :]
        taken = call.accept_text(rest) if rest else 0
        if taken < 0:  # the token went on with something else: what follows is left to the parser
            return _Talking("free"), 0
        return _Talking("call", call=call), taken

    def jump_forward(self, last: int | None = None) -> list[int]:
        call = self._state.call
        if call is None:
            return [] if last is None else [last]
        if last is not None and self._before and self._before[-1][0].call is not call:  # it began the call
            return [last, *call.jump_forward()]
        return call.jump_forward(last)

    @property
    def is_done(self) -> bool:
        return self._state.phase == "done"

    def fork(self) -> ToolTriggers:
        made = ToolTriggers(
            self._call, self._trigger.decode(), self._token_bytes, tags=self._tags, only_one=self._only_one
        )
        call = self._state.call
        made._state = self._state if call is None else replace(self._state, call=call.fork())
        return made

    def rollback(self, count: int) -> None:
        for _ in range(count):
            after, (self._state, taken) = self._state, self._before.pop()
            call = self._state.call or after.call
            if call is not None and taken:
                call.rollback(taken)


@dataclass(frozen=True, slots=True)
class _Talking:
    phase: Literal["start", "reasoning", "free", "call", "done"]
    tail: bytes = b""
    call: GrammarMask | None = None


def _tail(data: bytes, needle: bytes) -> bytes:
    return data[max(len(data) - len(needle) + 1, 0) :]
