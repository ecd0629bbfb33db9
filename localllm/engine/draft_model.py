"""Drafts by a smaller model with the same vocabulary, greedily, for all sequences of a step at once.

It has its own pages with a prefix tree, and follows a sequence only when asked for a draft: it discards what it
computed for rejected tokens, then catches up on missing ones (a prompt, tokens not drafted), a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

from localllm.request import CATCH_UP, Request, SamplingParams

from .drafter import ANY_LENGTH
from .pages import Pages, Slots
from .runner import Runner
from .scheduler import Scheduled, Step
from .sequence import Sequence, SequenceState

QUIET = SamplingParams(temperature=0)


@dataclass(slots=True)
class _Shadow:
    """The draft model's copy of a sequence.

    own     the sequence's tokens followed by drafts, in the draft model's pages
    agreed  number of tokens shared with the sequence at the last update
    kept    slot of the states after those tokens, while drafts are computed in another slot
    """

    sequence: Sequence
    own: Sequence
    agreed: int = 0
    kept: int = -1
    is_out: bool = False  # contains a token outside the draft model's vocabulary


class DraftModel:
    """A `PaidDrafter` with its own model, cache and pages.

    num_pages      pages per cache group of the draft model
    num_sequences  most sequences it follows at once; with recurrent layers, the cache has twice as many slots
    max_context    maximum context of the draft model
    vocab_size     vocabulary of the target model; only lower ids may be drafted
    """

    name = "draft"
    deep = 4
    at_once = False
    reach = ANY_LENGTH

    def __init__(
        self, runner: Runner, num_pages: Many[int], num_sequences: int, max_context: int, vocab_size: int, share: float
    ) -> None:
        self.runner = runner
        self.share = share
        cache = runner.cache
        self._keeps_states = bool(cache.num_slots)
        slots = Slots(num_sequences, cache.copy_slot) if self._keeps_states else None
        windows = [group.window for group in cache.groups]
        self.pages = Pages(num_pages, windows, cache.page_size, not self._keeps_states, slots)
        self._num_sequences = num_sequences
        self.max_context = max_context
        self._known_ids, self._vocab_size = runner.vocab_size, vocab_size
        self._shadows: dict[int, _Shadow] = {}  # by sequence number, least recently used first

    @property
    def kept_bytes(self) -> int:
        """Bytes of all its pages and slots, used or not."""
        return self.runner.cache.nbytes

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[tuple[int, ...]]:
        """Draft greedily; empty for sequences that it has not caught up with."""
        for shadow in [s for s in self._shadows.values() if s.sequence.state is SequenceState.FINISHED]:
            self._sync(shadow)  # so that its tree has the prefix of the next turn
            self._drop(shadow)
        shadows = [self._shadow_of(sequence) for sequence in sequences]
        wanted = {id(s): count for s, count in zip(shadows, counts, strict=True) if count and not s.is_out}
        self._draft_tokens(list(self._admitted(shadows, wanted)), wanted)
        return [tuple(shadow.own.token_ids[shadow.agreed :]) for shadow in shadows]

    def _shadow_of(self, sequence: Sequence) -> _Shadow:
        shadow = self._shadows.pop(sequence.number, None)
        if shadow is None:
            request = Request(list(sequence.token_ids), QUIET, cache_salt=sequence.request.cache_salt)
            shadow = _Shadow(sequence, Sequence(request, 0, len(self.pages.pools), 0, 0))
            self.pages.attach_prefix(shadow.own)
        self._shadows[sequence.number] = shadow  # most recently used last
        self._sync(shadow)
        return shadow

    def _sync(self, shadow: _Shadow) -> None:
        """Update a shadow to the sequence's present tokens, discarding what was computed for rejected ones."""
        own, ids, at = shadow.own, shadow.sequence.token_ids, shadow.agreed
        while at < min(len(ids), own.num_tokens) and ids[at] == own.token_ids[at]:
            at += 1
        own.token_ids[at:] = ids[at:]
        own.num_computed_tokens = min(own.num_computed_tokens, at)
        shadow.is_out = shadow.is_out or max(ids[shadow.agreed :], default=0) >= self._known_ids
        shadow.agreed = len(ids)
        self.pages.trim(own)
        self.pages.commit(own)

    def _admitted(self, shadows: list[_Shadow], wanted: dict[int, int]) -> Iterator[tuple[_Shadow, int]]:
        """The shadows that fit, each with its tokens in the first pass, at most CATCH_UP in total."""
        left = CATCH_UP
        for shadow in sorted(shadows, key=lambda one: one.own.num_uncomputed_tokens):
            own = shadow.own
            count = min(own.num_uncomputed_tokens, left)
            if id(shadow) not in wanted or not count:
                continue
            end = own.num_tokens + wanted[id(shadow)]
            if end > self.max_context or not self._has_room(own, end, shadows):
                continue
            left -= count
            yield shadow, count

    def _has_room(self, own: Sequence, end: int, asked: list[_Shadow]) -> bool:
        """Allocate a slot and pages for `end` tokens, dropping shadows not in `asked` if needed; False if too few."""
        others = [shadow for shadow in self._shadows.values() if shadow not in asked]
        while not (self.pages.take_slot(own) and self.pages.extend(own, end)):
            if not others:
                return False
            self._drop(others.pop(0))
        return True

    def _draft_tokens(self, parts: list[tuple[_Shadow, int]], wanted: dict[int, int]) -> None:
        """Catch up, then draft one token after another."""
        aside: list[_Shadow] = []
        while parts:
            step = Step([Scheduled(shadow.own, shadow.own.num_computed_tokens, count) for shadow, count in parts])
            output = self.runner.forward(step)
            ready = [s for (s, _), part in zip(parts, step.scheduled, strict=True) if part.is_last_chunk]
            for shadow, count in parts:
                shadow.own.num_computed_tokens += count
            rows = list(range(len(ready)))
            best = (output.best(rows) or output.logits(rows).argmax(-1).tolist()) if ready else []
            if self._keeps_states and not aside:
                aside = ready
                self._use_scratch_slots(aside)
            parts = []
            for shadow, token in zip(ready, best, strict=True):
                if not 0 <= token < self._vocab_size:
                    continue
                shadow.own.token_ids.append(token)
                if shadow.own.num_tokens - shadow.agreed < wanted[id(shadow)]:
                    parts.append((shadow, 1))
        for shadow in aside:  # restore the states from before the drafts, which cannot be rolled back
            shadow.own.slot = shadow.kept
            shadow.own.num_computed_tokens = shadow.agreed

    def _use_scratch_slots(self, shadows: list[_Shadow]) -> None:
        """Compute drafts on copies of the states."""
        for number, shadow in enumerate(shadows, self._num_sequences):
            shadow.kept = shadow.own.slot
            self.runner.cache.copy_slot(shadow.kept, number)
            shadow.own.slot = number

    def _drop(self, shadow: _Shadow) -> None:
        self.pages.release(shadow.own)
        del self._shadows[shadow.sequence.number]
