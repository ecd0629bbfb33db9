"""Page and slot management of sequences: allocation, sharing, release and handover to the prefix tree. No torch.

`Pages` owns the pools of all cache groups, the state slots and the prefix tree over them. Invariant: a sequence holds
exactly one reference on each page in its block tables, on its slots, and on the checkpoint written by the current step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from .page_pool import PagePool
from .radix_cache import Node, RadixCache
from .sequence import Sequence

CHECKPOINT_EVERY = 2048  # tokens between checkpoints of a long prompt
# Tokens between checkpoints of an answer. Drafts end before the next one, so that fewer would cut most drafts of a
# block of 16, and the next turn of a chat recomputes up to so many, besides the rest of a page.
ANSWER_EVERY = 32
MIN_RECOMPUTED = 48  # a checkpoint must save recomputing at least this many tokens


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy a shared page before this step, because one of its holders is about to write to it."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy the states after this step to a checkpoint."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Slots:
    """The state slots of a model with recurrent layers.

    copy   (from, to): copies a slot before the next step; from -1 clears it
    """

    count: int
    copy: Callable[[int, int], None]


class Pages:
    """The pages of all cache groups, and the state slots.

    num_pages   per group
    windows     per group: tokens that a query attends to, including itself; None for full attention
    """

    def __init__(
        self,
        num_pages: Many[int],
        windows: Many[int | None],
        page_size: int,
        prefix_cache: bool = True,
        slots: Slots | None = None,
    ) -> None:
        self.page_size = page_size
        self.windows = tuple(windows)
        self.pools = tuple(map(PagePool, num_pages))
        self.slots = None if slots is None else PagePool(slots.count)
        self._copy_slot = None if slots is None else slots.copy
        self.tree = RadixCache(self.pools, windows, page_size, self.slots)
        self.prefix_cache = prefix_cache

    def num_needed(self, sequence: Sequence, group: int, num_tokens: int) -> int:
        """Pages that the sequence still needs in this group for its first `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.page_size) - len(sequence.block_tables[group]))

    def fits_ever(self, num_tokens: int, chunk: int) -> bool:
        """True if a sequence of this length could run alone: full groups hold all tokens, window groups the window."""
        size = self.page_size
        for pool, window in zip(self.pools, self.windows, strict=True):
            tokens = num_tokens if window is None else min(num_tokens, window + chunk + size)
            if -(-tokens // size) > pool.num_pages:
                return False
        return True

    def can_admit(self, sequence: Sequence, first_tokens: int) -> bool:
        """True if full groups have room for the whole sequence so far, and window groups for its first chunk."""
        for group, window in enumerate(self.windows):
            tokens = sequence.num_tokens if window is None else first_tokens
            if self.num_needed(sequence, group, tokens) > self.pools[group].num_available:
                return False
        return self.slots is None or sequence.slot >= 0 or self.slots.num_available > 0

    @property
    def available(self) -> list[int]:
        """Pages per group, and slots, that are free or can be reclaimed."""
        return [pool.num_available for pool in (*self.pools, *([] if self.slots is None else [self.slots]))]

    def attach_prefix(self, sequence: Sequence) -> int:
        """Attach the longest cached prefix to a fresh sequence; returns its number of tokens."""
        limit = sequence.num_cacheable
        if not self.looks_up(sequence):
            return 0
        path = self.tree.match(sequence.cache_key(0, limit), sequence.cache_salt, limit)
        if not path:
            return 0
        num_tokens = len(path) * self.page_size
        for group, pool in enumerate(self.pools):
            first = self.tree.needed_from(group, num_tokens)
            table = sequence.block_tables[group]
            for index, node in enumerate(path):
                page = node.pages[group]
                if index < first or page is None:
                    table.append(-1)
                else:
                    pool.retain(page)
                    table.append(page)
            sequence.first_kept[group] = first
        sequence.table_version += 1
        sequence.node = path[-1]
        sequence.num_tree_pages = len(path)
        sequence.num_computed_tokens = sequence.num_kept_tokens = num_tokens
        return num_tokens

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate pages for the first `num_tokens` tokens, evicting if needed. False, taking none, if too few."""
        plan = [self.num_needed(sequence, group, num_tokens) for group in range(len(self.pools))]
        for group, count in enumerate(plan):
            short = count - self.pools[group].num_free
            if short > 0:
                self.tree.evict(group, short)
            if self.pools[group].num_free < count:
                return False
        sequence.table_version += any(plan)
        for group, count in enumerate(plan):
            for _ in range(count):
                page = self.pools[group].take()
                assert page is not None
                sequence.block_tables[group].append(page)
        return True

    def own_tail(self, sequence: Sequence, start: int) -> list[PageCopy] | None:
        """Copy-on-write: give the sequence its own copy of a shared page of token `start`. None if pages run short."""
        copies: list[PageCopy] = []
        for group, pool in enumerate(self.pools):
            index = start // self.page_size
            table = sequence.block_tables[group]
            if index >= len(table) or pool.refs[table[index]] == 1:
                continue
            if pool.num_free == 0:
                self.tree.evict(group, 1)
            page = pool.take()
            if page is None:
                for copy in copies:  # undo, so that the other groups keep sharing
                    self.pools[copy.group].retain(copy.source)
                    self.pools[copy.group].release(copy.target)
                    sequence.block_tables[copy.group][index] = copy.source
                return None
            copies.append(PageCopy(group, table[index], page))
            pool.release(table[index])
            table[index] = page
            sequence.table_version += 1
        return copies

    def caches(self, sequence: Sequence) -> bool:
        """True if the sequence uses the prefix cache."""
        return self.prefix_cache and sequence.request.use_prefix_cache

    def looks_up(self, sequence: Sequence) -> bool:
        """True if the prefix cache is searched for a prefix of the sequence."""
        return self.caches(sequence) and sequence.num_cacheable > 0

    def take(self, wanted: Many[bool]) -> list[int | None] | None:
        """Allocate a page in each wanted group, with a reference for the caller. None, taking none, if too few."""
        taken: list[int | None] = []
        for group, pool in enumerate(self.pools):
            if wanted[group] and pool.num_free == 0:
                self.tree.evict(group, 1)
            taken.append(pool.take() if wanted[group] else None)
            if wanted[group] and taken[-1] is None:
                self.give_back(taken)
                return None
        return taken

    def give_back(self, taken: Many[int | None]) -> None:
        """Release pages from `take`, or the tree's pages that replaced them."""
        for pool, page in zip(self.pools, taken, strict=False):
            if page is not None:
                pool.release(page)

    def take_slot(self, sequence: Sequence) -> bool:
        """Give a sequence without one a slot with the states after its prefix; False if all slots are in use."""
        source = sequence.node.slot if sequence.node is not None else None
        return self._take_slot(sequence, -1 if source is None else source)

    def _take_slot(self, sequence: Sequence, source: int) -> bool:
        if self._copy_slot is None or sequence.slot >= 0:
            return True
        slot = self._free_slot()
        if slot is None:
            return False
        sequence.slot = slot
        if slot != source:  # otherwise the checkpoint itself was evicted and its slot reused
            self._copy_slot(source, slot)
        return True

    def add_checkpoint(self, node: Node, fill: Callable[[int], None]) -> None:
        """Attach the states that `fill` writes into a slot to a node as a checkpoint, if a slot is available."""
        if self.slots is None or node.slot is not None or (slot := self._free_slot()) is None:
            return
        fill(slot)
        if node.parent is not None:
            self.tree.keep(node, slot)
        self.slots.release(slot)

    def _free_slot(self) -> int | None:
        assert self.slots is not None
        if self.slots.num_free == 0:
            self.tree.evict_checkpoint()
        return self.slots.take()

    def set_aside(self, sequence: Sequence) -> bool:
        """Save the states before draft tokens are computed; False if no slot is left."""
        if self._copy_slot is None:
            return True
        slot = self._free_slot()
        if slot is None:
            return False
        self._copy_slot(sequence.slot, slot)
        sequence.spare = slot
        return True

    def end_aside(self, sequence: Sequence, goes_back: bool) -> None:
        """After verification, restore the saved states or discard them."""
        if sequence.spare < 0 or self.slots is None or self._copy_slot is None:
            return
        if goes_back:
            self._copy_slot(sequence.spare, sequence.slot)
        self.slots.release(sequence.spare)
        sequence.spare = -1

    def checkpoint_after(self, sequence: Sequence) -> int | None:
        """The number of computed tokens at which the next checkpoint is due, a whole number of pages; None for no more.

        During prefill, it is due every CHECKPOINT_EVERY tokens and at the last page boundary before the final token;
        during decoding, every ANSWER_EVERY tokens.
        """
        if self.slots is None or not self.caches(sequence):
            return None
        size, start = self.page_size, sequence.num_computed_tokens
        if sequence.is_decoding:
            return self.answer_checkpoint_after(sequence, start)
        last = (sequence.num_tokens - 1) // size * size
        after = min(last, (start // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY)
        worth = after > start and after - sequence.num_kept_tokens >= MIN_RECOMPUTED
        return after if worth else None

    def answer_checkpoint_after(self, sequence: Sequence, start: int) -> int | None:
        """The same after `start` tokens of a sequence that decodes."""
        if self.slots is None or not self.caches(sequence):
            return None
        size = self.page_size
        due = sequence.num_kept_tokens + max(size, ANSWER_EVERY // size * size)
        return due if due > start else (start // size + 1) * size

    def begin_checkpoint(self, sequence: Sequence, num_tokens: int) -> SlotCopy | None:
        """Allocate the checkpoint for the end of this step, after `num_tokens` tokens; None if no slot is left."""
        if self.slots is None or sequence.checkpoint is not None or not self.caches(sequence):
            return None
        slot = self._free_slot()
        if slot is None:
            return None
        sequence.checkpoint = num_tokens, slot
        sequence.num_kept_tokens = num_tokens
        return SlotCopy(sequence.slot, slot)

    def _commit_checkpoint(self, sequence: Sequence) -> None:
        """Hand the checkpoint that a step has written to the tree. Only the latest one of an answer is kept."""
        if sequence.checkpoint is None or self.slots is None:
            return
        (num_tokens, slot), node = sequence.checkpoint, sequence.node
        if num_tokens > sequence.num_computed_tokens:
            return  # written by a step that is still running ahead
        known = node is not None and node.parent is not None and sequence.num_tree_pages * self.page_size == num_tokens
        if node is not None and known and self.tree.keep(node, slot) and num_tokens > sequence.num_prompt_tokens:
            if sequence.answer_checkpoint is not None:
                self.tree.drop(sequence.answer_checkpoint)
            sequence.answer_checkpoint = node
        self.slots.release(slot)
        sequence.checkpoint = None

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Fork a child that shares its parent's pages and gets a copy of its states; False if no slot is left."""
        if not self._take_slot(child, parent.slot):
            return False
        for group, pool in enumerate(self.pools):
            child.block_tables[group] = list(parent.block_tables[group])
            child.first_kept[group] = parent.first_kept[group]
            for page in child.block_tables[group]:
                if page >= 0:
                    pool.retain(page)
        child.table_version += 1
        child.node, child.num_tree_pages = parent.node, parent.num_tree_pages
        child.num_computed_tokens = parent.num_computed_tokens
        return True

    def commit(self, sequence: Sequence) -> None:
        """After a step, hand newly filled pages to the tree, then release pages outside the windows."""
        if self.caches(sequence):
            self._grow_tree(sequence)
        self._commit_checkpoint(sequence)
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            first = min(self.tree.needed_from(group, sequence.num_computed_tokens), len(sequence.block_tables[group]))
            table = sequence.block_tables[group]
            for index in reversed(range(sequence.first_kept[group], first)):
                if table[index] >= 0:
                    self.pools[group].release(table[index])
                    table[index] = -1
                    sequence.table_version += 1
            sequence.first_kept[group] = max(first, sequence.first_kept[group])

    def _grow_tree(self, sequence: Sequence) -> None:
        size = self.page_size
        if sequence.num_tree_pages >= sequence.num_computed_tokens // size:
            return  # do not create a root yet: clients choose salts, and an empty root would never be freed
        if sequence.node is not None and sequence.node.parent is None:
            return  # its node was evicted with its last window page, so nothing below could be found again
        node = sequence.node or self.tree.root(sequence.cache_salt)
        for index in range(sequence.num_tree_pages, sequence.num_computed_tokens // size):
            pages = [table[index] if table[index] >= 0 else None for table in sequence.block_tables]
            key = sequence.cache_key(index * size, (index + 1) * size)
            node, used = self.tree.insert(node, key, pages)
            for table, page in zip(sequence.block_tables, used, strict=True):
                if table[index] != (-1 if page is None else page):
                    table[index] = -1 if page is None else page
                    sequence.table_version += 1
            sequence.node = node
            sequence.num_tree_pages = index + 1

    def trim(self, sequence: Sequence, num_tokens: int = 0) -> None:
        """Release the pages after those of the first `num_tokens` tokens and of the computed ones."""
        kept = -(-max(num_tokens, sequence.num_computed_tokens) // self.page_size)
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            for page in reversed(table[kept:]):
                pool.release(page)
            sequence.table_version += len(table) > kept
            del table[kept:]

    def release(self, sequence: Sequence) -> None:
        for group, pool in enumerate(self.pools):
            for page in reversed(sequence.block_tables[group]):
                if page >= 0:
                    pool.release(page)
            sequence.block_tables[group] = []
            sequence.first_kept[group] = 0
        sequence.table_version += 1
        sequence.node, sequence.num_tree_pages = None, 0
        if self.slots is not None:
            for slot in _slots_of(sequence):
                self.slots.release(slot)
        sequence.slot = sequence.spare = -1
        sequence.checkpoint = sequence.answer_checkpoint = None
        sequence.num_kept_tokens = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise InvariantViolated unless these sequences and the tree account for every reference."""
        held: list[Counter[int]] = [Counter() for _ in self.pools]
        in_slots: Counter[int] = Counter()
        for sequence in sequences:
            in_slots.update(_slots_of(sequence))
            for group, table in enumerate(sequence.block_tables):
                held[group].update(page for page in table if page >= 0)
        for pool, counts in zip(self.pools, held, strict=True):
            pool.check_integrity(counts)
        if self.slots is not None:
            self.slots.check_integrity(in_slots)
        self.tree.check_integrity()


def _slots_of(sequence: Sequence) -> list[int]:
    """The slots that a sequence holds: its own, the one saved before draft tokens, and the checkpoint being written."""
    written = [sequence.checkpoint[1]] if sequence.checkpoint is not None else []
    return [*(slot for slot in (sequence.slot, sequence.spare) if slot >= 0), *written]
