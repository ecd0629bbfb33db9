"""Masks with phases: free reasoning before a grammar, free text around tool calls.

The end of a phase is found in the bytes of the tokens, with control tokens spelled out, so a tag can be one token or
several.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from .mask import GrammarMask, Vocabulary

MAX_ROLLBACK = 64
MAX_LINE_ENDS = 4  # tokens of line ends allowed after a closing tag

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tags of a model that reasons before it answers."""

    opens: str
    closes: str
    opened: bool = False  # the prompt has already opened the tag
    open_id: int | None = None  # the token for `opens`, if there is one; otherwise only the prompt can open the tag
    must: bool = False  # the answer always starts with reasoning that ends with `closes`, without an opening tag


@dataclass(frozen=True, slots=True)
class _State:
    phase: Literal["start", "reasoning", "gap", "free", "grammar", "done"]
    tail: bytes = b""  # the end of the free text so far, shorter than the text searched for
    line_ends: int = 0  # tokens of line ends in the gap after the reasoning
    mask: GrammarMask | None = None  # only in the phase "grammar"


class _PhasedMask(ABC):
    """A grammar for part of an answer, with rollback over the last tokens."""

    def __init__(self, mask: GrammarMask, token_bytes: TokenBytes, state: _State) -> None:
        self._mask = mask
        self._token_bytes = token_bytes
        self._state = state
        # per accepted id: the state before it, and the number of ids the grammar consumed
        self._before: deque[tuple[_State, int]] = deque(maxlen=MAX_ROLLBACK)

    @abstractmethod
    def fill(self, bitmask_row: np.ndarray) -> bool: ...

    @abstractmethod
    def _next(self, state: _State, token_id: int) -> tuple[_State, int]:
        """Return (the state after a token, the number of ids the grammar consumed)."""

    @property
    @abstractmethod
    def is_done(self) -> bool: ...

    def accept(self, token_id: int) -> None:
        before = self._state
        self._state, taken = self._next(before, token_id)
        self._before.append((before, taken))

    def jump_forward(self, last: int | None = None) -> list[int]:
        mask = self._state.mask
        if mask is None:
            return [] if last is None else [last]
        if last is not None and self._before and self._before[-1][1] != 1:  # the grammar started inside that token
            return [last, *mask.jump_forward()]
        return mask.jump_forward(last)

    def fork(self) -> Self:
        made = copy.copy(self)
        made._mask, made._before = self._mask.fork(), deque(maxlen=MAX_ROLLBACK)
        mask = self._state.mask
        if mask is not None:
            made._state = replace(self._state, mask=made._mask if mask is self._mask else mask.fork())
        return made

    def rollback(self, count: int) -> None:
        for _ in range(count):
            after, (self._state, taken) = self._state, self._before.pop()
            mask = self._state.mask or after.mask
            if mask is not None and taken:
                mask.rollback(taken)


class AfterReasoning(_PhasedMask):
    """A grammar for the text after the reasoning. Until then, everything except the end of the answer is allowed."""

    def __init__(self, inner: GrammarMask, vocabulary: Vocabulary, token_bytes: TokenBytes, tags: Reasoning) -> None:
        begins = tags.opened or tags.must
        start = _State("reasoning") if begins else _State("start") if tags.open_id is not None else None
        super().__init__(inner, token_bytes, start or _State("grammar", mask=inner))
        self._vocabulary = vocabulary
        self._closes = tags.closes.encode()
        self._open_id = tags.open_id

    def fill(self, bitmask_row: np.ndarray) -> bool:
        phase = self._state.phase
        if phase == "reasoning":
            bitmask_row[:] = self._vocabulary.no_end
            return True
        self._mask.fill(bitmask_row)
        if phase == "start" and self._open_id is not None:
            bitmask_row |= self._vocabulary.bits([self._open_id])
        elif phase == "gap" and self._state.line_ends < MAX_LINE_ENDS:
            bitmask_row |= self._vocabulary.line_ends
        return True

    def _next(self, state: _State, token_id: int) -> tuple[_State, int]:
        if state.phase == "reasoning":
            return self._next_in_reasoning(state, token_id)
        if state.phase == "start" and token_id == self._open_id:
            return _State("reasoning"), 0
        if state.phase == "gap" and token_id in self._vocabulary.line_end_ids and not self._mask.allows(token_id):
            return replace(state, line_ends=state.line_ends + 1), 0
        self._mask.accept(token_id)
        return _State("grammar", mask=self._mask), 1

    def _next_in_reasoning(self, state: _State, token_id: int) -> tuple[_State, int]:
        data, rest = _part(state.tail + self._token_bytes(token_id), self._closes)
        if rest is None:
            return replace(state, tail=data), 0
        rest = rest.lstrip(b"\r\n")
        if not rest:
            return _State("gap"), 0
        taken = self._mask.accept_text(rest)
        # a token that continues past the tag with text the grammar rejects counts as more reasoning
        return (_State("grammar", mask=self._mask), taken) if taken >= 0 else (_State("reasoning"), 0)

    @property
    def is_done(self) -> bool:
        return self._state.phase == "grammar" and self._mask.is_done


class ToolTriggers(_PhasedMask):
    """Free text in which the start of a tool call commits the model to a complete, valid one."""

    def __init__(
        self,
        call: GrammarMask,
        trigger: str,
        token_bytes: TokenBytes,
        *,
        tags: Reasoning | None = None,
        only_one: bool = False,
    ) -> None:
        """Start in free text or reasoning.

        call      the grammar of the text after the trigger
        trigger   starts a call anywhere in the answer except in its reasoning
        only_one  end the answer with its first call
        """
        state = _State("free" if tags is None else "reasoning" if tags.opened or tags.must else "start")
        super().__init__(call, token_bytes, state)
        self._trigger = trigger.encode()
        self._opens, self._closes = (b"", b"") if tags is None else (tags.opens.encode(), tags.closes.encode())
        self._only_one = only_one

    def fill(self, bitmask_row: np.ndarray) -> bool:
        call = self._state.mask
        return call is not None and call.fill(bitmask_row)

    def _next(self, state: _State, token_id: int) -> tuple[_State, int]:
        call = state.mask
        if call is None:
            return self._next_in_text(state, state.tail + self._token_bytes(token_id))
        call.accept(token_id)
        return (_State("done" if self._only_one else "free") if call.is_done else state), 1

    def _next_in_text(self, state: _State, data: bytes) -> tuple[_State, int]:
        if state.phase == "start":
            said = data.lstrip()
            if self._opens.startswith(said):
                return replace(state, tail=data[-256:]), 0
            state = _State("reasoning" if said.startswith(self._opens) else "free")
        if state.phase == "reasoning":
            tail, rest = _part(data, self._closes)
            if rest is None:
                return _State("reasoning", tail), 0
            data, state = rest, _State("free")
        tail, rest = _part(data, self._trigger)
        if state.phase != "free" or rest is None:
            return replace(state, tail=tail), 0
        call = self._mask.fork()
        taken = call.accept_text(rest) if rest else 0
        # if the token continues with other text, leave what follows to the parser
        return (_State("grammar", mask=call), taken) if taken >= 0 else (_State("free"), 0)

    @property
    def is_done(self) -> bool:
        return self._state.phase == "done"


def _part(data: bytes, needle: bytes) -> tuple[bytes, bytes | None]:
    """Return (the end of the data that may start the needle, the data after the needle or None if it is not found)."""
    _, found, rest = data.partition(needle)
    return data[max(len(data) - len(needle) + 1, 0) :], rest if found else None
