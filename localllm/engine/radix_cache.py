"""The prefix tree: which pages hold the keys and values of which tokens. No torch.

A node is one full page: the edge to it is the page's token ids, below a root per salt (salt and model identity never
mix). It holds one page id per cache group. A full-attention group needs every page of a prefix; a window group of W
tokens only the pages of its last W tokens, so a node may have lost its page of such a group (None).

Of a model whose layers keep states, a few nodes hold a checkpoint, too: the slot with the states after their last
token. A prefix then ends at a node that has one.

Sequences that use a node's pages hold references of their own, and hold all pages of the full group up to their end;
therefore a node whose first-group page is held by the tree alone has no user below it, and eviction may take leaves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from .invariant import violated
from .page_pool import PagePool

# nodes evicted at least, once eviction starts: it scans the tree, so it should not run for every single page
EVICT_BATCH = 16


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A prefix whose full pages are evicted after those of lesser priority; unpinned ones have 0."""

    token_ids: tuple[int, ...]
    priority: int = 1
    until: float = math.inf  # on the monotonic clock
    pin_id: str = ""


class Pins(dict[tuple[int, ...], "Pins"]):
    """Pinned paths: the key of a page -> what is pinned below it. `held`: the pins that this page is of."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Pin] = []

    @property
    def priority(self) -> int:
        now = time.monotonic()
        return max((pin.priority for pin in self.held if pin.until > now), default=0)


def root_digest(salt: str) -> bytes:
    """What the first page of a prompt with this salt follows."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def digest_after(parent: bytes, key: tuple[int, ...]) -> bytes:
    """A name for the tokens `key` behind all those that `parent` names, the same in every process."""
    return blake2b(parent + repr(key).encode(), digest_size=16).digest()


class Node:
    """One page of tokens in the tree."""

    __slots__ = ("_digest", "children", "key", "last_used", "pages", "parent", "pins", "slot")

    def __init__(self, parent: Node | None, key: tuple[int, ...], pages: list[int | None]) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.children: dict[tuple[int, ...], Node] = {}
        self.last_used = 0
        self.slot: int | None = None  # of its checkpoint
        self.pins: Pins | None = None  # what is pinned below; None for a node that is not on a pinned path
        self._digest = b""

    @property
    def digest(self) -> bytes:
        """Names all tokens up to the end of this page, and their salt. Not of a node that has left the tree."""
        path, node = [], self
        while not node._digest:
            assert node.parent is not None, "it left the tree before anybody asked"
            path.append(node)
            node = node.parent
        for below in reversed(path):
            assert below.parent is not None
            below._digest = digest_after(below.parent._digest, below.key)
        return self._digest

    @property
    def rank(self) -> tuple[int, int]:
        """Order of eviction: pinned ones last, by their priority, else the least recently used first."""
        return (0 if self.pins is None else self.pins.priority), self.last_used


class Watcher(Protocol):
    """Is told what the tree gains and loses, in the engine's thread; what it raises ends the engine."""

    def stored(self, node: Node) -> None: ...  # a page
    def kept(self, node: Node) -> None: ...  # the states behind it
    def removed(self, node: Node) -> None: ...  # about to leave


class RadixCache:
    """Prefixes over the page pools of all cache groups.

    pools     one per cache group
    windows   per group: None for full attention, else the window in tokens
    slots     of checkpoints and sequences; None for a model that keeps no states
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        windows: Sequence[int | None],
        page_size: int,
        slots: PagePool | None = None,
    ) -> None:
        self.pools = tuple(pools)
        self.slots = slots
        self.windows = tuple(windows)
        self.page_size = page_size
        self._roots: dict[str, Node] = {}
        self._pins = Pins()
        self.watchers: list[Watcher] = []
        self._clock = 0
        self.num_nodes = 0
        self.num_query_tokens = 0
        self.num_hit_tokens = 0  # counted by the scheduler, once per admitted request

    def root(self, salt: str) -> Node:
        """The root for a salt, made when first asked for."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(None, (), [])
            node._digest = root_digest(salt)
            node.pins = self._pins if salt == "" else None
        return node

    def pin(self, pin: Pin) -> None:
        """Evict the full pages of this prefix, of prompts without a salt, by the pin's priority."""
        pins, node = self._pins, self._roots.get("")
        for key in self.keys(pin.token_ids):
            pins = pins.setdefault(key, Pins())
            pins.held.append(pin)
            node = None if node is None else node.children.get(key)
            if node is not None:
                node.pins = pins

    def unpin(self, pin: Pin) -> None:
        """The opposite, for one that was pinned."""
        above, node = self._pins, self._roots.get("")
        for key in self.keys(pin.token_ids):
            pins = above[key]
            pins.held.remove(pin)
            node = None if node is None else node.children.get(key)
            if not pins.held:  # nor is anything below held by another
                del above[key]
                if node is not None:
                    node.pins = None
            above = pins

    def keys(self, token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Of the full pages of these tokens."""
        size = self.page_size
        return (tuple(token_ids[start : start + size]) for start in range(0, len(token_ids) // size * size, size))

    def match(self, token_ids: Sequence[int], salt: str, limit: int) -> list[Node]:
        """The nodes of the longest usable prefix of at most `limit` tokens, in order. Touches them, holds nothing."""
        size = self.page_size
        node = self._roots.get(salt)
        path: list[Node] = []
        if node is not None:
            for start in range(0, limit // size * size, size):
                child = node.children.get(tuple(token_ids[start : start + size]))
                if child is None:
                    break
                path.append(child)
                node = child
        length = self._usable(path)
        del path[length:]
        for node in path:  # the deepest last: of checkpoints on one path the first ones go first
            self._clock += 1
            node.last_used = self._clock
        return path

    def needed_from(self, group: int, num_tokens: int) -> int:
        """The first page index that a query at position `num_tokens` still reads in this group."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1) // self.page_size

    def _usable(self, path: list[Node]) -> int:
        """The longest length, in pages, for which every window group still has the pages it would read, and at whose
        end there is a checkpoint where the model keeps states.
        """
        runs = [0] * len(self.windows)  # consecutive pages present, ending at the current index
        best = 0
        for index, node in enumerate(path):
            ok = self.slots is None or node.slot is not None
            for group, window in enumerate(self.windows):
                runs[group] = runs[group] + 1 if node.pages[group] is not None else 0
                end = (index + 1) * self.page_size
                if window is not None and runs[group] < index + 1 - self.needed_from(group, end):
                    ok = False
            if ok:
                best = index + 1
        return best

    def insert(self, node: Node, key: tuple[int, ...], pages: Sequence[int | None]) -> tuple[Node, list[int | None]]:
        """Put one full page below `node`, and return its node with the pages the sequence shall use from now on.

        A new node takes references of its own on `pages`. Where the tree has the page already, the sequence is given
        the tree's page instead: the caller's reference on its own copy is released and one on the tree's is taken.
        """
        self._clock += 1
        child = node.children.get(key)
        is_new = child is None
        if child is None:
            child = Node(node, key, [None] * len(self.pools))
            child.pins = None if node.pins is None else node.pins.get(key)
            node.children[key] = child
            self.num_nodes += 1
        child.last_used = self._clock
        used: list[int | None] = []
        for group, (pool, page) in enumerate(zip(self.pools, pages, strict=True)):
            mine = child.pages[group]
            if page is None or mine == page:
                used.append(page)
            elif mine is None:
                child.pages[group] = page
                pool.enter_tree(page)
                used.append(page)
            else:
                pool.retain(mine)
                pool.release(page)
                used.append(mine)
        if is_new:
            for watcher in self.watchers:
                watcher.stored(child)
        return child, used

    def keep(self, node: Node, slot: int) -> bool:
        """Let a node hold a checkpoint; False when it has one already."""
        assert self.slots is not None
        if node.slot is not None:
            return False
        node.slot = slot
        self.slots.enter_tree(slot)
        for watcher in self.watchers:
            watcher.kept(node)
        return True

    def drop(self, node: Node) -> None:
        """Forget a node's checkpoint, if it has one."""
        if node.slot is not None and self.slots is not None:
            self.slots.leave_tree(node.slot)
            node.slot = None

    def evict_checkpoint(self) -> None:
        """Free the slot of the least recently used checkpoint, if there is any; pinned ones last."""
        oldest = min((n for n in self.nodes() if n.slot is not None), key=lambda n: n.rank, default=None)
        if oldest is not None:
            self.drop(oldest)

    def evict(self, group: int, num_pages: int) -> int:
        """Free at least `num_pages` pages of a group, least recently used first; returns how many it could."""
        evict = self._evict_leaves if self.windows[group] is None else self._evict_window
        return evict(group, num_pages)

    def _evict_leaves(self, group: int, num_pages: int) -> int:
        freed = 0
        goal = max(num_pages, EVICT_BATCH)
        order = count()
        heap = [(n.rank, next(order), n) for n in self.nodes() if not n.children and self._idle(n)]
        heapify(heap)
        while heap and (freed < num_pages or (freed < goal and not heap[0][0][0])):  # pinned ones only if they must
            _, _, node = heappop(heap)
            freed += node.pages[group] is not None
            for pool, page in zip(self.pools, node.pages, strict=True):
                if page is not None:
                    pool.leave_tree(page)
            parent = self._detach(node)
            if parent.parent is not None and not parent.children and self._idle(parent):
                heappush(heap, (parent.rank, next(order), parent))
        return freed

    def _evict_window(self, group: int, num_pages: int) -> int:
        """Window pages may go from any node: the tokens before a window are not read again."""
        pool = self.pools[group]
        held = [n for n in self.nodes() if (page := n.pages[group]) is not None and pool.refs[page] == 1]
        held = sorted(held, key=lambda n: n.rank)[: max(num_pages, EVICT_BATCH)]
        while len(held) > num_pages and held[-1].rank[0]:  # pinned ones only if they must
            held.pop()
        for node in reversed(held):  # pages are taken again in order (`PagePool`)
            page = node.pages[group]
            assert page is not None
            node.pages[group] = None
            pool.leave_tree(page)
            while node.parent is not None and not node.children and not any(p is not None for p in node.pages):
                node = self._detach(node)  # nothing left to find here
        return len(held)

    def _idle(self, node: Node) -> bool:
        return all(page is None or pool.refs[page] == 1 for pool, page in zip(self.pools, node.pages, strict=True))

    def _detach(self, node: Node) -> Node:
        assert node.parent is not None
        for watcher in self.watchers:
            watcher.removed(node)
        self.drop(node)
        del node.parent.children[node.key]
        self.num_nodes -= 1
        parent, node.parent = node.parent, None
        if parent.parent is None and not parent.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}
        return parent

    def clear(self) -> None:
        """Forget every prefix that nobody uses at the moment."""
        self._evict_leaves(0, self.num_nodes)

    def nodes(self) -> Iterator[Node]:
        """Every page, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every page in a node is marked so in its pool, once; keys are full pages."""
        seen: list[set[int]] = [set() for _ in self.pools]
        num_nodes = 0
        for node in self.nodes():
            num_nodes += 1
            if len(node.key) != self.page_size:
                violated(f"a node holds {len(node.key)} tokens")
            if node.parent is None or node.parent.children[node.key] is not node:
                violated("a node its parent does not know")
            for group, page in enumerate(node.pages):
                if page is None:
                    continue
                if page in seen[group]:
                    violated(f"page {page} of group {group} is in two nodes")
                if not self.pools[group].in_tree[page]:
                    violated(f"page {page} of group {group} is not marked as cached")
                seen[group].add(page)
        if num_nodes != self.num_nodes:
            violated(f"{num_nodes} nodes, counted {self.num_nodes}")
        held = [node.slot for node in self.nodes() if node.slot is not None]
        if held and self.slots is None:
            violated("a checkpoint of a model without states")
        if self.slots is not None and sorted(held) != [slot for slot, kept in enumerate(self.slots.in_tree) if kept]:
            violated(f"checkpoints in nodes: {sorted(held)}, others are marked")
        for group, pool in enumerate(self.pools):
            marked = {page for page, kept in enumerate(pool.in_tree) if kept}
            if marked != seen[group]:
                violated(f"group {group}: pages marked but in no node: {sorted(marked - seen[group])}")
