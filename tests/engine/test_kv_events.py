"""Events against what they are about: who replays them knows exactly the pages of the tree."""

import random

from localllm.engine.kv_events import KVEvents, block_hash
from localllm.engine.page_pool import PagePool
from localllm.engine.radix_cache import RadixCache

PAGE = 2


def replayed(batches):
    """hash -> (hash of what it follows, its tokens), as a subscriber keeps it."""
    known = {}
    for batch in batches:
        for event in batch["events"]:
            if event["type"] == "BlockStored":
                assert event["block_size"] == PAGE and event["medium"] == "CPU" and event["lora_id"] is None
                above = event["parent_block_hash"]
                for at, one in enumerate(event["block_hashes"]):
                    assert above is None or above in known
                    known[one] = above, event["token_ids"][at * PAGE : (at + 1) * PAGE]
                    above = one
            elif event["type"] == "BlockRemoved":
                for one in event["block_hashes"]:
                    del known[one]
            else:
                assert event == {"type": "AllBlocksCleared"}
                known.clear()
    return known


def insert(tree, pool, tokens):
    node = tree.root("")
    for start in range(0, len(tokens), PAGE):
        page = pool.take() or (tree.evict(0, 1) and pool.take())
        node, used = tree.insert(node, tuple(tokens[start : start + PAGE]), [page])
        pool.release(used[0])


def test_events_say_what_the_tree_holds_whenever_somebody_begins_to_watch():
    pool = PagePool(40)
    tree = RadixCache([pool], [None], PAGE)
    events, early, late, rng = KVEvents(tree, "CPU"), [], [], random.Random(1)
    insert(tree, pool, [1, 2, 3, 4])
    assert not tree.watchers
    events.add(early.append)
    for step in range(60):
        insert(tree, pool, [rng.randrange(3) for _ in range(2 * rng.randrange(1, 5))])
        if step == 30:
            events.add(late.append)
        if step % 3 == 0:
            events.flush()
    events.flush()
    held = {
        block_hash(node): (block_hash(node.parent) if node.parent.parent else None, list(node.key))
        for node in tree.nodes()
    }
    assert replayed(early) == replayed(late) == held and len(held) > 20
    assert any(event["type"] == "BlockRemoved" for batch in early for event in batch["events"])
    assert any(len(event["block_hashes"]) > 1 for batch in early for event in batch["events"])
    tree.clear()
    events.flush()
    assert early[-1]["events"] == [{"type": "AllBlocksCleared"}]
    events.drop(early.append)
    events.end()
    assert late[-1] is None
    for listener in [*events._listeners]:
        events.drop(listener)
    assert not tree.watchers


def test_the_place_of_an_image_has_no_token():
    pool = PagePool(4)
    tree = RadixCache([pool], [None], PAGE)
    told = []
    KVEvents(tree, "CPU").add(told.append)
    events = KVEvents(tree, "CPU")
    insert(tree, pool, [5, -(1 << 96)])
    events.add(told.append)
    assert told[-1]["events"][0]["token_ids"] == [5, -1]
