"""Token masks in the engine: obeyed, filled in time, jumped over, ended."""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))

from test_engine import VOCAB, alone, collected, ids_of, make, request, run, runs_ahead

from localllm.errors import ConstraintUnmet
from localllm.request import FinishReason


@pytest.fixture(params=["in turn", "ahead"], autouse=True)
def _mode(request):
    runs_ahead[0] = request.param == "ahead"
    yield
    runs_ahead[0] = False


class Script:
    """A grammar of integers: at position i one of `steps[i]`; a lone choice is forced; the end where the steps end."""

    def __init__(self, steps, jumps=True, delay=0.0, at=0):
        self.steps, self.jumps, self.delay, self.at = steps, jumps, delay, at
        self.threads = set()
        self.spelled = {}
        self.accepted = []

    def fill(self, row):
        time.sleep(self.delay)
        self.threads.add(threading.current_thread().name)
        choices = self.steps[self.at]
        if choices is None:
            return False
        row[:] = np.packbits(np.isin(np.arange(len(row) * 32), choices), bitorder="little").view(np.int32)
        return True

    def accept(self, token):
        choices = self.steps[self.at]
        if choices is not None and token not in choices:
            raise ConstraintUnmet(f"{token} at {self.at}")
        self.accepted.append(token)
        self.at += 1

    def jump_forward(self, last=None):
        out = [] if last is None else [self.spelled.get(last, last)]
        for choices in self.steps[self.at :] if self.jumps else ():
            if choices is None or len(choices) != 1:
                break
            out.append(choices[0])
        return out

    @property
    def is_done(self):
        return self.at == len(self.steps)

    def fork(self):
        return type(self)(self.steps, self.jumps, self.delay, self.at)

    def rollback(self, count):
        self.at -= count


STEPS = [[3, 4], [7], [8], [9], [1, 2, 5], None, [11], [12], [20, 21]]


def masked(tokens, steps=STEPS, mask=None, **params):
    made = request(tokens, **params)
    made.token_mask = mask or Script(steps)
    return made


def fits(tokens, steps=STEPS):
    return all(choices is None or token in choices for token, choices in zip(tokens, steps, strict=False))


@pytest.mark.parametrize("preempt_every", [0, 3])
def test_jumping_changes_no_token(preempt_every):
    """What is forced is appended at once: fewer steps, the same answer; also where the answer starts again."""
    slow, fast = make(preempt_every=preempt_every), make(preempt_every=preempt_every)
    for prompt in ([1, 2, 3], list(range(30))):
        one = run(slow, masked(prompt, mask=Script(STEPS, jumps=False)))[0]
        two = run(fast, masked(prompt))[0]
        assert ids_of(one) == ids_of(two)
        assert fits(ids_of(one)) and len(ids_of(one)) == len(STEPS)
        ends = [collected(s)[-1] for s in (one, two)]
        assert [e.finish_reason for e in ends] == [FinishReason.STOP] * 2
        assert [e.usage.completion_tokens for e in ends] == [len(STEPS)] * 2
    assert fast.stats().num_steps < slow.stats().num_steps
    assert max(len(e.token_ids) for e in collected(two)) == 4


def test_a_grammar_of_one_text_needs_two_steps():
    engine = make()
    stream = run(engine, masked([1, 2], [[n] for n in range(40)], max_tokens=100))[0]
    assert ids_of(stream) == list(range(40))
    assert engine.stats().num_steps <= 2


def test_the_end_of_the_grammar_is_the_end():
    """Also with ignore_eos and min_tokens; an answer cut before its end says so."""
    for params in ({}, {"ignore_eos": True}, {"min_tokens": 12}, {"max_tokens": len(STEPS)}):
        stream = run(make(), masked([1, 2, 3], eos_token_ids=frozenset({20, 21}), **params))[0]
        assert len(ids_of(stream)) == len(STEPS)
        assert collected(stream)[-1].finish_reason is FinishReason.STOP
    for limit in range(1, len(STEPS)):
        stream = run(make(), masked([1, 2, 3], max_tokens=limit))[0]
        assert len(ids_of(stream)) == limit
        assert collected(stream)[-1].finish_reason is FinishReason.LENGTH
    stream = run(make(), masked([1, 2, 3], stop_token_ids=(8,)))[0]
    assert ids_of(stream)[1:] == [7, 8]
    assert collected(stream)[-1].stop_reason == 8


def test_logprobs_have_an_entry_for_every_token():
    stream = run(make(), masked([1, 2, 3], logprobs=1))[0]
    entries = [entry for event in collected(stream) for entry in event.logprobs]
    assert [entry.token_id for entry in entries] == ids_of(stream)
    assert len(entries) == len(STEPS)


@pytest.mark.parametrize("preempt_every", [0, 2])
def test_children_have_masks_of_their_own(preempt_every):
    engine = make(max_parallel=2, num_pages=20, preempt_every=preempt_every)
    stream = run(engine, masked(list(range(10)), n=5, temperature=1.5, seed=4))[0]
    answers = [ids_of(stream, index) for index in range(5)]
    assert all(fits(answer) and len(answer) == len(STEPS) for answer in answers)
    assert len({tuple(answer) for answer in answers}) > 1
    for index in range(5):
        assert answers[index] == ids_of(run(make(), masked(list(range(10)), temperature=1.5, seed=4 + index))[0])


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_iso_01_02_neighbours_of_masked_requests(rounds):
    """Free requests beside masked ones and in places that masked ones left say what they say alone."""
    victims = [list(range(n, n + 9)) for n in range(6)]
    reference = [alone(v) for v in victims]
    engine = make(max_parallel=3)
    for _ in range(rounds):
        requests = []
        for victim in victims:
            requests += [
                masked(victim, [[7]] * 3),
                request(victim),
                masked([9], [[1, 2], None, [3]] * 2, temperature=1),
            ]
        streams = run(engine, *requests)
        assert [ids_of(s) for s in streams[1::3]] == reference
        assert all(ids_of(s) == [7, 7, 7] for s in streams[::3])


def test_iso_06_a_mask_that_fails_ends_its_own_request():
    class Fails(Script):
        def fill(self, row):
            if self.at >= 3:
                raise ConstraintUnmet("too complex", "simplify it")
            return super().fill(row)

    class Nothing(Script):
        def fill(self, row):
            row[:] = 0
            return True

    plain = [[1, 2, 3]] * 8
    broken = masked([1, 2], mask=Fails(plain))
    empty = masked([1, 2], mask=Nothing(plain))
    family = masked([4], mask=Fails(plain), n=2, temperature=1.0)
    streams = run(make(), broken, request([1, 2, 3]), empty, family, request([4, 5]))
    ends = [[e.finish_reason for e in collected(s) if e.finish_reason] for s in streams]
    assert ends == [["error"], ["length"], ["error"], ["error"] * 2, ["length"]]
    errors = [e.error for e in collected(streams[0]) if e.error]
    assert isinstance(errors[0], ConstraintUnmet) and errors[0].message == "too complex"
    assert ids_of(streams[1]) == alone([1, 2, 3]) and ids_of(streams[4]) == alone([4, 5])


def test_slow_masks_are_waited_for_and_filled_beside_the_forward_pass():
    slow = Script([[3, 4], [1, 2], [5, 6], [8, 9]], delay=0.02)
    streams = run(make(), masked([1, 2, 3], mask=slow), request([1, 2, 3]))
    assert fits(ids_of(streams[0]), slow.steps)
    assert ids_of(streams[1]) == alone([1, 2, 3])
    assert any(name.startswith("masks") for name in slow.threads)


def test_min_tokens_and_masks():
    """Stops stay banned while the grammar offers anything else."""
    steps = [[3, 4], [3, 4], [3], [3, 4], [3, 4]]
    stream = run(make(), masked([1, 2], steps, stop_token_ids=(3,), min_tokens=3))[0]
    assert ids_of(stream)[:3] == [4, 4, 3]


def test_aborted_requests_leave_nothing():
    """Aborted at any moment, with masks and jumps."""
    engine = make(max_parallel=2)
    for turns in range(8):
        stream = engine.submit(
            masked(list(range(20)), [[n % VOCAB] if n % 3 else [1, 2] for n in range(60)], n=2, max_tokens=100)
        )
        for _ in range(turns):
            engine.run_once()
        stream.abort()
        while not engine.is_idle:
            engine.run_once()
        assert [e.finish_reason for e in stream if e.finish_reason] == [FinishReason.ABORT] * 2
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_a_token_gives_way_to_its_canonical_spelling():
    """Before it is in a forward pass, and only where nothing depends on the token itself."""
    plain = run(make(), masked([1, 2, 3], mask=Script(STEPS)))[0]
    first = ids_of(plain)[0]
    other = 7 - first  # 3 or 4
    spelled = Script(STEPS)
    spelled.spelled = {first: other}
    stream = run(make(), masked([1, 2, 3], mask=spelled))[0]
    if runs_ahead[0]:
        assert ids_of(stream) == ids_of(plain)
    else:
        assert ids_of(stream)[0] == other and fits(ids_of(stream)) and len(ids_of(stream)) == len(STEPS)
        alone_with = run(make(), masked([1, 2, 3], [[other], *STEPS[1:]]))[0]
        assert ids_of(stream) == ids_of(alone_with)
    kept = Script(STEPS)
    kept.spelled = {first: other}
    assert ids_of(run(make(), masked([1, 2, 3], mask=kept, logprobs=0))[0]) == ids_of(plain)
