"""A draft model: what it guesses is its own greedy answer, whatever became of its guesses and of those it followed."""

import random
from types import SimpleNamespace

import pytest
import torch

from localllm.engine.draft_model import DraftModel
from localllm.engine.drafter import Guess
from localllm.engine.runner import Runner
from localllm.engine.scheduler import Scheduled, Step
from localllm.engine.sequence import Sequence, SequenceState
from localllm.engine.speculation import PLAIN_EVERY, REST, Speculation
from localllm.request import Request, SamplingParams

VOCAB, PAGE = 50, 4


class Reads:
    """Logits are a hash of all tokens so far, read back from the pages, or carried from token to token in a slot."""

    facts = SimpleNamespace(pooling="")

    def __init__(self, num_pages, num_slots):
        self.forwards = self.computed = 0
        slots, hashes = torch.zeros(num_pages * PAGE, dtype=torch.long), [13] * num_slots
        group = SimpleNamespace(window=None)
        self.cache = SimpleNamespace(
            page_size=PAGE, device=torch.device("cpu"), groups=(group,), slots=slots, hashes=hashes, nbytes=0,
            num_slots=num_slots,
        )  # fmt: skip
        self.cache.copy_slot = lambda source, target: hashes.__setitem__(target, 0 if source < 0 else hashes[source])

    def forward(self, batch, cache):
        self.forwards += 1
        self.computed += len(batch.token_ids)
        cache.slots[batch.groups[0].slot_mapping] = batch.token_ids
        rows, at = [], 0
        for number, (query, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            table = batch.groups[0].block_table[number].tolist()
            for end in range(length - query + 1, length + 1):
                if cache.hashes:
                    slot = int(batch.slots[number])
                    cache.hashes[slot] = value = step_of(cache.hashes[slot], int(batch.token_ids[at]))
                else:
                    value = hash_of([int(cache.slots[table[i // PAGE] * PAGE + i % PAGE]) for i in range(end)])
                rows.append(value)
                at += 1
        return torch.tensor(rows, dtype=torch.float64).unsqueeze(1)[batch.logits_indices]

    def logits(self, hidden):
        return torch.sin(hidden * torch.arange(1, VOCAB + 1, dtype=torch.float64)).float()

    def step(self, batch, cache, finds_best=False):
        hidden = self.forward(batch, cache)
        return hidden, self.logits(hidden), None


def step_of(value, token):
    return (value * 31 + token + 1) % 1_000_003


def hash_of(ids):
    value = 0
    for token in ids:
        value = step_of(value, token)
    return value


def answer(ids, count):
    """What the model alone says next."""
    ids = list(ids)
    for _ in range(count):
        row = torch.sin(torch.tensor([[hash_of(ids)]], dtype=torch.float64) * torch.arange(1, VOCAB + 1)).float()
        ids.append(int(row.argmax()))
    return tuple(ids[len(ids) - count :])


def make(num_pages=64, states=False, max_context=200, num_sequences=3, vocab=VOCAB):
    model = Reads(num_pages, 2 * num_sequences if states else 0)
    return DraftModel(Runner(model, model.cache, VOCAB), [num_pages], num_sequences, max_context, vocab, 0.1), model


def text(count, salt=""):
    return Sequence(Request([random.randrange(VOCAB) for _ in range(count)], cache_salt=salt), 0, 1, 0, 1000)


@pytest.mark.parametrize("states", [False, True], ids=["pages", "states"])
@pytest.mark.parametrize("num_pages", [64, 22])
def test_it_follows_every_sequence_through_right_and_wrong_guesses(states, num_pages):
    drafter, model = make(num_pages, states)
    asked = told = 0
    sequences = [text(9), text(1), text(17)]
    for _ in range(30):
        now = random.sample(sequences, random.randint(1, 3))
        counts = [random.randint(0, 5) for _ in now]
        found = drafter.propose(now, counts)
        for sequence, count, guess in zip(now, counts, found, strict=True):
            assert guess in ((), answer(sequence.token_ids, count))
            asked, told = asked + count, told + len(guess)
            right = random.randint(0, len(guess))  # the model takes so many of them, and one of its own
            for token in (*guess[:right], random.randrange(VOCAB)):
                sequence.append(token)
        drafter.pages.check_integrity([shadow.own for shadow in drafter._shadows.values()])
        longest = max(sequences, key=lambda one: one.num_tokens)
        if longest.num_tokens > 30:
            longest.state = SequenceState.FINISHED
            fork = Sequence(Request(longest.token_ids[:20]), 0, 1, 0, 1000)  # begins like it
            sequences[sequences.index(longest)] = fork
    assert told > asked // 2 if num_pages < 64 else told == asked
    for sequence in sequences:
        sequence.state = SequenceState.FINISHED
    assert drafter.propose([], []) == [] and not drafter._shadows
    assert drafter.pages.pools[0].num_available == num_pages


def test_a_prompt_is_read_once_and_in_pieces(monkeypatch):
    monkeypatch.setattr("localllm.engine.draft_model.CATCH_UP", 40)
    drafter, model = make()
    long, short = text(60), text(5)
    found = drafter.propose([long, short], [2, 2])
    assert found == [(), answer(short.token_ids, 2)]
    assert drafter.propose([long], [2]) == [answer(long.token_ids, 2)]
    long.state, read = SequenceState.FINISHED, model.computed
    again = Sequence(Request(list(long.token_ids)), 0, 1, 0, 1000)  # the next turn of a chat begins like it
    drafter.propose([again], [1])
    assert model.computed - read <= PAGE


def test_what_it_cannot_follow_it_leaves_alone():
    drafter, _ = make(max_context=12, vocab=VOCAB - 10)
    sequence = text(10)
    assert len(drafter.propose([sequence], [3])[0]) == 0 and len(drafter.propose([sequence], [2])[0]) <= 2
    assert all(token < VOCAB - 10 for token in drafter.propose([sequence], [2])[0])
    unknown = Sequence(Request([1, 2, VOCAB]), 0, 1, 0, 100)  # a token that only the other model has
    assert drafter.propose([unknown], [2]) == [()]
    unknown.append(3)
    assert drafter.propose([unknown], [2]) == [()]


# --- whether it pays --------------------------------------------------------------------------------------------------


class Sells:
    """Guesses sevens and takes its time, as the clock has it."""

    name, deep, at_once, reach, share, kept_bytes = "sells", 4, False, 10**9, 0.2, 0

    def __init__(self, clock, price):
        self.clock, self.price, self.asked = clock, price, 0

    def propose(self, sequences, counts):
        self.asked += 1
        self.clock[0] += self.price * max(counts)
        return [(7,) * count for count in counts]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("localllm.engine.speculation.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def talk(speculation, sequence, says, steps, clock):
    """So many steps of a second each; how many tokens came."""
    before = sequence.num_tokens
    for _ in range(steps):
        started = clock[0]
        part = Scheduled(sequence, sequence.num_tokens - 1, 1)
        drafts = speculation.choose(Step([part]), 32)[0]
        part = Scheduled(sequence, part.start, 1 + len(drafts), drafts=drafts)
        clock[0] += 1 + 0.02 * len(drafts)
        new = 0
        for guess in (*drafts, None):
            token = says()
            sequence.append(token)
            new += 1
            if token != guess:
                break
        speculation.learn(sequence, new)
        speculation.note(Step([part]), clock[0] - started)
    return sequence.num_tokens - before


def decoding():
    sequence = Sequence(Request([1, 2, 3], SamplingParams()), 0, 1, 0, 10**6)
    sequence.append(4)
    return sequence


def test_guesses_are_bought_while_they_are_right_and_worth_their_price(clock):
    cheap = Sells(clock, 0.05)
    speculation = Speculation(cheap)
    assert talk(speculation, decoding(), lambda: 7, 100, clock) > 400
    assert talk(speculation, decoding(), lambda: 7, PLAIN_EVERY, clock) > 300  # others begin where this one ended
    step_s, round_s = speculation.times_of(1, 6)
    assert 1.05 < step_s < 1.2 and round_s == pytest.approx(0.05)
    dear = Sells(clock, 0.9)
    assert talk(Speculation(dear), decoding(), lambda: 7, 100, clock) < 140  # what it expected at first was wrong
    wrong = Sells(clock, 0.05)
    speculation, sequence = Speculation(wrong), decoding()
    assert talk(speculation, sequence, lambda: 8, 200, clock) == 200 and wrong.asked < 50
    asked = wrong.asked
    talk(speculation, sequence, lambda: 8, 10 * REST, clock)
    assert 1 <= wrong.asked - asked <= 5  # tried again now and then
    assert talk(speculation, sequence, lambda: 7, 3000, clock) > 6000  # and taken back


def test_a_block_that_is_drafted_at_once_costs_the_same_whatever_is_verified(clock):
    class Blocks(Sells):
        deep, at_once = 15, True

        def propose(self, sequences, counts):
            self.clock[0] += self.price - self.price * max(counts)
            return super().propose(sequences, counts)

    right = Blocks(clock, 0.9)  # too dear by the token
    speculation = Speculation(right)
    assert talk(speculation, decoding(), lambda: 7, 100, clock) > 900
    assert speculation.times_of(1, 6)[1] == pytest.approx(0.9)
    assert talk(Speculation(Blocks(clock, 30.0)), decoding(), lambda: 7, 300, clock) < 600
    wrong = Blocks(clock, 0.3)
    speculation, sequence = Speculation(wrong), decoding()
    assert talk(speculation, sequence, lambda: 8, 200, clock) == 200 and wrong.asked < 50
    assert talk(speculation, sequence, lambda: 7, 3000, clock) > 9000  # a trial drafts a block, too


def test_the_drafter_that_wins_most_is_asked(clock):
    class Knows:
        name = "knows"

        def guess(self, sequence):
            return Guess((7,) * 20, 20)

    bought = Sells(clock, 0.3)
    speculation = Speculation((Knows(), bought))
    talk(speculation, decoding(), lambda: 7, 100, clock)
    assert speculation.name == "knows" and bought.asked < 10
    speculation = Speculation((Knows(), Sells(clock, 0.01)), "always")
    assert len(speculation.choose(Step([Scheduled(decoding(), 3, 1)]), 32)[0]) == 4  # nobody knows anything yet
    assert speculation.name == "sells"
