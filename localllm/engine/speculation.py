"""How many guessed tokens a step checks: as many as pay. Plain numbers, no torch.

A guess of a `Drafter` goes behind a sequence's last token, and the model computes all of it in one step. Every row is
sampled as it would be without guesses, with its own mask, penalties and random number; where the token is the guessed
one, the next row counts, too. So an answer's tokens are the same with guesses and without: only the number of steps
changes, and what decides it may depend on time.

What pays is measured: how often guesses with as much evidence were right, which is seen whether or not they were
checked, against how long steps with so many rows took, and how long a `PaidDrafter` took to guess. What does not pay is
not done, and tried again now and then. Of several drafters a step takes the one that is expected to win most.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .drafter import Drafter, Guess, PaidDrafter
from .scheduler import Step
from .sequence import Sequence

Mode = Literal["auto", "always"]
AnyDrafter = Drafter | PaidDrafter

EVIDENCE = (3, 4, 6, 9, 17)  # where classes of evidence begin
EXPECTED = (0.25, 0.4, 0.55, 0.7, 0.85, 0.93)  # of each class: how often the next token is right, before it was seen
# the same of one who computes, by how far a token is from the known ones
EXPECTED_PAID = (0.6,) * len(EXPECTED)
# sequences in a step from which on nothing is guessed, rows being dear then: eight streams of smollm2 on two cores
# answered 9 % slower with guesses that were expected to pay
CROWD = 8
TRUST = 4.0  # tokens that what is known so far counts as, for a new sequence
FORGET = 64.0  # tokens of a class that are remembered: older ones fade
LEAST_CHANCE = 0.05  # guesses less likely to be reached are not looked at
GAIN = 1.03  # tokens a second that a step with guesses must be expected to win
SLOWER = {"cpu": 0.15, "cuda": 0.03}  # share of a step that one more row takes, before it was measured
NEWEST = 0.2  # weight of the latest step in a mean time
FADE = 0.995  # of the time of a kind of step, whenever it kept guesses from being checked
DEEPEST = 8  # tokens that are bought for a sequence at most
REST, LONGEST_REST = 32, 1024  # steps until one who does not pay is tried again: twice as many each time
PLAIN_EVERY = 64  # steps with bought guesses until a plain one shows what they save


class Rates:
    """How often a guessed token was right, by class of evidence."""

    def __init__(self, before: Rates | None = None, expected: Many[float] = EXPECTED) -> None:
        """A fresh sequence starts from what is known of the others."""
        rates: Iterable[float] = (
            expected if before is None else [r / n for r, n in zip(before.right, before.seen, strict=True)]
        )
        self.seen: list[float] = [TRUST] * len(EXPECTED)
        self.right: list[float] = [TRUST * rate for rate in rates]

    def count(self, evidence: int, is_right: bool) -> None:
        """One guessed token turned out right or wrong."""
        kind = bisect_right(EVIDENCE, evidence)
        if self.seen[kind] >= FORGET:
            self.seen[kind] /= 2
            self.right[kind] /= 2
        self.seen[kind] += 1
        self.right[kind] += is_right

    def chances(self, guess: Guess, most: int) -> list[float]:
        """For each token of a guess, the chance that it and all before it are right; until it is too small."""
        chance, found = 1.0, []
        for evidence in range(guess.evidence, guess.evidence + min(most, len(guess.token_ids))):
            kind = bisect_right(EVIDENCE, evidence)
            chance *= self.right[kind] / self.seen[kind]
            if chance < LEAST_CHANCE:
                break
            found.append(chance)
        return found


def _newer(means: dict[Any, float | None], kind: Any, seconds: float) -> None:
    """Take a time into the mean of its kind; of the first one only that there was one."""
    mean = means.get(kind)
    if mean is None:
        means[kind] = seconds if kind in means else None
    else:
        means[kind] = mean + NEWEST * (min(seconds, 2 * mean) - mean)


class StepTimes:
    """Mean seconds of steps that decode: plain ones by sequences, those with guesses by rows."""

    def __init__(self, slower: float) -> None:
        self._slower = slower
        # the first of a kind compiles kernels, or touches memory first: it does not count
        self._means: dict[tuple[bool, int], float | None] = {}

    def note(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        _newer(self._means, self._kind(num_sequences, num_drafts), seconds)

    @staticmethod
    def _kind(num_sequences: int, num_drafts: int) -> tuple[bool, int]:
        rows = num_sequences + num_drafts
        return bool(num_drafts), rows if not num_drafts or rows < 5 else 5 + (rows - 5) // 4 * 4

    def mean(self, num_sequences: int, num_drafts: int = 0) -> float | None:
        """Seconds of such a step, None before it was measured."""
        return self._means.get(self._kind(num_sequences, num_drafts))

    def cost(self, num_sequences: int, num_drafts: int) -> float:
        """How much longer than a plain step one with so many guesses takes: measured, or from the nearest that was."""
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
        """Times of steps with guesses are doubted a little more."""
        for kind, mean in self._means.items():
            if kind[0] and mean is not None:
                self._means[kind] = mean * FADE


@dataclass(slots=True)
class _Guessed:
    """What stands for one sequence: the guess of what follows its tokens, and how good its guesses were."""

    rates: Rates
    guess: Guess | None = None


class _Chance(NamedTuple):
    """That a guessed token is right with all before it."""

    chance: float
    place: int  # of its sequence in the step
    depth: int  # 1 for the first guess


class _Source:
    """A drafter: how good its guesses are, and what a round of them takes."""

    def __init__(self, drafter: AnyDrafter) -> None:
        self.name = drafter.name
        self.paid: PaidDrafter | None = drafter if isinstance(drafter, PaidDrafter) else None
        self.free: Drafter | None = drafter if isinstance(drafter, Drafter) else None
        assert self.paid or self.free, f"{drafter!r} is no drafter"
        self.rates = Rates(expected=EXPECTED if self.paid is None else EXPECTED_PAID)
        self.rest, self.rested = REST, 0  # steps that it is to rest where it does not pay, and has rested
        # seconds of a round (a token for each of so many); the first caught up with prompts: it does not count
        self.rounds: dict[int, float | None] = {}

    def known(self, sequence: Sequence) -> _Guessed:
        if sequence.speculation is None:
            sequence.speculation = {}
        of_name: dict[str, _Guessed] = sequence.speculation
        if self.name not in of_name:
            of_name[self.name] = _Guessed(Rates(self.rates))
        return of_name[self.name]

    def judge(self, known: _Guessed, tokens: list[int]) -> None:
        """See whether the tokens that came were guessed."""
        if known.guess is None:
            return
        for number, (token, guessed) in enumerate(zip(tokens, known.guess.token_ids, strict=False)):
            for rates in (known.rates, self.rates):
                rates.count(known.guess.evidence + number, guessed == token)
            if guessed != token:
                break

    def chances(self, sequence: Sequence, room: int, always: int) -> list[float]:
        """Of the next tokens' guesses to be right; `always`: so many are certain, where nobody asks whether it pays."""
        known = self.known(sequence)
        guess = Guess((0,) * DEEPEST, 0) if self.paid is not None else known.guess
        if guess is None:
            return []
        if always:
            deep = self.paid.deep if self.paid is not None else len(guess.token_ids)
            return [1.0] * min(room, deep, always)
        return known.rates.chances(guess, room)

    def share(self, num_sequences: int, plain: float | None) -> float:
        """Of a plain step's time, what a round takes."""
        if self.paid is None:
            return 0.0
        measured = {count: mean for count, mean in self.rounds.items() if mean is not None}
        if plain is None or not measured:
            return self.paid.share
        return measured[min(measured, key=lambda count: abs(count - num_sequences))] / plain

    def buy(self, sequences: Many[Sequence], counts: Many[int]) -> None:
        """Have so many tokens of each sequence guessed."""
        assert self.paid is not None
        started = time.monotonic()
        found = self.paid.propose(sequences, counts)
        seconds = time.monotonic() - started
        for sequence, ids in zip(sequences, found, strict=True):
            self.known(sequence).guess = Guess(ids, 0) if ids else None
        if all(len(ids) == count for ids, count in zip(found, counts, strict=True)):  # else it was catching up
            _newer(self.rounds, sum(map(bool, counts)), seconds / max(counts))

    def fade(self) -> None:
        """What a round takes is doubted a little more."""
        for count, mean in self.rounds.items():
            self.rounds[count] = mean and mean * FADE


class _Wish(NamedTuple):
    """What a step is to check: so many tokens of each of its parts."""

    source: _Source
    counts: list[int]
    is_trial: bool = False  # of one that rested, to see whether it pays by now


class Speculation:
    """Guesses for the sequences of an engine.

    drafters  who guesses; `name` says who did last
    mode      always: every guess is checked, for tests and comparisons; auto: what pays
    device    cpu | cuda
    goes_back whether a wrong guess takes the right ones before it along: they are read again in the next step
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
        self._asked_s = 0.0  # what guessing took before the present step

    @property
    def kept_bytes(self) -> int:
        """Bytes that drafters keep of sequences."""
        return sum(source.paid.kept_bytes for source in self._sources if source.paid is not None)

    def learn(self, sequence: Sequence, num_new: int) -> None:
        """Its last `num_new` tokens are new: see whether they were guessed, and guess what follows."""
        if not num_new:
            return
        rests = sequence.finish_reason is not None or self._is_crowded
        for source in self._sources:
            known = source.known(sequence)
            source.judge(known, sequence.token_ids[-num_new:])
            known.guess = None if rests or source.free is None else source.free.guess(sequence)

    def wants(self, step: Step, most: int) -> bool:
        """Whether guesses would go into the step after this one, as far as that can be told."""
        return self._wish(step, most) is not None

    def choose(self, step: Step, most: int) -> list[tuple[int, ...]]:
        """For each part of a step the guessed tokens to check, at most `most` in all; nothing in one with a prompt."""
        self._asked_s = 0.0
        wish = self._wish(step, most)
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

    def _wish(self, step: Step, most: int) -> _Wish | None:
        """Whose guesses, and how many of them, make most tokens a second; None where none do."""
        parts, always = step.scheduled, self.mode == "always"
        if not all(part.is_last_chunk and part.sequence.num_output_tokens for part in parts):
            return None
        found, best, trial = None, len(parts) * GAIN, None
        for source in self._sources:
            if source.paid is not None and not always and not self._may_buy(len(parts)):
                continue
            chances: list[_Chance] = []
            for place, part in enumerate(parts):
                sequence = part.sequence
                room = min(most, sequence.max_tokens - sequence.num_output_tokens - 1)
                hopes = source.chances(sequence, room, most // len(parts) if always else 0)
                chances += [_Chance(chance, place, depth) for depth, chance in enumerate(hopes, 1)]
            if not chances:
                continue
            chances.sort(key=lambda one: -one.chance)
            del chances[most:]
            count, rate = self._worth(source, chances, len(parts))
            if count and rate > best:
                found, best = _Wish(source, _counts(chances[:count], len(parts))), rate
            elif source.paid is not None and source.rested >= source.rest:
                first = [one for one in chances if one.depth == 1]
                trial = _Wish(source, _counts(first, len(parts)), is_trial=True)
        return found or trial

    def _may_buy(self, num_sequences: int) -> bool:
        """Not for a crowd, nor before it was seen what a plain step takes, and again now and then."""
        is_known = self._times.mean(num_sequences) is not None
        return is_known and not self._is_crowded and self._since_plain < PLAIN_EVERY

    def _worth(self, source: _Source, chances: list[_Chance], num_sequences: int) -> tuple[int, float]:
        """How many of the guesses, the most likely first, make most tokens in a plain step's time; and how many."""
        if self.mode == "always":
            return len(chances), float("inf")
        share = source.share(num_sequences, self._times.mean(num_sequences))
        best, best_rate, wanted = 0, num_sequences * GAIN, False
        tokens, deepest = float(num_sequences), 0
        for count, one in enumerate(chances, 1):
            tokens, deepest = tokens + one.chance, max(deepest, one.depth)
            cost = self._times.cost(num_sequences, count)
            again = (1 - one.chance) * (cost - 1) if self._goes_back else 0.0
            rate = tokens / (cost + again + deepest * share)
            if rate > best_rate:
                best, best_rate = count, rate
            wanted = wanted or one.chance > 0.5
        if not best and wanted:  # time alone speaks against them: perhaps no longer
            self._times.fade()
            source.fade()
        return best, best_rate

    def times_of(self, num_sequences: int, num_drafts: int) -> tuple[float | None, float | None]:
        """Mean seconds of a step with so many guesses, and of a round of the last drafter; None where not measured."""
        return self._times.mean(num_sequences, num_drafts), self._sources[-1].rounds.get(num_sequences)

    def note(self, step: Step, seconds: float) -> None:
        """How long a step took, guessing included."""
        self._is_crowded = self.mode == "auto" and len(step.scheduled) >= CROWD
        num_drafts = sum(len(part.drafts) for part in step.scheduled)
        self._since_plain = self._since_plain + 1 if num_drafts else 0
        for source in self._sources:
            source.rested += 1
        if all(part.start >= part.sequence.num_prompt_tokens and part.num_known == 1 for part in step.scheduled):
            self._times.note(len(step.scheduled), num_drafts, seconds - self._asked_s)
        self._asked_s = 0.0


def _counts(chances: list[_Chance], num_parts: int) -> list[int]:
    counts = [0] * num_parts
    for one in chances:
        counts[one.place] += 1
    return counts
