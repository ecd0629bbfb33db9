"""How many guessed tokens a step checks: as many as pay. Plain numbers, no torch.

A guess of a `Drafter` goes behind a sequence's last token, and the model computes all of it in one step. Every row is
sampled as it would be without guesses, with its own mask, penalties and random number; where the token is the guessed
one, the next row counts, too. So an answer's tokens are the same with guesses and without: only the number of steps
changes, and what decides it may depend on time.

What pays is measured: how often guesses with as much evidence were right, which is seen whether or not they were
checked, against how long steps with so many rows took. What does not pay is not done, and tried again now and then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from .drafter import Drafter, Guess
from .scheduler import Step
from .sequence import Sequence

Mode = Literal["auto", "always"]

EVIDENCE = (3, 4, 6, 9, 17)  # where classes of evidence begin
EXPECTED = (0.25, 0.4, 0.55, 0.7, 0.85, 0.93)  # of each class: how often the next token is right, before it was seen
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


class Rates:
    """How often a guessed token was right, by class of evidence."""

    def __init__(self, before: Rates | None = None) -> None:
        """A fresh sequence starts from what is known of the others."""
        rates: Iterable[float] = (
            EXPECTED if before is None else [r / n for r, n in zip(before.right, before.seen, strict=True)]
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


class StepTimes:
    """Mean seconds of steps that decode: plain ones by sequences, those with guesses by rows."""

    def __init__(self, slower: float) -> None:
        self._slower = slower
        # the first of a kind compiles kernels, or touches memory first: it does not count
        self._means: dict[tuple[bool, int], float | None] = {}

    def note(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        kind = self._kind(num_sequences, num_drafts)
        mean = self._means.get(kind)
        if mean is None:
            self._means[kind] = seconds if kind in self._means else None
        else:
            self._means[kind] = mean + NEWEST * (min(seconds, 2 * mean) - mean)

    @staticmethod
    def _kind(num_sequences: int, num_drafts: int) -> tuple[bool, int]:
        rows = num_sequences + num_drafts
        return bool(num_drafts), rows if not num_drafts or rows < 5 else 5 + (rows - 5) // 4 * 4

    def cost(self, num_sequences: int, num_drafts: int) -> float:
        """How much longer than a plain step one with so many guesses takes: measured, or from the nearest that was."""
        if num_drafts == 0:
            return 1.0
        plain = self._means.get((False, num_sequences))
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


class Speculation:
    """Guesses for the sequences of an engine.

    mode    always: every guess is checked, for tests and comparisons; auto: what pays
    device  cpu | cuda
    """

    def __init__(self, drafter: Drafter, mode: Mode = "auto", device: str = "cpu") -> None:
        self.drafter = drafter
        self.mode = mode
        self._rates = Rates()
        self._times = StepTimes(SLOWER[device])
        self._is_crowded = False

    def learn(self, sequence: Sequence, num_new: int) -> None:
        """Its last `num_new` tokens are new: see whether they were guessed, and guess what follows."""
        if not num_new:
            return
        known: _Guessed | None = sequence.speculation
        if known is None:
            known = sequence.speculation = _Guessed(Rates(self._rates))
        if known.guess is not None:
            evidence = known.guess.evidence
            for number, token in enumerate(sequence.token_ids[-num_new:]):
                if number >= len(known.guess.token_ids):
                    break
                is_right = known.guess.token_ids[number] == token
                known.rates.count(evidence + number, is_right)
                self._rates.count(evidence + number, is_right)
                if not is_right:
                    break
        rests = sequence.finish_reason is not None or self._is_crowded
        known.guess = None if rests else self.drafter.guess(sequence)

    def choose(self, step: Step, most: int) -> list[tuple[int, ...]]:
        """For each part of a step the guessed tokens to check, at most `most` in all; nothing in one with a prompt."""
        none: list[tuple[int, ...]] = [()] * len(step.scheduled)
        guesses: list[Guess | None] = []
        chances: list[tuple[float, int]] = []
        for place, part in enumerate(step.scheduled):
            sequence = part.sequence
            if not (part.is_last_chunk and sequence.num_output_tokens):
                return none
            known: _Guessed | None = sequence.speculation
            guess = known.guess if known is not None else None
            guesses.append(guess)
            if known is None or guess is None:
                continue
            room = min(most, sequence.max_tokens - sequence.num_output_tokens - 1)
            if self.mode == "always":
                chances += [(1.0, place)] * min(room, len(guess.token_ids), most // len(step.scheduled))
            else:
                chances += [(chance, place) for chance in known.rates.chances(guess, room)]
        if not chances:
            return none
        chances.sort(key=lambda one: -one[0])
        counts = [0] * len(step.scheduled)
        for _, place in chances[: self._worth([chance for chance, _ in chances[:most]], len(step.scheduled))]:
            counts[place] += 1
        return [g.token_ids[:count] if g is not None else () for g, count in zip(guesses, counts, strict=True)]

    def _worth(self, chances: list[float], num_sequences: int) -> int:
        """How many of the guesses, the most likely first, make most tokens a second."""
        if self.mode == "always":
            return len(chances)
        best, best_rate, wanted = 0, num_sequences * GAIN, False
        for count, tokens in enumerate(accumulate(chances, initial=float(num_sequences))):
            if count == 0:
                continue
            rate = tokens / self._times.cost(num_sequences, count)
            if rate > best_rate:
                best, best_rate = count, rate
            wanted = wanted or chances[count - 1] > 0.5
        if not best and wanted:
            self._times.fade()  # time alone speaks against them: perhaps no longer
        return best

    def note(self, step: Step, seconds: float) -> None:
        """How long a step took."""
        self._is_crowded = self.mode == "auto" and len(step.scheduled) >= CROWD
        if all(part.start >= part.sequence.num_prompt_tokens and part.num_known == 1 for part in step.scheduled):
            self._times.note(len(step.scheduled), sum(len(part.drafts) for part in step.scheduled), seconds)
