"""The scheduler, the pages and the tree against a memory of integers: no torch, no model.

`Memory` is what the K/V cache would be: a step writes its token ids into the slots of its pages. Before each step every
page that a query would read must hold just the ids of the sequence, whatever was shared, copied, evicted or preempted.
"""

import random

import pytest

from localllm.engine.pages import Pages
from localllm.engine.scheduler import Scheduler, SchedulerLimits
from localllm.engine.sequence import Sequence
from localllm.request import PromptImage, Request, SamplingParams

PAGE = 4


class Memory:
    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.slots = [[None] * (pool.num_pages * PAGE) for pool in pages.pools]

    def run(self, step):
        for copy in step.copies:
            slots = self.slots[copy.group]
            slots[copy.target * PAGE : (copy.target + 1) * PAGE] = slots[copy.source * PAGE : (copy.source + 1) * PAGE]
        for part in step.scheduled:
            for position in range(part.start, part.start + part.num_tokens):
                for group, table in enumerate(part.sequence.block_tables):
                    page = table[position // PAGE]
                    assert page >= 0
                    shared = self.pages.pools[group].refs[page] > 1
                    slot = page * PAGE + position % PAGE
                    assert not shared, "a shared page is written"
                    self.slots[group][slot] = part.sequence.token_ids[position]
        for part in step.scheduled:
            self.check(part)

    def check(self, part):
        tokens = part.sequence.token_ids
        for group, window in enumerate(self.pages.windows):
            table = part.sequence.block_tables[group]
            for query in range(part.start, part.start + part.num_tokens):
                first = 0 if window is None else max(0, query - window + 1)
                for key in range(first, query + 1):
                    page = table[key // PAGE]
                    assert page >= 0, f"query {query} reads key {key}, whose page was given back"
                    assert self.slots[group][page * PAGE + key % PAGE] == tokens[key]


def build(num_pages=32, window=None, **limits):
    windows = [None, window] if window else [None]
    pages = Pages([num_pages] * len(windows), windows, PAGE)
    scheduler = Scheduler(pages, SchedulerLimits(**limits))
    return scheduler, Memory(pages)


def sequence(scheduler, tokens, index=0, **request):
    request = Request(list(tokens), SamplingParams(), **request)
    return Sequence(request, index, len(scheduler.pages.pools), 0, 1000)


def advance(scheduler, memory, next_token=lambda s: len(s.token_ids) % 7):
    step = scheduler.schedule()
    memory.run(step)
    scheduler.commit(step)
    ended = [p.sequence for p in step.scheduled if p.sequence.num_uncomputed_tokens == 0]
    for one in ended:
        one.append(next_token(one))
    scheduler.check_integrity()
    return step, ended


def test_prefill_is_chunked_under_the_budget_and_decode_goes_first():
    scheduler, memory = build(max_parallel=2, prefill_budget=5)
    first, second = sequence(scheduler, range(7)), sequence(scheduler, range(100, 112))
    scheduler.add(first)
    scheduler.add(second)
    assert [(p.sequence, p.num_tokens) for p in advance(scheduler, memory)[0].scheduled] == [(first, 5)]
    assert [(p.sequence, p.num_tokens) for p in advance(scheduler, memory)[0].scheduled] == [(first, 2), (second, 3)]
    assert [(p.sequence, p.num_tokens) for p in advance(scheduler, memory)[0].scheduled] == [(first, 1), (second, 5)]


def test_second_request_reuses_the_full_pages_of_the_first():
    scheduler, memory = build(max_parallel=4, prefill_budget=64)
    first = sequence(scheduler, range(18))
    scheduler.add(first)
    advance(scheduler, memory)
    second = sequence(scheduler, [*range(16), 50, 51])
    scheduler.add(second)
    step, _ = advance(scheduler, memory)
    part = next(p for p in step.scheduled if p.sequence is second)
    assert (part.start, second.num_cached_tokens) == (16, 16)
    assert second.block_tables[0][:4] == first.block_tables[0][:4]


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token():
    scheduler, memory = build(max_parallel=4, prefill_budget=64)
    for _ in range(2):
        one = sequence(scheduler, range(16))
        scheduler.add(one)
        advance(scheduler, memory)
    assert one.num_cached_tokens == 12


def test_salts_do_not_share():
    scheduler, memory = build(max_parallel=4, prefill_budget=64)
    for salt, cached in (("a", 0), ("b", 0), ("a", 16), ("", 0)):
        one = sequence(scheduler, range(18), cache_salt=salt)
        scheduler.add(one)
        advance(scheduler, memory)
        assert one.num_cached_tokens == cached


def test_window_pages_are_given_back_and_a_hit_needs_only_the_last_window():
    scheduler, memory = build(num_pages=64, window=8, max_parallel=2, prefill_budget=8)
    first = sequence(scheduler, range(40))
    scheduler.add(first)
    for _ in range(5):
        advance(scheduler, memory)
    assert first.block_tables[1][:7] == [-1] * 7
    assert -1 not in first.block_tables[0]
    scheduler.remove(first)
    scheduler.pages.tree.evict(1, 4)
    scheduler.check_integrity()
    second = sequence(scheduler, range(41))
    scheduler.add(second)
    advance(scheduler, memory)
    assert second.num_cached_tokens == 0 or second.num_cached_tokens >= 8


def test_forks_share_until_they_write():
    scheduler, memory = build(max_parallel=4, prefill_budget=64)
    parent = sequence(scheduler, range(6))
    scheduler.add(parent)
    advance(scheduler, memory)
    children = [Sequence(parent.request, i, 1, i, 1000) for i in (1, 2)]
    for child in children:
        scheduler.add_fork(child, parent)
        child.append(90 + child.index)
    scheduler.check_integrity()
    assert children[0].block_tables == parent.block_tables
    step, _ = advance(scheduler, memory)
    assert len(step.copies) == 2, "the last holder writes in place"
    assert len({s.block_tables[0][1] for s in (parent, *children)}) == 3
    assert len({s.block_tables[0][0] for s in (parent, *children)}) == 1


def test_a_lone_sequence_without_room_is_reported_not_stuck():
    scheduler, memory = build(num_pages=2, max_parallel=2, prefill_budget=64)
    one = sequence(scheduler, range(7))
    scheduler.add(one)
    advance(scheduler, memory)
    advance(scheduler, memory)
    step = scheduler.schedule()
    assert step.out_of_pages == [one]
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_a_preempted_answer_takes_no_more_pages_of_a_window_than_a_chunk_of_a_prompt():
    pages = Pages([32, 4], [None, 6], PAGE)  # as planned: the window and a chunk, and a page for unaligned starts
    scheduler = Scheduler(pages, SchedulerLimits(prefill_budget=4))
    memory, one = Memory(pages), sequence(scheduler, range(8))
    scheduler.add(one)
    while one.num_output_tokens < 20:
        advance(scheduler, memory)
    scheduler.preempt_latest()
    pages.tree.clear()
    before = one.num_output_tokens
    while one.num_output_tokens == before:
        assert not advance(scheduler, memory)[0].out_of_pages


def test_an_image_is_computed_at_once_also_after_a_preemption():
    scheduler, memory = build(prefill_budget=4)
    one = sequence(scheduler, range(20), images=(PromptImage(6, 15, None, b"image"),))
    scheduler.add(one)
    while one.num_output_tokens < 3:
        advance(scheduler, memory)
    scheduler.preempt_latest()
    scheduler.pages.tree.clear()
    ends = []
    while one.num_uncomputed_tokens != 1:
        step, _ = advance(scheduler, memory)
        ends += [part.start + part.num_tokens for part in step.scheduled]
    assert ends == [4, 6, 15, 19, 23]


def test_priority_goes_first_and_is_preempted_last():
    scheduler, memory = build(num_pages=6, max_parallel=1, prefill_budget=64)
    low, high = sequence(scheduler, range(4)), sequence(scheduler, range(50, 54), priority=5)
    scheduler.add(low)
    scheduler.add(high)
    assert advance(scheduler, memory)[0].scheduled[0].sequence is high


@pytest.mark.one_in(3)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(seed, window):
    """Prompt trees, forks, aborts, preemption, eviction; every read is of the right token."""
    rng = random.Random(seed)
    every = rng.choice([0, 3])
    scheduler, memory = build(
        num_pages=rng.choice([14, 24]),
        window=window,
        max_parallel=rng.choice([2, 5]),
        prefill_budget=rng.choice([3, 16]),
        preempt_every=every,
    )
    stems = [[rng.randrange(3) for _ in range(16)] for _ in range(3)]
    finished = submitted = 0
    for turn in range(900):
        if rng.random() < 0.3 and submitted < 120 and len(scheduler.waiting) < 6:
            stem = rng.choice(stems)[: rng.randrange(17)]
            prompt = stem + [rng.randrange(5) for _ in range(rng.randrange(1, 8))]
            one = sequence(scheduler, prompt, priority=rng.randrange(2))
            one.max_tokens = rng.randrange(1, 12)
            one.pending_forks = rng.choice([0, 0, 0, 2])
            scheduler.add(one)
            submitted += 1
        if rng.random() < 0.03 and scheduler.sequences():
            scheduler.remove(rng.choice(scheduler.sequences()))
            finished += 1
        _, ended = advance(scheduler, memory, lambda s: rng.randrange(5))
        for one in ended:
            for index in range(one.pending_forks):
                child = Sequence(one.request, index + 1, len(scheduler.pages.pools), 0, one.max_tokens)
                one.token_ids.pop()
                scheduler.add_fork(child, one)
                one.token_ids.append(one.num_prompt_tokens)
                child.append(rng.randrange(5))
            one.pending_forks = 0
            if one.num_output_tokens >= one.max_tokens and one in scheduler.sequences():
                scheduler.remove(one)
                finished += 1
        scheduler.check_integrity()
        if turn > 600 and not scheduler.has_work:
            break
    for one in scheduler.sequences():
        scheduler.remove(one)
    scheduler.pages.tree.clear()
    for pool in scheduler.pages.pools:
        assert pool.num_free == pool.num_pages, "pages leaked"
    assert scheduler.pages.tree.num_nodes == 0
