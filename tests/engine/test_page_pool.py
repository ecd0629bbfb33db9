import random
from collections import Counter

import pytest

from localllm.engine.page_pool import PagePool


def test_take_until_empty_then_none():
    pool = PagePool(2)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, None]
    pool.release(1)
    assert pool.take() == 1


def test_tree_pages_count_as_available_only_when_nobody_else_holds_them():
    pool = PagePool(2)
    page = pool.take()
    pool.enter_tree(page)
    assert (pool.num_free, pool.num_available) == (1, 1)
    pool.release(page)
    assert (pool.num_free, pool.num_available) == (1, 2)
    pool.retain(page)
    assert pool.num_available == 1
    pool.release(page)
    pool.leave_tree(page)
    assert (pool.num_free, pool.num_available) == (2, 2)


def test_double_release_is_caught():
    pool = PagePool(1)
    page = pool.take()
    pool.release(page)
    with pytest.raises(AssertionError):
        pool.release(page)


def test_random_operations_keep_the_books():
    rng = random.Random(0)
    pool = PagePool(12)
    held: Counter[int] = Counter()
    for _ in range(3000):
        action = rng.randrange(5)
        pages = [p for p in held if held[p] > 0]
        if action == 0 and (page := pool.take()) is not None:
            held[page] += 1
        elif action == 1 and pages:
            page = rng.choice(pages)
            pool.retain(page)
            held[page] += 1
        elif action == 2 and pages:
            page = rng.choice(pages)
            pool.release(page)
            held[page] -= 1
        elif action == 3 and pages:
            page = rng.choice(pages)
            if not pool.in_tree[page]:
                pool.enter_tree(page)
        elif action == 4:
            cached = [p for p in range(12) if pool.in_tree[p]]
            if cached:
                pool.leave_tree(rng.choice(cached))
        pool.check_integrity(+held)


def test_pages_freed_last_are_taken_first() -> None:
    """They have their memory already."""
    pool = PagePool(4)
    first, second = pool.take(), pool.take()
    assert first is not None and second is not None
    pool.release(first)
    pool.release(second)
    assert pool.take() == second
    assert pool.take() == first
    assert pool.take() == 2


def test_withdrawn_pages_are_those_that_nothing_has_touched() -> None:
    pool = PagePool(4)
    page = pool.take()
    assert page == 0
    pool.release(page)
    assert pool.withdraw(2) == 2
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, None]
