"""The loop over a model of integers: its "cache" holds token ids, its logits are a hash of the ids read through the
block table, so that a wrong page, a stale slot or a neighbour's token changes the answer at once."""

import random
import threading
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from localllm.engine import pressure
from localllm.engine.drafter import Guess
from localllm.engine.engine import Engine
from localllm.engine.runner import Runner
from localllm.engine.scheduler import SchedulerLimits
from localllm.engine.speculation import Speculation
from localllm.errors import ContextTooLong, DeviceError, InvalidRequest, OutOfMemory
from localllm.request import FinishReason, Request, SamplingParams

VOCAB = 50
PAGE = 4
MODES = {"in-turn": (False, False), "ahead": (True, False), "guessing": (False, True), "ahead-guessing": (True, True)}
runs_ahead, guesses = [False], [False]


@pytest.fixture(
    autouse=True, params=[pytest.param(m, marks=pytest.mark.slow) if m == "ahead-guessing" else m for m in MODES]
)
def mode(request):
    """Every test once with each step after the other, and once with the next step launched before the tokens are
    known, with guessed tokens and without: nothing but the counters may differ."""
    runs_ahead[0], guesses[0] = MODES[request.param]


class Rumours:
    """Guesses what it has seen follow the same tokens in any test, with faults; else nonsense."""

    name = "rumours"

    def __init__(self):
        self.next, self.rng = {}, random.Random(5)

    def guess(self, sequence):
        ids = tuple(sequence.token_ids)
        for end in range(sequence.num_prompt_tokens, len(ids)):
            self.next[ids[:end]] = ids[end]
        found = []
        for _ in range(self.rng.randrange(8)):
            token = self.next.get((*ids, *found))
            found.append(self.rng.randrange(VOCAB) if token is None or self.rng.random() < 0.1 else token)
        return Guess(tuple(found), self.rng.randrange(40)) if found else None


rumours = Rumours()


class Group(NamedTuple):
    num_pages: int
    window: int | None = None


class FakeCache:
    page_size, device = PAGE, torch.device("cpu")

    def __init__(self, groups):
        self.groups = groups
        self.slots = [torch.zeros(g.num_pages * PAGE, dtype=torch.long) for g in groups]

    def copy_page(self, group, source, target):
        view = self.slots[group].view(-1, PAGE)
        view[target] = view[source]


class FakeModel:
    """logits = f(hash of the tokens up to the row), read from the first group's pages"""

    facts = SimpleNamespace(pooling="")

    def __init__(self, groups, broken=None):
        self.groups = groups
        self.broken = broken
        self.most_sequences = self.most_tokens = 10**9

    def forward(self, batch, cache):
        if len(batch.query_lens) > self.most_sequences or len(batch.token_ids) > self.most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        for group, inputs in enumerate(batch.groups):
            cache.slots[group][inputs.slot_mapping] = batch.token_ids
        if self.broken is not None and (batch.token_ids == self.broken).any():
            raise RuntimeError("a bad token at 0x7f001234 in /home/u/x.py")
        rows = []
        token = 0
        for index, (query, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            for offset in range(query):
                end = length - query + offset + 1
                value = 7
                for group, spec in enumerate(self.groups):
                    table = batch.groups[group].block_table[index].tolist()
                    first = 0 if spec.window is None else max(0, end - spec.window)
                    for key in range(first, end):
                        slot = table[key // PAGE] * PAGE + key % PAGE
                        assert slot >= 0
                        value = (value * 31 + int(cache.slots[group][slot]) + 1) % 1_000_003
                rows.append(value)
                token += 1
        return torch.tensor(rows, dtype=torch.float64).unsqueeze(1)[batch.logits_indices]

    def projected(self, rows):
        return rows

    def logits(self, hidden):
        base = torch.arange(1, VOCAB + 1, dtype=torch.float64)
        return (torch.sin(hidden * base) * 4).to(torch.float32)

    def step(self, batch, cache, finds_best=False):
        hidden = self.forward(batch, cache)
        return hidden, self.logits(hidden), None


def make(num_pages=64, window=None, broken=None, prefix_cache=True, max_context=200, fault=None, **limits):
    groups = tuple([Group(num_pages)] + ([Group(num_pages, window)] if window else []))
    runner = Runner(FakeModel(groups, broken), FakeCache(groups), VOCAB)
    limits = SchedulerLimits(**({"max_parallel": 4, "prefill_budget": 16} | limits))
    pages = [group.num_pages for group in groups]
    return ready(Engine(runner, pages, max_context, limits, prefix_cache=prefix_cache, check_invariants=True), fault)


def ready(engine, fault=None):
    engine.stepper.runs_ahead, engine.stepper.fault = runs_ahead[0], fault
    engine.stepper.speculation = Speculation(rumours, "always") if guesses[0] else None
    return engine


def drain(engine, *streams):
    for _ in range(3000):
        engine.run_once()
        for stream in streams:
            while (event := stream.get(timeout=0)) is not None:
                stream.seen.append(event)
        if engine.is_idle:
            return
    raise AssertionError("the engine does not come to rest")


def ids_of(stream, index=0):
    return [t for e in collected(stream) if e.index == index for t in e.token_ids]


def collected(stream):
    if not hasattr(stream, "seen"):
        stream.seen = list(stream)
    return stream.seen


def run(engine, *requests):
    streams = [engine.submit(r) for r in requests]
    for stream in streams:
        stream.seen = []
    drain(engine, *streams)
    for stream in streams:
        ends = [e for e in collected(stream) if e.finish_reason is not None]
        assert sorted(e.index for e in ends) == list(range(stream.request.params.n if not stream.request.score else 1))
    return streams


def request(tokens, **params):
    own = ("eos_token_ids", "stop_check", "cache_salt", "score", "priority")
    keys = {k: params.pop(k) for k in own if k in params}
    return Request(list(tokens), SamplingParams(**({"temperature": 0, "max_tokens": 12} | params)), **keys)


PROMPTS = [[1, 2, 3], list(range(20)), [*range(16), 40], [5] * 9, [*range(18), 7, 7], [9]]


def alone(tokens, **kwargs):
    engine = make(prefix_cache=False)
    return ids_of(run(engine, request(tokens, **kwargs))[0])


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("preempt_every", [0, 3])
def test_batched_equals_alone(window, preempt_every):
    """Shared prefixes, forced preemption, small pools; the tokens stay those of a lone request."""
    reference = [ids_of(run(make(prefix_cache=False, window=window), request(p))[0]) for p in PROMPTS]
    engine = make(num_pages=30, window=window, preempt_every=preempt_every)
    for _ in range(3):
        streams = run(engine, *[request(p) for p in PROMPTS])
        assert [ids_of(s) for s in streams] == reference
    if preempt_every:
        assert engine.stats().num_preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0


def test_neighbours_with_odd_wishes_do_not_disturb():
    """Biases, penalties, bans, n and random stops beside a greedy victim."""
    rng = random.Random(0)
    victim = list(range(10))
    reference = alone(victim)
    engine = make()
    for _ in range(10):
        attackers = [
            request([rng.randrange(VOCAB)] * 3, logit_bias={rng.randrange(VOCAB): 100.0}, temperature=1, seed=1),
            request([rng.randrange(VOCAB)] * 5, repetition_penalty=3.0, presence_penalty=2.0, frequency_penalty=-2.0),
            request([rng.randrange(VOCAB)] * 4, temperature=2.0, n=3, top_k=3, stop_token_ids=tuple(range(20))),
        ]
        streams = run(engine, attackers[0], request(victim), *attackers[1:])
        assert ids_of(streams[1]) == reference


def test_same_seed_same_text_alone_or_in_a_batch():
    kwargs = {"temperature": 1.5, "seed": 11, "top_p": 0.95}
    reference = alone([1, 2, 3], **kwargs)
    streams = run(make(), *[request(p, temperature=1.0) for p in PROMPTS[1:4]], request([1, 2, 3], **kwargs))
    assert ids_of(streams[-1]) == reference
    others = {tuple(alone([1, 2, 3], **(kwargs | {"seed": s}))) for s in range(20)}
    assert len(others) >= 19


def test_n_answers_are_seeds_seed_plus_i_and_share_the_prompt():
    engine = make()
    stream = run(engine, request(list(range(10)), n=4, temperature=1.5, seed=3))[0]
    for index in range(4):
        assert ids_of(stream, index) == alone(list(range(10)), temperature=1.5, seed=3 + index)
    assert engine.stats().num_prompt_tokens == 10
    usages = [e.usage.completion_tokens for e in collected(stream) if e.usage]
    assert usages == [12] * 4


@pytest.mark.parametrize("preempt_every", [0, 2])
def test_more_answers_than_places_on_few_pages(preempt_every):
    engine = make(num_pages=9, max_parallel=2, preempt_every=preempt_every)
    stream = run(engine, request(list(range(10)), n=5, temperature=1.5, seed=3))[0]
    assert [ids_of(stream, i) for i in range(5)] == [
        alone(list(range(10)), temperature=1.5, seed=3 + i) for i in range(5)
    ]


def test_stops():
    tokens = alone([1, 2, 3])
    stop = tokens[4]
    first = tokens.index(stop)
    stream = run(make(), request([1, 2, 3], stop_token_ids=(stop,)))[0]
    assert ids_of(stream) == tokens[: first + 1]
    assert (collected(stream)[-1].finish_reason, collected(stream)[-1].stop_reason) == (FinishReason.STOP, stop)
    stream = run(make(), request([1, 2, 3], eos_token_ids=frozenset({stop})))[0]
    assert ids_of(stream) == tokens[: first + 1]
    stream = run(make(), request([1, 2, 3], eos_token_ids=frozenset({stop}), ignore_eos=True))[0]
    assert ids_of(stream) == tokens
    stream = run(make(), request([1, 2, 3], eos_token_ids=frozenset(range(VOCAB)), max_tokens=1))[0]
    assert collected(stream)[-1].finish_reason is FinishReason.STOP
    stream = run(make(), request([1, 2, 3], stop_token_ids=tuple(range(5, VOCAB)), min_tokens=4))[0]
    assert len(ids_of(stream)) >= 4
    assert all(t < 5 for t in ids_of(stream)[:4])


class Letters:
    """A stop check over an alphabet: the last letter waits, as what may begin a stop string does."""

    def __init__(self, stop):
        self.stop, self.held, self.stop_text = stop, "", None

    def accept(self, token_id):
        self.held += chr(65 + token_id)
        if token_id == self.stop:
            self.stop_text, self.held = self.held[-1], self.held[:-1]
        return self.stop_text is not None

    def take(self, last=False):
        count = len(self.held) - (not last)
        text, self.held = self.held[:count], self.held[count:]
        return text

    def fork(self):
        return Letters(self.stop)


@pytest.mark.parametrize("stop", [None, 4])
def test_the_text_of_a_stop_check_comes_with_the_events(stop):
    tokens = alone([1, 2, 3])
    kept = tokens if stop is None else tokens[: tokens.index(tokens[stop])]
    stream = run(make(), request([1, 2, 3], stop_check=Letters(None if stop is None else tokens[stop])))[0]
    events = [e for e in collected(stream) if e.prefill is None]
    assert "".join(e.text for e in events) == "".join(chr(65 + t) for t in kept)
    assert len(events[-1].text) <= 2 and events[-1].stop_reason == (None if stop is None else chr(65 + tokens[stop]))


def test_length_is_clamped_to_the_context():
    stream = run(make(max_context=16), request(list(range(10)), max_tokens=None))[0]
    assert len(ids_of(stream)) == 6
    assert collected(stream)[-1].finish_reason is FinishReason.LENGTH


def test_logprobs_and_prompt_logprobs():
    engine = make()
    run(engine, request(list(range(10))))
    stream = run(engine, request(list(range(10)), logprobs=2, prompt_logprobs=1, max_tokens=2))[0]
    events = collected(stream)
    tokens = [e for e in events if e.token_ids]
    assert tokens[0].logprobs[0].top[0][0] == tokens[0].token_ids[0]
    assert len(tokens[0].logprobs[0].top) == 2
    both = collected(run(engine, request(list(range(10)), prompt_logprobs=1, max_tokens=2, n=2, temperature=1))[0])
    assert [len(e.prompt_logprobs) for e in both if e.prompt_logprobs] == [10]
    prompt = tokens[0].prompt_logprobs
    assert prompt[0] is None and len(prompt) == 10
    assert all(p.logprob <= 0 and len(p.top) == 1 for p in prompt[1:])
    assert [p.token_id for p in prompt[1:]] == list(range(1, 10))
    assert tokens[0].usage is None and events[-1].usage.cached_tokens == 0


@pytest.mark.parametrize("start", [4, 17, 18])
def test_what_stands_before_the_wanted_logprobs_comes_from_the_cache(start):
    prompt = [*range(18), 7, 7]
    whole = collected(run(make(), request(prompt, prompt_logprobs=1, max_tokens=1))[0])[-1].prompt_logprobs
    engine = make()
    run(engine, request(range(18), max_tokens=1))
    scored = request(prompt, prompt_logprobs=1, max_tokens=1, prompt_logprobs_from=start + 1)
    last = collected(run(engine, scored)[0])[-1]
    assert last.prompt_logprobs == [None, *whole[start + 1 :]]
    assert last.usage.cached_tokens == start // PAGE * PAGE


def test_score_gives_every_row_once_also_through_preemption():
    whole = run(make(), request(list(range(30)), score=True))[0]
    rows = torch.cat([torch.from_numpy(e.scores) for e in collected(whole) if e.scores is not None])
    assert rows.shape == (30, VOCAB)
    engine = make(score_rows=4, preempt_every=3)
    streams = run(engine, request([1, 2]), request(list(range(30)), score=True), request([3, 4]))
    again = torch.cat([torch.from_numpy(e.scores) for e in collected(streams[1]) if e.scores is not None])
    assert torch.equal(rows, again)
    assert torch.equal(
        torch.tensor(ids_of(run(make(), request(list(range(30)), max_tokens=1))[0])), rows[-1:].argmax(-1)
    )


def test_a_slow_reader_of_scores_holds_back_only_itself():
    engine = make(score_rows=4)
    slow = engine.submit(request(list(range(40)), score=True))
    other = engine.submit(request([1, 2, 3]))
    for _ in range(60):
        engine.run_once()
    assert slow.num_unread_pieces == 3
    assert ids_of(other) == alone([1, 2, 3])
    slow.seen = []
    drain(engine, slow)
    assert sum(len(e.scores) for e in slow.seen if e.scores is not None) == 40


def test_a_listener_that_fails_ends_its_request_only():
    def listener(event):
        raise RuntimeError("boom")

    engine = make()
    engine.submit(request([1, 2], max_tokens=None), listener=listener)
    other = engine.submit(request([1, 2, 3]))
    drain(engine)
    assert ids_of(other) == alone([1, 2, 3])
    assert engine.stats().num_running == 0


def test_a_window_smaller_than_a_page_without_full_attention_leaks_nothing():
    groups = (Group(30, 3),)
    runner = Runner(FakeModel(groups), FakeCache(groups), VOCAB)
    engine = ready(Engine(runner, [30], 200, SchedulerLimits(4, 7), check_invariants=True))
    rng = random.Random(3)
    for _ in range(10):
        prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
        streams = [engine.submit(request(p, max_tokens=rng.randrange(1, 20))) for p in prompts]
        drain(engine)
        assert all(collected(s)[-1].finish_reason for s in streams)
    engine.clear_prefix_cache()
    engine.run_once()
    assert engine.stats().pages_free == engine.stats().pages_total
    assert not engine.scheduler.pages.tree.num_nodes


def test_a_failing_forward_ends_its_batch_and_nothing_else():
    engine = make(broken=49, max_parallel=1)
    streams = run(engine, request([1, 2, 3]), request([49, 1]), request([4, 5]))
    assert [collected(s)[-1].finish_reason for s in streams] == ["length", "error", "length"]
    assert ids_of(streams[0]) == alone([1, 2, 3])
    error = collected(streams[1])[-1].error
    assert "0x" not in str(error) and "/home" not in str(error)
    assert ids_of(run(engine, request([6]))[0]) == alone([6])


class BadCheck:
    def __init__(self, after):
        self.after = after

    def accept(self, token_id):
        self.after -= 1
        if self.after < 0:
            raise ValueError("boom")
        return False

    def take(self, last=False):
        return ""

    def fork(self):
        return BadCheck(2)


def test_a_failing_stop_check_or_mask_ends_only_its_request():

    class BadMask:
        def fill(self, row):
            raise ValueError("boom")

        def accept(self, token_id):
            pass

    bad = request([1, 2], stop_check=BadCheck(3))
    masked = request([1, 2])
    masked.token_mask = BadMask()
    family = request([1, 2], stop_check=BadCheck(1), n=3, temperature=1.0)
    streams = run(make(), bad, request([1, 2, 3]), masked, request([4, 5]), family)
    ends = [[e.finish_reason for e in collected(s) if e.finish_reason] for s in streams]
    assert ends == [["error"], ["length"], ["error"], ["length"], ["error"] * 3]
    assert ids_of(streams[1]) == alone([1, 2, 3])
    assert ids_of(streams[3]) == alone([4, 5])


def test_masks_are_obeyed():
    class Only:
        def __init__(self):
            self.seen = []

        is_done = False

        def fill(self, row):
            row[0] = 1 << 7
            row[1] = 1 << (33 - 32)
            return True

        def accept(self, token_id):
            self.seen.append(token_id)

        def jump_forward(self, last=None):
            return [] if last is None else [last]

    one = request([1, 2, 3])
    one.token_mask = Only()
    tokens = ids_of(run(make(), one)[0])
    assert set(tokens) <= {7, 33} and one.token_mask.seen == tokens


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 9])
def test_abort_in_every_phase(turns):
    engine = make(max_parallel=2)
    victim = engine.submit(request([1, 2, 3]))
    others = [engine.submit(request(list(range(40)), n=2, temperature=1)), engine.submit(request([7, 8]))]
    for _ in range(turns):
        engine.run_once()
    for other in others:
        other.abort()
        other.abort()
    drain(engine)
    assert ids_of(victim) == alone([1, 2, 3])
    assert [e.finish_reason for e in collected(others[0]) if e.finish_reason] == ["abort", "abort"]
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total


@pytest.mark.one_in(3)
def test_random_faults_leak_nothing():
    rng = random.Random(4)

    def fault(step):
        if rng.random() < 0.1:
            raise rng.choice([MemoryError(), RuntimeError("x"), torch.OutOfMemoryError("out of memory")])

    engine = make(fault=fault, num_pages=24)
    for _ in range(15):
        streams = [engine.submit(request(rng.choice(PROMPTS), n=rng.choice([1, 1, 3]))) for _ in range(5)]
        if rng.random() < 0.3:
            rng.choice(streams).abort()
        drain(engine)
        for stream in streams:
            assert sum(e.finish_reason is not None for e in collected(stream)) == stream.request.params.n
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


@pytest.mark.parametrize(
    ("tokens", "params", "error"),
    [
        ([], {}, InvalidRequest),
        ([VOCAB], {}, InvalidRequest),
        ([-1], {}, InvalidRequest),
        ([True], {}, InvalidRequest),
        ([1], {"temperature": -1}, InvalidRequest),
        ([1], {"temperature": float("nan")}, InvalidRequest),
        ([1], {"top_p": 0.0}, InvalidRequest),
        ([1], {"top_k": -5}, InvalidRequest),
        ([1], {"n": 0}, InvalidRequest),
        ([1], {"n": 10**9}, InvalidRequest),
        ([1], {"n": True}, InvalidRequest),
        ([1], {"max_tokens": 0}, InvalidRequest),
        ([1], {"repetition_penalty": 0}, InvalidRequest),
        ([1], {"logit_bias": {VOCAB: 1.0}}, InvalidRequest),
        ([1], {"logit_bias": {1: 101.0}}, InvalidRequest),
        ([1], {"stop": ("",)}, InvalidRequest),
        ([1], {"stop": ("a",) * 17}, InvalidRequest),
        ([1], {"stop": ("a" * 257,)}, InvalidRequest),
        ([1], {"stop_token_ids": (VOCAB,)}, InvalidRequest),
        ([1], {"logprobs": 21}, InvalidRequest),
        ([1], {"seed": 2**70}, InvalidRequest),
        ([1], {"min_tokens": 9, "max_tokens": 3}, InvalidRequest),
        ([1] * 200, {}, ContextTooLong),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(tokens, params, error):
    engine = make()
    with pytest.raises(error) as caught:
        engine.submit(request(tokens, **params))
    assert caught.value.hint
    assert engine.is_idle and engine.stats().num_waiting == 0


def test_a_prompt_larger_than_the_pool_is_refused_at_once():
    with pytest.raises(OutOfMemory):
        make(num_pages=4).submit(request([1] * 40))


def test_a_text_that_is_never_cut_is_read_alone_or_fails():
    """Those that are longer than the budget together wait for each other; one that memory has no room for ends."""
    engine = make(whole=True, prefill_budget=24, prefix_cache=False)
    run(engine, *(request([1] * length, max_tokens=1) for length in (20, 4, 30, 9)))
    assert engine.stats().num_steps == 3  # 20 and 4, then 30 alone, which is more than the budget
    engine = make(whole=True, prefill_budget=64)
    engine.runner.model.most_tokens = 16
    stream = engine.submit(request([1] * 40, max_tokens=1))
    while not engine.is_idle:
        engine.run_once()
    assert collected(stream)[-1].finish_reason == "error" and engine.stats().num_relieved == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nmore", "its memory has an uncorrectable error"),
        pytest.param("CUDA error: unknown error", "the driver lost the GPU or was reset", marks=pytest.mark.slow),
        pytest.param(
            "CUDA error: all CUDA-capable devices are busy or unavailable",
            "another process uses it exclusively",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_lost_card_ends_the_engine_with_the_cause(said, words):
    """In a step, and between requests: nothing is answered from what it holds."""

    def lost(*_):
        raise RuntimeError(said)

    engine = make()
    engine.start()
    run_before = engine.submit(request([1, 2, 3], max_tokens=1))
    collected(run_before)
    engine.when_idle(lost)
    engine.join(10)
    assert engine.is_dead and words in engine.failure and "more" not in engine.failure
    with pytest.raises(DeviceError):
        engine.submit(request([1, 2, 3]))
    engine = make(fault=lost)
    stream = engine.submit(request([1, 2, 3]))
    with pytest.raises(DeviceError, match=words):
        engine.run_once()
    engine.close()
    del stream


def test_thread_streams_and_close_ends_everything():
    engine = make()
    engine.start()
    assert ids_of(engine.submit(request([1, 2, 3]))) == alone([1, 2, 3])
    seen = []
    done = threading.Event()
    engine.submit(request([1, 2]), listener=lambda e: (seen.append(e), e.finish_reason and done.set()))
    assert done.wait(10)
    assert [t for e in seen for t in e.token_ids] == alone([1, 2])
    streams = [engine.submit(request([i, 2], max_tokens=None)) for i in range(8)]
    engine.close()
    for stream in streams:
        assert collected(stream)[-1].finish_reason in ("abort", "length")
    with pytest.raises(DeviceError):
        engine.submit(request([1]))


def test_ahead_is_ahead():
    engine = make()
    run(engine, *[request(p) for p in PROMPTS])
    stats = engine.stats()
    if runs_ahead[0] and not guesses[0]:  # a step with guesses is waited for
        assert stats.num_ahead > 0.6 * stats.num_steps
    assert runs_ahead[0] or stats.num_ahead == 0
    assert (stats.num_accepted_tokens > 0) == guesses[0]


def test_an_answer_tells_of_all_its_guesses_also_those_of_its_last_step():
    engine = make()
    asked = [request(p, max_tokens=n) for p in PROMPTS for n in (2, 5, 12)]
    streams = [*run(engine, *asked), *run(engine, *asked)]  # guessed wrong, and then right
    told, stats = [collected(s)[-1].timing for s in streams], engine.stats()
    assert sum(t.draft_tokens for t in told) == stats.num_draft_tokens
    assert sum(t.accepted_tokens for t in told) == stats.num_accepted_tokens


def test_memory_that_runs_out_in_use_makes_steps_smaller_and_ends_nothing(monkeypatch):
    """preempt, shrink, tell: every request gets the tokens of a lone one"""
    engine = make(prefill_budget=64)
    engine.runner.model.most_sequences, engine.runner.model.most_tokens = 2, 18
    assert engine.pressure.note == ""
    prompts = [*PROMPTS, list(range(50))]
    streams = run(engine, *[request(p) for p in prompts])
    assert [ids_of(s) for s in streams] == [alone(p) for p in prompts]
    assert engine.scheduler.limits.max_parallel == 2
    assert "2 of 4 sequences" in engine.pressure.note and "chunks of" in engine.pressure.note
    assert engine.stats().num_relieved >= 2
    engine.runner.model.most_sequences = engine.runner.model.most_tokens = 10**9
    monkeypatch.setattr(pressure, "GOOD_STEPS", 8)
    run(engine, *[request(p, max_tokens=30) for p in PROMPTS])
    assert engine.pressure.note == ""


def test_memory_that_does_not_even_suffice_for_one_token_fails_the_request_only():
    engine = make()
    engine.runner.model.most_tokens = 0
    streams = run(engine, *[request(p) for p in PROMPTS[:3]])
    assert [type(collected(s)[-1].error) for s in streams] == [OutOfMemory] * 3
    engine.runner.model.most_tokens = 10**9
    assert ids_of(run(engine, request([1, 2, 3]))[0]) == alone([1, 2, 3])


def test_a_lost_device_ends_the_engine_and_says_so():

    def fault(step):
        if step == 4:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nat line 3")

    engine = make(fault=fault)
    streams = [engine.submit(request(p)) for p in PROMPTS[:2]]
    engine.start()
    for stream in streams:
        assert isinstance(collected(stream)[-1].error, DeviceError)
    engine.join(5)
    assert engine.is_dead
    with pytest.raises(DeviceError):
        engine.submit(request([1]))


def test_pages_that_cannot_be_given_back_keep_no_request_from_its_end(monkeypatch):
    engine = make()
    monkeypatch.setattr(engine._pages, "release", lambda sequence: 1 / 0)
    streams = [engine.submit(request(p, n=2)) for p in PROMPTS[:3]]
    engine.start()
    engine.join(5)
    assert engine.is_dead and all(stream.is_done for stream in streams)
    for stream in streams:
        ends = [event for event in stream if event.finish_reason is not None]
        assert sorted(event.index for event in ends) == [0, 1]


def test_a_request_that_cannot_be_taken_in_ends_alone(monkeypatch):
    engine = make()
    monkeypatch.setattr(engine.scheduler, "add", lambda sequence: 1 / 0)
    bad = engine.submit(request([1, 2], n=2))
    engine.run_once()
    monkeypatch.undo()
    good = run(engine, request([1, 2]))[0]
    assert [(e.index, e.finish_reason) for e in bad] == [(0, FinishReason.ERROR), (1, FinishReason.ERROR)]
    assert ids_of(good) == alone([1, 2])


def test_prompts_that_are_not_looked_up_count_as_no_query_of_the_prefix_cache():
    engine, prompt = make(), list(range(20))
    run(engine, Request(prompt, SamplingParams(max_tokens=1), score=True))
    run(engine, Request(prompt, SamplingParams(max_tokens=1), use_prefix_cache=False))
    assert engine.stats().prefix_query_tokens == 0
    run(engine, request(prompt))
    assert (engine.stats().prefix_query_tokens, engine.stats().prefix_hit_tokens) == (20, 16)


def test_salts_of_prompts_that_fill_no_page_leave_nothing():
    engine = make()
    for number in range(20):
        run(engine, request([1, 2], max_tokens=1, cache_salt=f"salt {number}"))
    assert not engine._pages.tree._roots


def test_a_fault_outside_requests_kills_the_engine_and_tells_everyone(monkeypatch):
    engine = make()
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
    stream = engine.submit(request([1, 2]))
    engine.start()
    assert collected(stream)[-1].finish_reason is FinishReason.ERROR
    engine.join(5)
    assert engine.is_dead
    with pytest.raises(DeviceError):
        engine.submit(request([1]))
