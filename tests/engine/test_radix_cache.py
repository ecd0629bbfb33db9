import random

from localllm.engine.page_pool import PagePool
from localllm.engine.radix_cache import RadixCache

PAGE = 2


def fill(tree, pool, tokens, salt=""):
    node = tree.root(salt)
    for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
        page = pool.take()
        assert page is not None
        node, used = tree.insert(node, tuple(tokens[start : start + PAGE]), [page])
        pool.release(used[0])


def test_longest_prefix_wins_and_the_limit_is_kept():
    pool = PagePool(8)
    tree = RadixCache([pool], [None], PAGE)
    fill(tree, pool, [1, 2, 3, 4, 5, 6])
    assert len(tree.match([1, 2, 3, 4, 9, 9], "", 6)) == 2
    assert len(tree.match([1, 2, 3, 4, 5, 6], "", 5)) == 2
    assert tree.match([2, 1], "", 2) == []


def test_a_second_copy_is_exchanged_for_the_first():
    pool = PagePool(4)
    tree = RadixCache([pool], [None], PAGE)
    fill(tree, pool, [1, 2])
    mine = pool.take()
    node, used = tree.insert(tree.root(""), (1, 2), [mine])
    assert used == node.pages != [mine]
    assert pool.refs[mine] == 0
    pool.release(used[0])
    tree.check_integrity()


def test_eviction_takes_the_oldest_leaf_nobody_uses():
    pool = PagePool(40)
    tree = RadixCache([pool], [None], PAGE)
    for i in range(20):
        fill(tree, pool, [i, i, 99, i])
    held = tree.match([0, 0, 99, 0], "", 4)[-1].pages[0]
    pool.retain(held)
    assert tree.evict(0, 20) >= 20
    assert len(tree.match([0, 0, 99, 0], "", 4)) == 2
    pool.release(held)
    tree.check_integrity()
    tree.clear()
    assert pool.num_free == 40


def test_equal_hashes_do_not_confuse_prefixes():
    """Keys are compared, not only hashed (-1 and -2 hash alike in Python)."""
    assert hash(-1) == hash(-2)
    pool = PagePool(4)
    tree = RadixCache([pool], [None], PAGE)
    fill(tree, pool, [-1, -1])
    assert tree.match([-2, -2], "", 2) == []
    assert len(tree.match([-1, -1], "", 2)) == 1


def test_random_inserts_and_evictions_keep_the_books():
    rng = random.Random(1)
    pool = PagePool(30)
    tree = RadixCache([pool], [None], PAGE)
    for _ in range(400):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 12))]
        need = len(tokens) // PAGE
        if pool.num_free < need:
            tree.evict(0, need)
        if pool.num_free >= need:
            fill(tree, pool, tokens)
        assert len(tree.match(tokens, "", len(tokens))) <= need
        tree.check_integrity()
        pool.check_integrity({})
