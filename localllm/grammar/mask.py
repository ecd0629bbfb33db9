"""`GrammarMask`, a `request.TokenMask` over llguidance: a grammar for a whole answer.

Made by `compiler.py`; called in the engine's thread. llguidance releases the GIL while it computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from localllm.errors import ConstraintUnmet

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_HINT = "simplify the schema or grammar"


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens for llguidance, with sets of special ids."""

    backend: LLTokenizer
    width: int  # number of logits; all ids are below it
    special_ids: frozenset[int]  # never part of constrained text
    end_ids: frozenset[int]  # tokens that end an answer
    line_end_ids: frozenset[int]  # tokens that consist only of line ends

    def bits(self, ids: Iterable[int]) -> np.ndarray:
        """Bitmask int32 [ceil(width / 32)] with these ids set."""
        flags = np.zeros(-(-self.width // 32) * 32, dtype=np.uint8)
        flags[[i for i in ids if i < self.width]] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)

    @cached_property
    def no_control(self) -> np.ndarray:
        """All ids except control tokens that do not end an answer."""
        return ~self.bits(self.special_ids - self.end_ids)

    @cached_property
    def no_end(self) -> np.ndarray:
        """All valid ids except those that end an answer."""
        return self.bits(set(range(self.width)) - self.end_ids)

    @cached_property
    def line_ends(self) -> np.ndarray:
        """The ids of tokens that consist only of line ends."""
        return self.bits(self.line_end_ids)


class GrammarMask:
    """A grammar for a whole answer."""

    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, *, strips: bool = False, ended: bool = False
    ) -> None:
        """`strips`: forbid control tokens even if the grammar names them."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._strips = strips
        self._ended = ended

    def fill(self, bitmask_row: np.ndarray) -> bool:
        self._matcher.unsafe_compute_mask_ptr(bitmask_row.ctypes.data, bitmask_row.nbytes)
        if self._matcher.is_error():
            raise self._failed()
        if self._strips:
            bitmask_row &= self._vocabulary.no_control
        if not bitmask_row.any():
            raise ConstraintUnmet("the grammar allows no token at this position", _HINT)
        return True

    def accept(self, token_id: int) -> None:
        if token_id in self._vocabulary.end_ids and self._matcher.is_accepting():
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token_id):
            raise self._failed()

    def allows(self, token_id: int) -> bool:
        return not self._ended and self._matcher.validate_tokens([token_id]) == 1

    def accept_text(self, text: bytes) -> int:
        """Advance past some text. Returns the number of ids for `rollback`, or -1 if the grammar rejects the text."""
        ids = self._vocabulary.backend.tokenize_bytes(text)
        if self._matcher.validate_tokens(ids) < len(ids):
            return -1
        self._matcher.consume_tokens(ids)
        return len(ids)

    def jump_forward(self, last: int | None = None) -> list[int]:
        following = [] if self.is_done else self._matcher.compute_ff_tokens()
        if last is None:
            return following
        return (self._retokenized(last) if following else None) or [last, *following]

    def _retokenized(self, last: int) -> list[int] | None:
        """The last id and the forced text after it, tokenized together; None if that starts with the same id anyway."""
        if last in self._vocabulary.special_ids:
            return None
        backend = self._vocabulary.backend
        text = backend.decode_bytes([last])
        ids, _ = backend.tokenize_partial(text + self._matcher.compute_ff_bytes())
        if not ids or ids[0] == last or len(backend.decode_bytes(ids)) < len(text):
            return None
        before = self._matcher.deep_copy()
        before.rollback(1)
        return ids if before.validate_tokens(ids) == len(ids) else None

    @property
    def is_done(self) -> bool:
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def fork(self) -> GrammarMask:
        return GrammarMask(self._matcher.deep_copy(), self._vocabulary, strips=self._strips, ended=self._ended)

    def rollback(self, count: int) -> None:
        if self._ended and count:
            self._ended, count = False, count - 1
        if count and not self._matcher.rollback(count):
            raise self._failed()

    def _failed(self) -> ConstraintUnmet:
        why = self._matcher.get_error().split("<state>")[0].split("\n")[0][:160]
        return ConstraintUnmet(f"the grammar cannot continue: {why or 'the text is at its end'}", _HINT)
