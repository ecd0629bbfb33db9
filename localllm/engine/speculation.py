"""Speculative decoding: decides how many draft tokens each step verifies. Plain numbers, no torch.

A draft is appended to a sequence's last token, and the model computes all of it in one step. Every row is sampled as it
would be without drafts, with its own mask, penalties and random number; while the sampled token equals the draft token,
the next row counts as well. So drafts never change an answer's tokens, only the number of steps, and this number may
depend on timing.

Whether drafts pay off is measured: how often drafts with similar evidence were right (observed even if they were not
verified), how long steps with that many rows took, and how long a `PaidDrafter` took. What does not pay off is skipped
and retried from time to time. If there are several drafters, a step uses the one with the highest expected gain.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from localllm.request import CROWD

from .drafter import Drafter, Guess, PaidDrafter
from .scheduler import Step
from .sequence import Sequence

Mode = Literal["auto", "always"]
AnyDrafter = Drafter | PaidDrafter

EVIDENCE = (3, 4, 6, 9, 17)  # lower bounds of the evidence classes
EXPECTED = (0.25, 0.4, 0.55, 0.7, 0.85, 0.93)  # prior acceptance rate per evidence class
# the same for paid drafters, whose classes are distances from the last known token
EXPECTED_PAID = (0.6,) * len(EXPECTED)
TRUST = 4.0  # weight of the prior for a new sequence, in tokens
FORGET = 64.0  # tokens per class after which older observations are halved
LEAST_CHANCE = 0.05  # draft tokens less likely to be accepted are not considered
GAIN = 1.03  # factor in tokens per second that drafts must be expected to gain
SLOWER = {"cpu": 0.15, "cuda": 0.03}  # assumed cost of one more row, as a fraction of a step, until measured
NEWEST = 0.2  # weight of the latest step in a mean
FADE = 0.995  # factor applied to the measured times of steps whenever they prevented drafts, so that they are retried
DEEPEST = 8  # most draft tokens per sequence from a paid drafter, unless it drafts more by itself
REST, LONGEST_REST = 32, 1024  # steps until a drafter that does not pay off is retried; doubles up to the second value
PLAIN_EVERY = 64  # steps with paid drafts until a plain step updates the baseline


class Rates:
    """Acceptance rates of draft tokens by evidence class."""

    def __init__(self, before: Rates | None = None, expected: Many[float] = EXPECTED) -> None:
        """Start from the rates of other sequences (`before`), or from the prior."""
        rates: Iterable[float] = (
            expected if before is None else [r / n for r, n in zip(before.right, before.seen, strict=True)]
        )
        self.seen: list[float] = [TRUST] * len(EXPECTED)
        self.right: list[float] = [TRUST * rate for rate in rates]

    def count(self, evidence: int, is_right: bool) -> None:
        """Count one draft token as right or wrong."""
        kind = bisect_right(EVIDENCE, evidence)
        if self.seen[kind] >= FORGET:
            self.seen[kind] /= 2
            self.right[kind] /= 2
        self.seen[kind] += 1
        self.right[kind] += is_right

    def chances(self, guess: Guess, most: int) -> list[float]:
        """For each token of a draft, the probability that it and all before it are right, down to LEAST_CHANCE."""
        chance, found = 1.0, []
        for evidence in range(guess.evidence, guess.evidence + min(most, len(guess.token_ids))):
            kind = bisect_right(EVIDENCE, evidence)
            chance *= self.right[kind] / self.seen[kind]
            if chance < LEAST_CHANCE:
                break
            found.append(chance)
        return found


def _update_mean(means: dict[Any, float | None], kind: Any, seconds: float) -> None:
    """Update the mean of a kind with a new time. The very first time is ignored."""
    mean = means.get(kind)
    if mean is None:
        means[kind] = seconds if kind in means else None
    else:
        means[kind] = mean + NEWEST * (min(seconds, 2 * mean) - mean)


class StepTimes:
    """Mean times of decode steps: plain ones by number of sequences, verification steps by number of rows."""

    def __init__(self, slower: float) -> None:
        self._slower = slower
        # the first step of a kind does not count, because it may compile kernels or touch new memory
        self._means: dict[tuple[bool, int], float | None] = {}

    def note(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        _update_mean(self._means, self._kind(num_sequences, num_drafts), seconds)

    @staticmethod
    def _kind(num_sequences: int, num_drafts: int) -> tuple[bool, int]:
        rows = num_sequences + num_drafts
        return bool(num_drafts), rows if not num_drafts or rows < 5 else 5 + (rows - 5) // 4 * 4

    def mean(self, num_sequences: int, num_drafts: int = 0) -> float | None:
        """Mean seconds of such a step; None if not measured."""
        return self._means.get(self._kind(num_sequences, num_drafts))

    def cost(self, num_sequences: int, num_drafts: int) -> float:
        """Time of a step with this many draft tokens relative to a plain step, measured or extrapolated."""
        if num_drafts == 0:
            return 1.0
        plain = self.mean(num_sequences)
        _, rows = kind = self._kind(num_sequences, num_drafts)
        measured = [k[1] for k, mean in self._means.items() if k[0] and mean is not None]
        if plain is None or not measured:
            return self._line(num_sequences + num_drafts) / self._line(num_sequences)
        near = min(measured, key=lambda one: abs(one - rows))
        mean = self._means[True, near]
        assert mean is not None
        return mean / plain * (1.0 if near == kind[1] else self._line(rows) / self._line(near))

    def _line(self, rows: int) -> float:
        return 1 + self._slower * (rows - 1)

    def fade(self) -> None:
        """Lower the measured times of verification steps a little, so that they are eventually retried."""
        for kind, mean in self._means.items():
            if kind[0] and mean is not None:
                self._means[kind] = mean * FADE


@dataclass(slots=True)
class _Draft:
    """Per sequence and drafter: the current draft, and its acceptance rates."""

    rates: Rates
    guess: Guess | None = None


class _Chance(NamedTuple):
    """The probability that a draft token and all before it are right."""

    chance: float
    place: int  # index of its sequence in the step
    depth: int  # 1 for the first draft token


class _Source:
    """A drafter with its acceptance rates and its measured cost."""

    def __init__(self, drafter: AnyDrafter) -> None:
        self.name = drafter.name
        self.paid: PaidDrafter | None = drafter if isinstance(drafter, PaidDrafter) else None
        self.free: Drafter | None = drafter if isinstance(drafter, Drafter) else None
        assert self.paid or self.free, f"{drafter!r} is not a drafter"
        self.rates = Rates(expected=EXPECTED if self.paid is None else EXPECTED_PAID)
        self.rest, self.rested = REST, 0  # steps to rest while it does not pay off, and steps rested
        # number of sequences -> seconds of a round; the first, which includes catching up, is ignored
        self.rounds: dict[int, float | None] = {}

    def known(self, sequence: Sequence) -> _Draft:
        if sequence.speculation is None:
            sequence.speculation = {}
        of_name: dict[str, _Draft] = sequence.speculation
        if self.name not in of_name:
            of_name[self.name] = _Draft(Rates(self.rates))
        return of_name[self.name]

    def judge(self, known: _Draft, tokens: list[int]) -> None:
        """Compare new tokens with the draft, and update the acceptance rates."""
        if known.guess is None:
            return
        for number, (token, guessed) in enumerate(zip(tokens, known.guess.token_ids, strict=False)):
            for rates in (known.rates, self.rates):
                rates.count(known.guess.evidence + number, guessed == token)
            if guessed != token:
                break

    def chances(self, sequence: Sequence, room: int, always: int) -> list[float]:
        """Acceptance probabilities of the next draft tokens. In mode "always", the first `always` count as certain."""
        known = self.known(sequence)
        guess = Guess((0,) * max(DEEPEST, self.paid.deep), 0) if self.paid is not None else known.guess
        if guess is None:
            return []
        if always:
            deep = self.paid.deep if self.paid is not None else len(guess.token_ids)
            return [1.0] * min(room, deep, always)
        return known.rates.chances(guess, room)

    def share(self, num_sequences: int, plain: float | None) -> float:
        """Time of a round as a fraction of a plain step."""
        if self.paid is None:
            return 0.0
        measured = {count: mean for count, mean in self.rounds.items() if mean is not None}
        if plain is None or not measured:
            return self.paid.share
        return measured[min(measured, key=lambda count: abs(count - num_sequences))] / plain

    def buy(self, sequences: Many[Sequence], counts: Many[int]) -> None:
        """Let a paid drafter draft this many tokens for each sequence, and measure the time."""
        assert self.paid is not None
        started = time.monotonic()
        found = self.paid.propose(sequences, counts)
        seconds = time.monotonic() - started
        for sequence, ids in zip(sequences, found, strict=True):
            self.known(sequence).guess = Guess(ids, 0) if ids else None
        if all(len(ids) == count for ids, count in zip(found, counts, strict=True)):  # otherwise it was catching up
            _update_mean(self.rounds, sum(map(bool, counts)), seconds / self.num_rounds(max(counts)))

    def num_rounds(self, depth: int) -> int:
        """Rounds that it takes to draft so many tokens for a sequence."""
        return 1 if self.paid is not None and self.paid.at_once else depth

    def fade(self) -> None:
        """Lower the measured times of rounds a little, as in `StepTimes.fade`."""
        for count, mean in self.rounds.items():
            self.rounds[count] = mean and mean * FADE


class _Choice(NamedTuple):
    """The draft tokens to verify in a step, as a number per part."""

    source: _Source
    counts: list[int]
    is_trial: bool = False  # retries a drafter that rested


class Speculation:
    """Speculative decoding for the sequences of an engine.

    drafters   available drafters; `name` is the one used last
    mode       auto: only drafts that pay off; always: every draft, for tests and comparisons
    device     cpu | cuda
    goes_back  a rejected token also discards the accepted ones before it, which the next step recomputes
    """

    def __init__(
        self,
        drafters: Drafter | PaidDrafter | tuple[Drafter | PaidDrafter, ...],
        mode: Mode = "auto",
        device: str = "cpu",
        goes_back: bool = False,
    ) -> None:
        self.mode = mode
        self._goes_back = goes_back
        self.name = ""
        self._sources = [_Source(one) for one in (drafters if isinstance(drafters, tuple) else (drafters,))]
        self._times = StepTimes(SLOWER[device])
        self._is_crowded = False
        self._since_plain = 0  # steps
        self._asked_s = 0.0  # time of paid drafting before the current step

    @property
    def kept_bytes(self) -> int:
        """Bytes of the drafters' state for sequences."""
        return sum(source.paid.kept_bytes for source in self._sources if source.paid is not None)

    def learn(self, sequence: Sequence, num_new: int) -> None:
        """Learn from the last `num_new` tokens of a sequence, and draft its continuation."""
        if not num_new:
            return
        rests = sequence.finish_reason is not None or self._is_crowded
        for source in self._sources:
            known = source.known(sequence)
            source.judge(known, sequence.token_ids[-num_new:])
            known.guess = None if rests or source.free is None else source.free.guess(sequence)

    def wants(self, step: Step, most: int) -> bool:
        """True if the step after this one would probably verify drafts."""
        return self._best_choice(step, most) is not None

    def choose(self, step: Step, most: int) -> list[tuple[int, ...]]:
        """The draft tokens to verify for each part of a step, at most `most` in total; none in steps with a prefill."""
        self._asked_s = 0.0
        wish = self._best_choice(step, most)
        if wish is None:
            return [()] * len(step.scheduled)
        source, sequences = wish.source, [part.sequence for part in step.scheduled]
        self.name = source.name
        if source.paid is not None:
            started = time.monotonic()
            source.buy(sequences, wish.counts)
            self._asked_s = time.monotonic() - started
            source.rest, source.rested = min(2 * source.rest, LONGEST_REST) if wish.is_trial else REST, 0
        guesses = [source.known(sequence).guess for sequence in sequences]
        return [g.token_ids[:count] if g is not None else () for g, count in zip(guesses, wish.counts, strict=True)]

    def _best_choice(self, step: Step, most: int) -> _Choice | None:
        """The drafter and counts with the most expected tokens per second; None if plain decoding is best."""
        parts, always = step.scheduled, self.mode == "always"
        if not all(part.is_last_chunk and part.sequence.num_output_tokens for part in parts):
            return None
        found, best, trial = None, len(parts) * GAIN, None
        for source in self._sources:
            if source.paid is not None and not always and not self._may_use_paid(len(parts)):
                continue
            chances: list[_Chance] = []
            for place, part in enumerate(parts):
                sequence = part.sequence
                room = min(most, sequence.max_tokens - sequence.num_output_tokens - 1)
                if source.paid is not None and sequence.num_tokens > source.paid.reach:
                    room = 0
                hopes = source.chances(sequence, room, most // len(parts) if always else 0)
                chances += [_Chance(chance, place, depth) for depth, chance in enumerate(hopes, 1)]
            if not chances:
                continue
            chances.sort(key=lambda one: -one.chance)
            del chances[most:]
            count, rate = self._best_count(source, chances, len(parts))
            if count and rate > best:
                found, best = _Choice(source, _counts(chances[:count], len(parts))), rate
            elif source.paid is not None and source.rested >= source.rest:
                first = [one for one in chances if source.paid.at_once or one.depth == 1]
                trial = _Choice(source, _counts(first, len(parts)), is_trial=True)
        return found or trial

    def _may_use_paid(self, num_sequences: int) -> bool:
        """True if paid drafts are allowed: not with many sequences, without a plain baseline, or when one is due."""
        is_known = self._times.mean(num_sequences) is not None
        return is_known and not self._is_crowded and self._since_plain < PLAIN_EVERY

    def _best_count(self, source: _Source, chances: list[_Chance], num_sequences: int) -> tuple[int, float]:
        """(number of draft tokens, most likely first, that maximizes the rate; that rate in tokens per plain step)"""
        if self.mode == "always":
            return len(chances), float("inf")
        share = source.share(num_sequences, self._times.mean(num_sequences))
        best, best_rate, wanted = 0, num_sequences * GAIN, False
        tokens, deepest = float(num_sequences), 0
        for count, one in enumerate(chances, 1):
            tokens, deepest = tokens + one.chance, max(deepest, one.depth)
            cost = self._times.cost(num_sequences, count)
            again = (1 - one.chance) * (cost - 1) if self._goes_back else 0.0
            rate = tokens / (cost + again + source.num_rounds(deepest) * share)
            if rate > best_rate:
                best, best_rate = count, rate
            wanted = wanted or one.chance > 0.5
        if not best and wanted:  # only the measured times prevent likely drafts, and they may be outdated
            self._times.fade()
            source.fade()
        return best, best_rate

    def times_of(self, num_sequences: int, num_drafts: int) -> tuple[float | None, float | None]:
        """(mean seconds of such a step, mean seconds of a round of the last drafter); None if not measured."""
        return self._times.mean(num_sequences, num_drafts), self._sources[-1].rounds.get(num_sequences)

    def note(self, step: Step, seconds: float) -> None:
        """Record the duration of a step, including drafting."""
        self._is_crowded = self.mode == "auto" and len(step.scheduled) >= CROWD
        num_drafts = sum(len(part.drafts) for part in step.scheduled)
        self._since_plain = self._since_plain + 1 if num_drafts else 0
        for source in self._sources:
            source.rested += 1
        if all(part.start >= part.sequence.num_prompt_tokens for part in step.scheduled):
            # tokens that are computed again, or that a grammar forces, take as long as draft tokens
            more = sum(part.num_tokens - 1 for part in step.scheduled)
            self._times.note(len(step.scheduled), more, seconds - self._asked_s)
        self._asked_s = 0.0


def _counts(chances: list[_Chance], num_parts: int) -> list[int]:
    counts = [0] * num_parts
    for one in chances:
        counts[one.place] += 1
    return counts
