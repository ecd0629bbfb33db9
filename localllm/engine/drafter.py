"""`Drafter`: guesses what comes next in an answer, for the model to check many tokens at once. No torch.

The one in this file knows no language: it looks where the last tokens stood before, in the prompt or in the answer, and
proposes what followed them there. Its guesses take no time worth counting. A `PaidDrafter` computes: `draft_model`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from .sequence import Sequence

MOST_DRAFTS = 32  # tokens proposed in one step, over all sequences
LONGEST_MATCH = 32  # tokens: a longer one tells no more


@dataclass(frozen=True, slots=True)
class Guess:
    """What may come next.

    evidence  how much speaks for it: how many tokens before it are the same as where it was found
    """

    token_ids: tuple[int, ...]
    evidence: int


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; it may be wrong, and is asked after every step, whether its guesses are used or not."""

    name: str

    def guess(self, sequence: Sequence) -> Guess | None:
        """What may follow the tokens that `sequence` has now."""


@runtime_checkable
class PaidDrafter(Protocol):
    """Proposes tokens, and takes time for it: it is asked where that is expected to pay."""

    name: str
    deep: int  # tokens bought of it where nobody asks whether they pay
    share: float  # of a step's time that one more token of every sequence takes, before it was measured

    @property
    def kept_bytes(self) -> int:
        """Bytes of what it keeps of sequences, used or not."""

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[tuple[int, ...]]:
        """What may follow the tokens of each sequence: at most so many, none where it cannot tell."""


@dataclass(slots=True)
class _Places:
    """Where each two and each three successive tokens of a sequence end, the last time they came."""

    pairs: dict[tuple[int, int], int] = field(default_factory=dict)
    triples: dict[tuple[int, int, int], int] = field(default_factory=dict)
    known: int = 0  # tokens that were looked at
    source: int = -1  # where the last guess was read, less what came since
    matched: int = 0  # tokens before `source` that equal the last ones

    def read(self, ids: list[int]) -> None:
        """Enter what has a successor: all tokens but the last."""
        new = ids[max(0, self.known - 3) : -1]
        after = len(ids) - len(new) + 1  # the place behind the first two of them
        self.pairs.update(zip(zip(new, new[1:], strict=False), range(after, len(ids)), strict=True))
        threes = zip(new, new[1:], new[2:], strict=False)
        self.triples.update(zip(threes, range(after + 1, len(ids)), strict=False))
        self.known = len(ids)


class NgramDrafter:
    """What followed the last tokens where they stood before: in an edit, most of the answer."""

    name = "n-gram"

    def guess(self, sequence: Sequence) -> Guess | None:
        """The text behind the last place of the longest match that was found; a place that goes on well is kept."""
        ids = sequence.token_ids
        places: _Places | None = sequence.places
        if places is None:
            places = sequence.places = _Places()
        before, count = places.known, len(ids)
        source, matched = places.source, places.matched
        for token in ids[before:] if source >= 0 else ():
            if ids[source] != token:
                source = -1
                break
            source, matched = source + 1, min(matched + 1, LONGEST_MATCH)
        places.read(ids)
        if source < 0 and count >= 3:
            source = places.triples.get((ids[-3], ids[-2], ids[-1]), -1)
            if source < 0:
                source = places.pairs.get((ids[-2], ids[-1]), -1)
            matched = _matched(ids, source) if source >= 0 else 0
        places.source, places.matched = source, matched
        if source < 0:
            return None
        found = ids[source : source + MOST_DRAFTS]
        while len(found) < MOST_DRAFTS:  # it reaches the end: what repeats goes round
            found += found[: MOST_DRAFTS - len(found)]
        return Guess(tuple(found), matched)


def _matched(ids: list[int], source: int) -> int:
    """How many tokens before `source` equal the last ones, at most LONGEST_MATCH."""
    end = len(ids)
    most = min(source, LONGEST_MATCH)
    return next((n for n in range(most) if ids[source - 1 - n] != ids[end - 1 - n]), most)
