"""Slots of states: a "model" whose logits are a hash that a slot carries from token to token, so that a slot which was
not zeroed, copied, kept or given back changes the answer at once."""

import random
from types import SimpleNamespace

import pytest
import torch

from localllm.engine.drafter import Guess
from localllm.engine.engine import Engine
from localllm.engine.runner import Runner
from localllm.engine.scheduler import SchedulerLimits
from localllm.engine.speculation import Speculation
from localllm.request import FinishReason, Request, SamplingParams

VOCAB, PAGE = 50, 16


class Group:
    window = None


class Cache:
    """A hash a slot instead of a state."""

    page_size, device, groups = PAGE, torch.device("cpu"), (Group(),)

    def __init__(self, num_slots):
        self.hashes = [13] * num_slots  # nothing is zero before it was made so

    def copy_slot(self, source, target):
        self.hashes[target] = 0 if source < 0 else self.hashes[source]

    def copy_page(self, group, source, target):
        """Pages hold nothing here."""


class Model:
    """Reads the tokens of a step into the slots of their sequences."""

    facts = SimpleNamespace(pooling="")

    def __init__(self):
        self.computed = 0

    def forward(self, batch, cache):
        rows, at = [], 0
        assert len(set(batch.slots.tolist())) == len(batch.query_lens), "two sequences share a slot"
        for slot, count in zip(batch.slots.tolist(), batch.query_lens, strict=True):
            for token in batch.token_ids[at : at + count].tolist():
                cache.hashes[slot] = (cache.hashes[slot] * 31 + token + 1) % 1_000_003
                rows.append(cache.hashes[slot])
            at += count
        self.computed += len(rows)
        return torch.tensor(rows, dtype=torch.float64).unsqueeze(1)[batch.logits_indices]

    def logits(self, hidden):
        return (torch.sin(hidden * torch.arange(1, VOCAB + 1, dtype=torch.float64)) * 4).float()

    def step(self, batch, cache, finds_best=False, num_layers=None):
        hidden = self.forward(batch, cache)
        return hidden, self.logits(hidden), None


def make(ahead=False, num_slots=12, num_pages=64, max_context=400, prefix_cache=True, **limits):
    limits = SchedulerLimits(**({"max_parallel": 3, "prefill_budget": 64, "num_slots": num_slots} | limits))
    runner = Runner(Model(), Cache(num_slots), VOCAB)
    engine = Engine(
        runner,
        [num_pages],
        max_context,
        limits,
        prefix_cache=prefix_cache,
        check_invariants=True,
    )
    engine.stepper.runs_ahead = ahead
    return engine


def request(tokens, **params):
    return Request(list(tokens), SamplingParams(**({"temperature": 0, "max_tokens": 12} | params)))


def answers(engine, requests):
    """The ids of every answer, in the order of the requests and of their children."""
    streams = []
    for index, one in enumerate(requests):
        streams.append(engine.submit(one))
        if index % 2:
            engine.run_once()
    for _ in range(3000):
        if engine.is_idle:
            break
        engine.run_once()
    made = []
    for stream in streams:
        events = list(stream)
        assert all(event.error is None for event in events)
        made += [
            [t for event in events if event.index == index for t in event.token_ids]
            for index in range(stream.request.params.n)
        ]
    assert engine._pages.slots.num_available == engine._pages.slots.num_pages
    return made


def expected(tokens, count):
    """What one sequence alone answers, greedily."""
    value, out = 0, []
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    for _ in range(count):
        logits = torch.sin(torch.tensor([value], dtype=torch.float64) * torch.arange(1, VOCAB + 1)) * 4
        out.append(int(logits.argmax()))
        value = (value * 31 + out[-1] + 1) % 1_000_003
    return out


class Knows:
    """Guesses what comes next, wrong in one token of four."""

    name = "knows"

    def __init__(self):
        self.rng = random.Random(5)

    def guess(self, sequence):
        found = expected(sequence.token_ids, self.rng.randrange(1, 7))
        return Guess(tuple((token + (self.rng.random() < 0.25)) % VOCAB for token in found), 9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("ahead", "guesses"),
    [(False, False), (True, False), (False, True), pytest.param(True, True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("case", [{}, {"preempt_every": 5}, {"num_slots": 3}, {"num_pages": 14}, {"prefill_budget": 7}])
def test_answers_do_not_depend_on_company_preemption_or_lack_of_room(ahead, case, guesses):
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(90)]
    prompts = [shared[:cut] + [rng.randrange(VOCAB) for _ in range(more)] for cut in (0, 70, 90) for more in (1, 5, 40)]
    engine = make(ahead, max_context=200, **case)
    engine.stepper.speculation = Speculation(Knows(), "always", goes_back=True) if guesses else None
    for _ in range(2):  # the second time with checkpoints in the tree
        found = answers(engine, [request(prompt, n=1 + index % 3) for index, prompt in enumerate(prompts)])
        wanted = [expected(p, 12) for index, p in enumerate(prompts) for _ in range(1 + index % 3)]
        assert found == wanted
        prompts = [*prompts[4:], *prompts[:4]]
    stats = engine.stats()
    assert stats.prefix_hit_tokens > 0
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens or not guesses or case == {"num_slots": 3}


@pytest.mark.parametrize("failing", [3, 4, 5])
def test_states_behind_guesses_of_a_step_that_failed_are_computed_anew(failing):
    engine = make()
    engine.stepper.speculation = Speculation(Knows(), "always", goes_back=True)
    forward, failed = engine.runner.model.forward, []

    def fails_once(batch, cache):
        hidden = forward(batch, cache)
        if max(batch.query_lens) > 1 and engine.stepper.stats.num_steps >= failing and not failed:
            failed.append(True)
            raise ValueError("planted")
        return hidden

    engine.runner.model.forward = fails_once
    prompts = [[1, 2, 3] * 5, [4, 5] * 6]
    assert answers(engine, [request(prompt) for prompt in prompts]) == [expected(prompt, 12) for prompt in prompts]
    assert failed and engine.stepper.speculation is None


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [4000, 4001, 4016, 4095])
def test_the_second_turn_computes_hardly_any_old_token(ahead, length):
    engine = make(ahead, num_pages=600, max_context=9000, prefill_budget=512)
    first = [index * 7 % VOCAB for index in range(length)]
    (answer,) = answers(engine, [request(first, max_tokens=45)])
    engine.runner.model.computed = 0
    new = [3, 1, 4, 1, 5]
    (second,) = answers(engine, [request(first + answer + new, max_tokens=1)])
    assert second == expected(first + answer + new, 1)
    assert engine.runner.model.computed <= len(new) + 64
    # a template that leaves a thought out of the second turn: the answer's states are of no use, the prompt's are
    engine.runner.model.computed = 0
    assert answers(engine, [request(first + new, max_tokens=1)]) == [expected(first + new, 1)]
    assert engine.runner.model.computed <= len(new) + 64


def test_log_probabilities_of_a_prompt_are_taken_once_for_all_its_answers():
    engine = make(max_parallel=1)
    prompt = [index * 7 % VOCAB for index in range(100)]
    assert answers(engine, [request(prompt, n=4, prompt_logprobs=0)]) == 4 * [expected(prompt, 12)]
    assert engine.stats().prefix_hit_tokens == 3 * 96  # of those that had to wait


def test_answers_that_had_to_wait_do_not_call_their_own_prompt_cached():
    engine = make(max_parallel=1)
    stream = engine.submit(request([index * 7 % VOCAB for index in range(100)], n=3))
    while not engine.is_idle:
        engine.run_once()
    events = list(stream)
    assert engine.stats().prefix_hit_tokens == 2 * 96
    assert {event.cached_tokens for event in events} == {0, None}
    assert [event.usage.cached_tokens for event in events if event.usage] == [0, 0, 0]


def test_a_long_prompt_leaves_checkpoints_on_its_way():
    engine = make(num_pages=600, max_context=9000, prefill_budget=1500)
    prompt = [index * 7 % VOCAB for index in range(5000)]
    answers(engine, [request(prompt, max_tokens=1)])
    engine.runner.model.computed = 0
    other = [*prompt[:4100], 1, 2, 3]
    assert answers(engine, [request(other, max_tokens=1)]) == [expected(other, 1)]
    assert engine.runner.model.computed == 4103 - 4096


def test_checkpoints_go_before_the_pages_they_belong_to():
    engine = make(num_slots=4, num_pages=64)
    prompts = [[seed] * 100 for seed in range(4)]
    for prompt in prompts:
        answers(engine, [request(prompt, max_tokens=2)])
    tree = engine._pages.tree
    kept = [node for node in tree.nodes() if node.slot is not None]
    assert len(kept) == 3 and tree.num_nodes == 4 * 6
    answers(engine, [request([*range(20)] * 3, max_tokens=2)])
    first = [node.key[0] for node in tree.nodes() if node.slot is not None]
    assert sorted(first) == [2, 3, 12] and tree.num_nodes == 4 * 6 + 3  # one slot was the last sequence's own


@pytest.mark.parametrize("failing", [1, 2, 5, 9])
def test_a_step_that_ran_out_of_memory_on_its_way_is_computed_anew(failing):
    engine, failed = make(), []
    model, forward = engine.runner.model, engine.runner.model.forward

    def fails_once(batch, cache):
        hidden = forward(batch, cache)  # some layers have written their states
        if engine.stepper.stats.num_steps == failing and not failed:
            failed.append(failing)
            raise torch.OutOfMemoryError("out of memory")
        return hidden

    model.forward = fails_once
    prompts = [[1, 2, 3] * 30, [4, 5] * 20]
    assert answers(engine, [request(prompt) for prompt in prompts]) == [expected(prompt, 12) for prompt in prompts]
    assert failed == [failing]


def test_without_a_prefix_cache_a_prompt_is_not_cut_and_nothing_is_kept():
    engine = make(prefix_cache=False, prefill_budget=256)
    assert answers(engine, [request([1] * 100)]) == [expected([1] * 100, 12)]
    assert engine._pages.slots.num_free == 12 and engine.stats().num_steps == 12


def test_an_aborted_request_gives_its_slots_back():
    engine = make()
    stream = engine.submit(request([1] * 100, max_tokens=200))
    for _ in range(20):
        engine.run_once()
    engine.abort(stream.request.request_id)
    engine.run_once()
    assert list(stream)[-1].finish_reason is FinishReason.ABORT
    assert engine._pages.slots.num_available == 12
