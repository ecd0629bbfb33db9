"""Guesses: where they come from, how many of them pay, and that nothing but the number of steps knows of them."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from localllm.engine.draft_model import DraftModel
from localllm.engine.drafter import Guess, NgramDrafter
from localllm.engine.engine import Engine
from localllm.engine.runner import Runner
from localllm.engine.sampler import candidates
from localllm.engine.scheduler import Scheduled, SchedulerLimits, Step
from localllm.engine.sequence import Sequence
from localllm.engine.speculation import Rates, Speculation, StepTimes
from localllm.request import MOST_DRAFTS, Request, SamplingParams


def test_a_guess_is_what_followed_the_longest_match_that_is_kept():
    rng = random.Random(1)
    for _ in range(100):
        one = SimpleNamespace(token_ids=[rng.randrange(4) for _ in range(rng.randrange(1, 6))], places=None)
        for _ in range(40):
            ids, guess = one.token_ids, NgramDrafter().guess(one)
            assert bool(guess) == any(ids[i - 2 : i] == ids[-2:] for i in range(2, len(ids)))
            if guess is not None:
                at, evidence = one.places.source, guess.evidence
                assert ids[at - evidence : at] == ids[len(ids) - evidence :] and evidence >= 2
                assert len(guess.token_ids) == MOST_DRAFTS
                assert guess.token_ids == tuple((ids[at:] * MOST_DRAFTS)[:MOST_DRAFTS])
            ids += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]


class Says:
    name = "says"

    def __init__(self, guess):
        self.what = guess

    def guess(self, sequence):
        return self.what


def decoding(drafter, times, mode="auto", num_sequences=1, max_tokens=100):
    """A step of sequences that decode, known to `Speculation`, which believes in `times`: extra rows -> cost."""
    speculation = Speculation(drafter, mode)
    speculation._times = SimpleNamespace(
        cost=lambda n, d: times[d] if d in times else 1 + d,
        mean=lambda n: 1.0,
        fade=lambda: None,
        note=lambda *how: None,
    )
    parts = []
    for _ in range(num_sequences):
        sequence = Sequence(Request([1, 2, 3], SamplingParams()), 0, 1, 0, max_tokens)
        sequence.append(4)
        speculation.learn(sequence, 1)
        parts.append(Scheduled(sequence, 3, 1))
    return speculation, Step(parts)


def test_so_many_guesses_as_pay_are_checked():
    guess = Guess(tuple(range(10, 30)), 5)  # the first three are right in 55, 70 and 70 of 100 cases
    free, steep = dict.fromkeys(range(40), 1.0), {d: 1 + 0.3 * d for d in range(40)}
    speculation, step = decoding(Says(guess), free)
    assert len(speculation.choose(step, 32)[0]) > 6  # until they are too unlikely to be looked at
    speculation, step = decoding(Says(guess), steep)
    assert 1 <= len(speculation.choose(step, 32)[0]) <= 4
    assert speculation.choose(step, 32) == [guess.token_ids[: len(speculation.choose(step, 32)[0])]]
    assert speculation.choose(step, 0) == [()]
    speculation, step = decoding(Says(guess), {d: 1 + 0.7 * d for d in range(40)})
    assert speculation.choose(step, 32) == [()]
    # four sequences at once: a row must win more than it costs
    speculation, step = decoding(Says(guess), {d: 1 + 0.2 * d for d in range(40)}, num_sequences=4)
    assert speculation.choose(step, 32) == [()] * 4
    speculation, step = decoding(Says(guess), free, max_tokens=4)
    assert [len(one) for one in speculation.choose(step, 32)] == [2]  # the last token is never guessed
    speculation, step = decoding(Says(None), free)
    assert speculation.choose(step, 32) == [()]
    step.scheduled.append(Scheduled(Sequence(Request([1, 2]), 0, 1, 0, 9), 0, 2))  # a prompt
    speculation, full = decoding(Says(guess), free)
    assert speculation.choose(Step([*full.scheduled, *step.scheduled[1:]]), 32) == [(), ()]


def test_wrong_guesses_end_by_themselves_and_begin_again():
    """What is guessed is compared with what came, checked or not."""
    speculation, step = decoding(Says(Guess((7, 7, 7), 20)), {d: 1 + 0.15 * d for d in range(40)})
    sequence = step.scheduled[0].sequence
    assert speculation.choose(step, 32)[0]

    def say(token, times):
        for _ in range(times):
            sequence.append(token)
            speculation.learn(sequence, 1)
        return speculation.choose(Step([Scheduled(sequence, sequence.num_tokens - 1, 1)]), 32)[0]

    sequence.max_tokens = 10**6
    assert not say(8, 40)
    fresh = Sequence(Request([1, 2, 3], SamplingParams()), 0, 1, 0, 100)
    fresh.append(4)
    speculation.learn(fresh, 1)
    assert not speculation.choose(Step([Scheduled(fresh, 3, 1)]), 32)[0]  # others begin where this one ended
    assert say(7, 60) == (7, 7, 7)


def test_a_crowd_is_not_guessed_for():
    guess = Guess((7, 7, 7), 20)
    speculation, step = decoding(Says(guess), dict.fromkeys(range(40), 1.0), num_sequences=20)
    assert all(len(one) > 0 for one in speculation.choose(step, 60))
    speculation.note(step, 0.01)
    for part in step.scheduled:
        speculation.learn(part.sequence, 1)
    assert not any(speculation.choose(step, 60))
    speculation.note(Step(step.scheduled[:3]), 0.01)
    speculation.learn(step.scheduled[0].sequence, 1)
    assert speculation.choose(Step(step.scheduled[:3]), 60)[0]


def test_rates_forget():
    rates = Rates()
    for _ in range(1000):
        rates.count(3, True)
    assert rates.chances(Guess((1,), 3), 1)[0] > 0.97
    for _ in range(200):
        rates.count(3, False)
    assert not rates.chances(Guess((1,), 3), 1)


def test_times_are_measured_and_doubted_when_they_forbid():
    times = StepTimes(0.1)
    assert times.cost(1, 0) == 1 and times.cost(1, 10) == pytest.approx(2) and times.cost(11, 10) == pytest.approx(1.5)
    for _ in range(3):
        times.note(1, 0, 0.010)
        times.note(1, 1, 0.050)
    assert times.cost(1, 1) == pytest.approx(5) and times.cost(1, 3) == pytest.approx(5 * 1.3 / 1.1)
    times.note(1, 7, 9.0)  # the first of a kind does not count
    assert times.cost(1, 7) < 9
    times.note(1, 1, 100.0)  # nor what another program did to one step
    assert times.cost(1, 1) == pytest.approx(6)
    for _ in range(1000):
        times.fade()
    assert times.cost(1, 1) < 0.1


# --- what is drawn ----------------------------------------------------------------------------------------------------


class Likeliest:
    """Guesses the likeliest token, or the next one: right about as often as wrong."""

    name = "likeliest"

    def __init__(self, model):
        self.model, self.turn = model, 0

    def guess(self, sequence):
        ids, found = list(sequence.token_ids), []
        for _ in range(3):
            self.turn += 1
            found.append((int(self.model.probabilities(ids).argmax()) + (self.turn % 5 == 0)) % VOCAB)
            ids.append(found[-1])
        return Guess(tuple(found), 9)


VOCAB = 12


class LastTwo:
    """The logits depend on the last two tokens, which lie in the pages."""

    def __init__(self, noise=0.0):
        self.facts = SimpleNamespace(pooling="")
        random = torch.Generator().manual_seed(3)
        self.table = 1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=random)
        self.table += noise * torch.randn(VOCAB, VOCAB, VOCAB, generator=random)

    def runner(self, num_pages):
        """A runner over pages of its own."""
        group = SimpleNamespace(num_pages=num_pages, window=None)
        slots = [torch.zeros(4 * num_pages, dtype=torch.long)]
        cache = SimpleNamespace(
            page_size=4, device=torch.device("cpu"), groups=(group,), slots=slots, num_slots=0, nbytes=0
        )
        cache.copy_page = lambda g, source, target: slots[0].view(-1, 4)[target].copy_(slots[0].view(-1, 4)[source])
        return Runner(self, cache, VOCAB)

    def probabilities(self, ids):
        return torch.softmax(self.table[ids[-2], ids[-1]], -1)

    def step(self, batch, cache, finds_best=False):
        slots = cache.slots[0]
        slots[batch.groups[0].slot_mapping] = batch.token_ids
        owner = torch.repeat_interleave(torch.arange(len(batch.query_lens)), torch.tensor(batch.query_lens))
        before = (batch.positions - 1).clamp(min=0)
        page = batch.groups[0].block_table[owner, before // 4].long()
        logits = self.table[slots[page * 4 + before % 4], batch.token_ids]
        return logits, logits, None

    def forward(self, batch, cache):
        return self.step(batch, cache)[0][batch.logits_indices]

    def logits(self, hidden):
        return hidden


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "wishes", [{}, {"top_k": 4, "temperature": 0.7}, {"min_p": 0.2}], ids=["plain", "top-k", "min-p"]
)
@pytest.mark.parametrize(
    ("who", "draws"),
    [("likeliest", 2_000), *(pytest.param(who, 20_000, marks=pytest.mark.slow) for who in ("likeliest", "draft"))],
)
def test_what_is_drawn_has_the_distribution_of_the_model(draws, wishes, who):
    """Chi-square of every token after the first, against the model's own probabilities; p above 1 in 10,000."""
    model = LastTwo()
    smaller = DraftModel(LastTwo(noise=0.7).runner(300), [300], 50, 100, VOCAB, 0.1)
    speculation = Speculation(Likeliest(model) if who == "likeliest" else smaller, "always")
    engine = Engine(model.runner(400), [400], 100, SchedulerLimits(50, 512, drafts=150), speculation=speculation)
    seen, expected = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    for first in range(0, draws, 250):
        params = SamplingParams(**({"temperature": 1.0} | wishes), seed=first, max_tokens=6, n=50)
        stream = engine.submit(Request([1, 2], params))
        while not engine.is_idle:
            engine.run_once()
        answers = {}
        for event in stream:
            answers.setdefault(event.index, []).extend(event.token_ids)
        for answer in answers.values():
            for number, token in enumerate(answer[1:], 1):
                ids = [1, 2, *answer[:number]]
                ids_left, probs = candidates(model.table[ids[-2], ids[-1]].clone(), params, 0.5)
                whole = torch.zeros(VOCAB)
                whole[ids_left if ids_left is not None else slice(None)] = probs / probs.sum()
                seen[answer[number - 1], token] += 1
                expected[answer[number - 1]] += whole.numpy()
    assert seen.sum() == draws and engine.stats().num_accepted_tokens > draws / 8
    assert not seen[expected == 0].any()
    counted = expected >= 5
    statistic = float(((seen - expected)[counted] ** 2 / expected[counted]).sum())
    freedom = int(counted.sum()) - VOCAB
    assert statistic < freedom + 3.72 * (2 * freedom) ** 0.5 + 10  # normal approximation, with its skew


def test_who_neither_guesses_nor_proposes_is_no_drafter() -> None:
    with pytest.raises(AssertionError, match="is not a drafter"):
        Speculation(SimpleNamespace(name="nobody"))
