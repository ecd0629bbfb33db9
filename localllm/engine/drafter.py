"""Drafter protocols, and the n-gram drafter (prompt lookup). No torch.

`NgramDrafter` finds an earlier occurrence of the last tokens in the prompt or the answer, and proposes the tokens that
followed it there. Its cost is negligible. A `PaidDrafter`, such as `draft_model`, takes time to compute its drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from localllm.request import MOST_DRAFTS

from .sequence import Sequence

ANY_LENGTH = 1 << 62  # `PaidDrafter.reach` without a limit of its own
LONGEST_MATCH = 32  # tokens; a longer match is no better evidence


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft.

    evidence  length of the match before it, in tokens; a longer match makes the draft more likely to be right
    """

    token_ids: tuple[int, ...]
    evidence: int


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens at no cost, and is called after every step, whether or not its drafts are used."""

    name: str

    def guess(self, sequence: Sequence) -> Guess | None:
        """Draft the continuation of a sequence; None if there is no match."""


@runtime_checkable
class PaidDrafter(Protocol):
    """Proposes tokens at a cost, and is called only when that is expected to pay off."""

    name: str
    deep: int  # draft tokens per sequence in mode "always"
    at_once: bool  # one round drafts all tokens of a sequence, not one
    reach: int  # longest sequence that it drafts for, in tokens
    share: float  # assumed cost of a round, as a fraction of a step's time, until measured

    @property
    def kept_bytes(self) -> int:
        """Bytes of its state for sequences, used or not."""

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[tuple[int, ...]]:
        """Draft at most `counts` tokens for each sequence; empty if it cannot."""


@dataclass(slots=True)
class _NgramIndex:
    """Index of a sequence: where each bigram and trigram last ended."""

    pairs: dict[tuple[int, int], int] = field(default_factory=dict)
    triples: dict[tuple[int, int, int], int] = field(default_factory=dict)
    known: int = 0  # tokens already indexed
    source: int = -1  # position of the current match's continuation; -1 for none
    matched: int = 0  # length of the match before `source`

    def read(self, ids: list[int]) -> None:
        """Index all tokens but the last, which has no continuation yet."""
        new = ids[max(0, self.known - 3) : -1]
        after = len(ids) - len(new) + 1  # the position after the first bigram
        self.pairs.update(zip(zip(new, new[1:], strict=False), range(after, len(ids)), strict=True))
        threes = zip(new, new[1:], new[2:], strict=False)
        self.triples.update(zip(threes, range(after + 1, len(ids)), strict=False))
        self.known = len(ids)


class NgramDrafter:
    """Drafts the tokens that followed an earlier occurrence of the last ones. For edits, this is most of the answer."""

    name = "n-gram"

    def guess(self, sequence: Sequence) -> Guess | None:
        """Draft from the latest occurrence of the last trigram or bigram, and stay with a match while it is right."""
        ids = sequence.token_ids
        places: _NgramIndex | None = sequence.places
        if places is None:
            places = sequence.places = _NgramIndex()
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
            matched = _match_length(ids, source) if source >= 0 else 0
        places.source, places.matched = source, matched
        if source < 0:
            return None
        found = ids[source : source + MOST_DRAFTS]
        while len(found) < MOST_DRAFTS:  # the continuation reaches the end of the text: repeat it cyclically
            found += found[: MOST_DRAFTS - len(found)]
        return Guess(tuple(found), matched)


def _match_length(ids: list[int], source: int) -> int:
    """Number of tokens before `source` that equal the last ones, at most LONGEST_MATCH."""
    end = len(ids)
    most = min(source, LONGEST_MATCH)
    return next((n for n in range(most) if ids[source - 1 - n] != ids[end - 1 - n]), most)
