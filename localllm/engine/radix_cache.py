"""The prefix cache: a radix tree that maps token prefixes to pages of the KV cache. No torch.

A node is one full page, keyed by its token ids, below one root per salt; prefixes with different salts are never
shared. It holds one page id per cache group. A full-attention group needs every page of a prefix; a group with a
sliding window of W tokens only needs the pages of the last W, so a node may have lost its page of such a group (None).

For models with recurrent layers, some nodes also hold a checkpoint: the slot with the states after their last token. A
usable prefix then ends at a node with a checkpoint.

Sequences hold their own references on a node's pages, and on all pages of the full-attention group up to their end.
So a node whose first-group page is held by the tree alone has no users below it, and leaves can be evicted safely.
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

# minimum number of nodes per eviction, which scans the whole tree and so must not run for every single page
EVICT_BATCH = 16


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A prefix whose full pages are evicted after those of lower priority; unpinned pages have priority 0."""

    token_ids: tuple[int, ...]
    priority: int = 1
    until: float = math.inf  # expiry on the monotonic clock
    pin_id: str = ""


class Pins(dict[tuple[int, ...], "Pins"]):
    """A tree of pinned pages: page key -> pins below it. `held` are the pins that include this page."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Pin] = []

    @property
    def priority(self) -> int:
        now = time.monotonic()
        return max((pin.priority for pin in self.held if pin.until > now), default=0)


def root_digest(salt: str) -> bytes:
    """The parent digest of the first page of a prompt with this salt."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def digest_after(parent: bytes, key: tuple[int, ...]) -> bytes:
    """The digest of tokens `key` after the prefix with digest `parent`; equal in every process."""
    return blake2b(parent + repr(key).encode(), digest_size=16).digest()


class Node:
    """One full page in the tree."""

    __slots__ = ("_digest", "children", "key", "last_used", "pages", "parent", "pins", "slot")

    def __init__(self, parent: Node | None, key: tuple[int, ...], pages: list[int | None]) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.children: dict[tuple[int, ...], Node] = {}
        self.last_used = 0
        self.slot: int | None = None  # slot of its checkpoint
        self.pins: Pins | None = None  # its place in the tree of pins; None off pinned paths
        self._digest = b""

    @property
    def digest(self) -> bytes:
        """Digest of the salt and all tokens up to the end of this page. Not available once the node left the tree."""
        path, node = [], self
        while not node._digest:
            assert node.parent is not None, "the node left the tree before its digest was computed"
            path.append(node)
            node = node.parent
        for below in reversed(path):
            assert below.parent is not None
            below._digest = digest_after(below.parent._digest, below.key)
        return self._digest

    @property
    def rank(self) -> tuple[int, int]:
        """Eviction order: by pin priority, then least recently used first."""
        return (0 if self.pins is None else self.pins.priority), self.last_used


class Watcher(Protocol):
    """Observer of the tree, called in the engine's thread; an exception stops the engine."""

    def stored(self, node: Node) -> None: ...  # a page was added
    def kept(self, node: Node) -> None: ...  # a checkpoint was added
    def removed(self, node: Node) -> None: ...  # the node is about to leave the tree


class RadixCache:
    """The prefix cache over the page pools of all cache groups.

    pools     one per cache group
    windows   per group: None for full attention, else the window in tokens
    slots     state slots of checkpoints and sequences; None for models without recurrent layers
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
        """The root for a salt, created on first use."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(None, (), [])
            node._digest = root_digest(salt)
            node.pins = self._pins if salt == "" else None
        return node

    def pin(self, pin: Pin) -> None:
        """Raise the eviction priority of this prefix's full pages, for prompts without a salt."""
        pins, node = self._pins, self._roots.get("")
        for key in self.keys(pin.token_ids):
            pins = pins.setdefault(key, Pins())
            pins.held.append(pin)
            node = None if node is None else node.children.get(key)
            if node is not None:
                node.pins = pins

    def unpin(self, pin: Pin) -> None:
        """Undo `pin`."""
        above, node = self._pins, self._roots.get("")
        for key in self.keys(pin.token_ids):
            pins = above[key]
            pins.held.remove(pin)
            node = None if node is None else node.children.get(key)
            if not pins.held:  # pins below would be held here as well
                del above[key]
                if node is not None:
                    node.pins = None
            above = pins

    def keys(self, token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The keys of the full pages of these tokens."""
        size = self.page_size
        return (tuple(token_ids[start : start + size]) for start in range(0, len(token_ids) // size * size, size))

    def match(self, token_ids: Sequence[int], salt: str, limit: int) -> list[Node]:
        """The nodes of the longest usable prefix of at most `limit` tokens. Marks them as used, without references."""
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
        for node in path:  # deepest last, so that earlier checkpoints of a path are evicted first
            self._clock += 1
            node.last_used = self._clock
        return path

    def needed_from(self, group: int, num_tokens: int) -> int:
        """Index of the first page that a query at position `num_tokens` reads in this group."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1) // self.page_size

    def _usable(self, path: list[Node]) -> int:
        """Length in pages of the longest usable prefix of a path.

        Every window group must still have the pages it would read, and models with states need a checkpoint at its end.
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
        """Insert a full page below `node`; returns its node and the pages that the sequence must use from now on.

        A new node takes its own references on `pages`. If the tree already has the page, the sequence switches to the
        tree's: the caller's reference on its own copy is released and one on the tree's page is taken.
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
        """Attach a checkpoint to a node; False if it already has one."""
        assert self.slots is not None
        if node.slot is not None:
            return False
        node.slot = slot
        self.slots.enter_tree(slot)
        for watcher in self.watchers:
            watcher.kept(node)
        return True

    def drop(self, node: Node) -> None:
        """Remove a node's checkpoint, if it has one."""
        if node.slot is not None and self.slots is not None:
            self.slots.leave_tree(node.slot)
            node.slot = None

    def evict_checkpoint(self) -> None:
        """Free the slot of the least recently used checkpoint, if any; pinned ones last."""
        oldest = min((n for n in self.nodes() if n.slot is not None), key=lambda n: n.rank, default=None)
        if oldest is not None:
            self.drop(oldest)

    def evict(self, group: int, num_pages: int) -> int:
        """Free at least `num_pages` pages of a group, least recently used first; returns the number it could free."""
        evict = self._evict_leaves if self.windows[group] is None else self._evict_window
        return evict(group, num_pages)

    def _evict_leaves(self, group: int, num_pages: int) -> int:
        freed = 0
        goal = max(num_pages, EVICT_BATCH)
        order = count()
        heap = [(n.rank, next(order), n) for n in self.nodes() if not n.children and self._is_unused(n)]
        heapify(heap)
        while heap and (freed < num_pages or (freed < goal and not heap[0][0][0])):  # pinned ones only if needed
            _, _, node = heappop(heap)
            freed += node.pages[group] is not None
            for pool, page in zip(self.pools, node.pages, strict=True):
                if page is not None:
                    pool.leave_tree(page)
            parent = self._detach(node)
            if parent.parent is not None and not parent.children and self._is_unused(parent):
                heappush(heap, (parent.rank, next(order), parent))
        return freed

    def _evict_window(self, group: int, num_pages: int) -> int:
        """Evict pages of a window group, from any node, since tokens before a window are never read again."""
        pool = self.pools[group]
        held = [n for n in self.nodes() if (page := n.pages[group]) is not None and pool.refs[page] == 1]
        held = sorted(held, key=lambda n: n.rank)[: max(num_pages, EVICT_BATCH)]
        while len(held) > num_pages and held[-1].rank[0]:  # pinned ones only if needed
            held.pop()
        for node in reversed(held):  # freed last to first, so that they are taken again in order (`PagePool`)
            page = node.pages[group]
            assert page is not None
            node.pages[group] = None
            pool.leave_tree(page)
            while node.parent is not None and not node.children and not any(p is not None for p in node.pages):
                node = self._detach(node)  # an empty leaf
        return len(held)

    def _is_unused(self, node: Node) -> bool:
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
        """Evict every prefix that no sequence uses."""
        self._evict_leaves(0, self.num_nodes)

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless nodes hold full pages, each once, that their pools mark as cached."""
        seen: list[set[int]] = [set() for _ in self.pools]
        num_nodes = 0
        for node in self.nodes():
            num_nodes += 1
            if len(node.key) != self.page_size:
                violated(f"a node holds {len(node.key)} tokens")
            if node.parent is None or node.parent.children[node.key] is not node:
                violated("a node is missing from its parent")
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
