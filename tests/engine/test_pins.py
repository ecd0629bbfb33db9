"""What is pinned leaves the cache last, by priority, until its time is over; but it leaves before a request fails."""

import math
import random

import pytest

from localllm.engine import pins as module
from localllm.engine import radix_cache
from localllm.engine.pages import Pages
from localllm.engine.pins import PinBoard
from localllm.errors import InvalidRequest

PAGE = 2


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    for one in (module, radix_cache):
        monkeypatch.setattr(one.time, "monotonic", lambda: now[0])
    return now


def make(num_pages=40, windows=(None,)):
    pages = Pages([num_pages] * len(windows), list(windows), PAGE)
    return pages, PinBoard(pages, lambda call: call())


def fill(pages, tokens, salt=""):
    node = pages.tree.root(salt)
    for key in pages.tree.keys(tokens):
        taken = [pool.take() for pool in pages.pools]
        node, used = pages.tree.insert(node, key, taken)
        for pool, page in zip(pages.pools, used, strict=True):
            pool.release(page)


def there(pages, tokens, salt=""):
    return len(pages.tree.match(tokens, salt, len(tokens))) == len(tokens) // PAGE


def prefix(number):
    return [number, 1, number, 2, number, 3]


def test_eviction_goes_by_priority_then_by_use():
    pages, board = make()
    high, low = board.add(prefix(1), 9), board.add(prefix(2), 2)  # before and after their pages are there
    for number in range(1, 13):
        fill(pages, prefix(number))
    pages.tree.evict(0, 30)
    assert not any(there(pages, prefix(number)) for number in range(3, 13))
    assert there(pages, prefix(1)) and there(pages, prefix(2))
    pages.tree.evict(0, 2)
    assert there(pages, prefix(1)) and not there(pages, prefix(2))
    pages.tree.evict(0, 6)  # a sequence needs all of them
    assert not there(pages, prefix(1)) and board.all() == [high, low]
    fill(pages, prefix(1))
    fill(pages, prefix(3))
    pages.tree.evict(0, 3)
    assert there(pages, prefix(1)) and not there(pages, prefix(3))
    pages.tree.check_integrity()


def test_pages_of_windows_are_pinned_too():
    pages, board = make(windows=(None, 4))
    board.add(prefix(1))
    for number in range(1, 13):
        fill(pages, prefix(number))
    assert pages.tree.evict(1, 33) == 33
    assert there(pages, prefix(1)) and not there(pages, prefix(2))
    assert pages.tree.evict(1, 3) == 3 and not there(pages, prefix(1))
    pages.tree.check_integrity()


def test_a_pin_ends_with_its_time_or_when_it_is_released(clock):
    pages, board = make(12)
    board.add(prefix(1), seconds=60)
    kept = board.add(prefix(2))
    for number in (1, 2, 3):
        fill(pages, prefix(number))
    pages.tree.match(prefix(1), "", 6)
    clock[0] += 59
    pages.tree.evict(0, 3)
    assert there(pages, prefix(1)) and there(pages, prefix(2)) and not there(pages, prefix(3))
    clock[0] += 2
    pages.tree.evict(0, 3)
    assert there(pages, prefix(2)) and not there(pages, prefix(1))
    assert board.all() == [kept] and kept.until == math.inf
    assert board.remove(kept.pin_id) and not board.remove(kept.pin_id) and board.all() == []
    assert all(node.pins is None for node in pages.tree.nodes()) and not pages.tree._pins


def test_pins_that_share_pages_are_counted_and_released_each_by_itself():
    pages, board = make(8)  # four may be pinned
    long = board.add([1, 1, 2, 2, 3, 3])
    short = board.add([1, 1, 2, 2, 9])
    branch = board.add([1, 1, 2, 2, 4, 4], 5)
    limit = "4 pins would cover 5 of 8 pages, but at most 1,000 pins and 4 pages"
    with pytest.raises(InvalidRequest, match=limit) as found:
        board.add([7, 7])
    assert found.value.hint and len(board.all()) == 3
    for tokens in (long.token_ids, branch.token_ids):
        fill(pages, tokens)
    board.remove(branch.pin_id)
    board.remove(long.pin_id)
    assert [node.pins is not None for node in pages.tree.match([1, 1, 2, 2, 3, 3], "", 6)] == [True, True, False]
    board.add([7, 7])
    board.remove(short.pin_id)
    assert list(pages.tree._pins) == [(7, 7)]


def test_what_cannot_be_pinned_is_named():
    _, board = make()
    with pytest.raises(InvalidRequest, match="the prefix has 1 token, but a page has 2"):
        board.add([5])
    with pytest.raises(InvalidRequest, match="the prefix cache of this model is off"):
        PinBoard(Pages([8], [None], PAGE, prefix_cache=False), lambda call: call()).add([1, 2])


def test_any_pins_leave_the_room_that_is_promised():
    """Pages are found as without pins, whatever is pinned, and prompts with a salt are not pinned."""
    draw = random.Random(4)
    pages, board = make(24)
    for turn in range(200):
        tokens = [draw.randrange(3) for _ in range(2 * draw.randrange(1, 9))]
        try:
            board.add(tokens, draw.randrange(1, 4))
        except InvalidRequest:
            for pin in board.all()[:2]:
                board.remove(pin.pin_id)
        for salt in ("", "s"):
            short = len(tokens) // PAGE - pages.pools[0].num_free
            assert short <= 0 or pages.tree.evict(0, short) >= short, turn
            fill(pages, tokens, salt)
        assert all(node.pins is None for node in pages.tree.match(tokens, "s", len(tokens)))
        pages.tree.check_integrity()
