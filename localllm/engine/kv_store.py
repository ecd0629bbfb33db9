"""Between the prefix tree and the disk: pages and states are written when they are new, and come back when a prompt
begins with them.

The engine's thread copies a page out of the cache and into it; a thread of its own writes files, another one reads
them. No request waits for a write: what is no longer in the tree when its turn comes is not kept, and counted. A
request whose prompt goes on in files is scheduled when they are read; others run meanwhile.

Pages go from the device to the disk through the host's memory. A tier that stays there would stand between `_copied`
and `PageFiles.write`, and answer before `PageFiles.read`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from .page_files import PAGE, STATE, Found, Name, PageFiles
from .pages import Pages
from .radix_cache import Node, digest_after, root_digest
from .sequence import Sequence, SequenceState

log = logging.getLogger(__name__)

QUEUED_BYTES = 64 << 20  # copied out of the cache and not written yet
PAGES_AHEAD = 8  # read, and not in the cache yet
SHARE = 0.01  # of the time of steps: for copying pages out between them
FLUSH_S = 10.0  # for what is left to write when the engine ends


class Cache(Protocol):
    """What of a `KVCache` is needed here. Bytes are those of all layers of a group, or of a slot."""

    def page_bytes(self, group: int) -> int: ...
    def read_page(self, group: int, page: int) -> memoryview: ...
    def write_page(self, group: int, page: int, data: bytearray) -> None: ...
    def slot_bytes(self) -> int: ...
    def read_slot(self, slot: int) -> memoryview: ...
    def write_slot(self, slot: int, data: bytearray) -> None: ...


@dataclass(eq=False, slots=True)
class _Restore:
    """The pages of one prompt that are on their way from files into the tree."""

    sequence: Sequence
    keys: list[tuple[int, ...]]  # of the pages that the tree does not have
    parent: bytes  # what the first of them follows
    first: int  # its index
    node: Node | None  # the last one that is in the tree
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(PAGES_AHEAD))
    stopped: bool = False  # the rest is computed


class KVStore:
    """The pages of one engine on the disk.

    ask        has something done by the engine's thread, before its next step
    when_idle  has a job done by it in idle moments
    """

    def __init__(
        self,
        files: PageFiles,
        cache: Cache,
        pages: Pages,
        ask: Callable[[Callable[[], None]], None],
        when_idle: Callable[[Callable[[Callable[[], bool]], bool]], None],
    ) -> None:
        self.files = files
        self.num_dropped = 0  # pages and states that were gone before they were written
        self.num_written = 0
        self.num_read = 0  # pages
        self._cache, self._pages, self._ask, self._when_idle = cache, pages, ask, when_idle
        self._sizes = [cache.page_bytes(group) for group in range(len(pages.pools))]
        self._state_sizes = [cache.slot_bytes()] if pages.slots is not None else []
        self._new: dict[Node, None] = {}  # nodes whose pages are to be written, in order
        self._new_states: dict[Node, None] = {}
        self._queued_bytes = 0  # under the lock, as the counters
        self._lock = threading.Lock()
        self._credit_s = 0.0
        self._waits_for_idle = self._closed = False
        self._writer = ThreadPoolExecutor(1, "kv-store-writer")
        self._reader = ThreadPoolExecutor(1, "kv-store-reader")
        self._writer.submit(self.files.count)
        pages.tree.watchers.append(self)

    # --- what the tree tells, in the engine's thread -----------------------------------------------------------------

    def stored(self, node: Node) -> None:
        """A page is new in the tree."""
        self._new[node] = None
        self._want_idle()

    def kept(self, node: Node) -> None:
        """A node has a checkpoint."""
        self._new_states[node] = None
        self._want_idle()

    def removed(self, node: Node) -> None:
        """A node leaves the tree."""
        for waiting in (self._new, self._new_states):
            if node in waiting:
                del waiting[node]
                self.num_dropped += 1

    def _want_idle(self) -> None:
        if not (self._waits_for_idle or self._closed):
            self._waits_for_idle = True
            self._when_idle(self._save_when_idle)

    # --- out of the cache --------------------------------------------------------------------------------------------

    def after_step(self, seconds: float) -> None:
        """Copy a few pages out, in a small share of the time that a step took."""
        if not self._new:
            return
        self._credit_s = min(self._credit_s + SHARE * seconds, 0.1)
        while self._new and self._credit_s > 0:
            started = time.monotonic()
            if not self._save_next(self._new, PAGE):
                return
            self._credit_s -= time.monotonic() - started

    def _save_when_idle(self, must_stop: Callable[[], bool]) -> bool:
        """Everything there is, states too: of an answer only the last one is left by now."""
        while (self._new or self._new_states) and not must_stop():
            self._save_all(wait=False)
            if self._new or self._new_states:
                time.sleep(0.001)  # the disk is behind
        self._waits_for_idle = bool(self._new or self._new_states)
        return not self._waits_for_idle

    def _save_all(self, *, wait: bool, until: float = 0.0) -> None:
        for waiting, kind in ((self._new, PAGE), (self._new_states, STATE)):
            while waiting:
                if not self._save_next(waiting, kind):
                    if not wait or time.monotonic() > until:
                        return
                    time.sleep(0.001)

    def _save_next(self, waiting: dict[Node, None], kind: str) -> bool:
        """Hand the oldest of what waits to the writer; False while too much is on the way."""
        size = sum(self._sizes if kind == PAGE else self._state_sizes)
        if self._queued_bytes and self._queued_bytes + size > QUEUED_BYTES:
            return False
        node = next(iter(waiting))
        del waiting[node]
        if node.parent is None or (kind == STATE and node.slot is None):
            return True  # another one behind it took its place
        name = Name(node.parent.digest, node.digest)
        if not self.files.has(name, kind):
            with self._lock:
                self._queued_bytes += size
            self._writer.submit(self._write, name, kind, self._copied(node, kind), size)
        return True

    def _copied(self, node: Node, kind: str) -> list[memoryview | None]:
        if kind == STATE:
            assert node.slot is not None
            return [self._cache.read_slot(node.slot)]
        return [None if page is None else self._cache.read_page(at, page) for at, page in enumerate(node.pages)]

    def _write(self, name: Name, kind: str, parts: list[memoryview | None], size: int) -> None:
        try:
            written = self.files.write(name, kind, parts)
        except Exception:
            log.exception("a page was not written")
            written = False
        with self._lock:
            self._queued_bytes -= size
            self.num_written += written and kind == PAGE
            self.num_dropped += not written

    # --- into the cache ----------------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> None:
        """Before a new sequence is scheduled: where its prompt goes on in files, it waits until they are read."""
        pages = self._pages
        size, salt, limit = pages.page_size, sequence.cache_salt, sequence.num_cacheable
        if self._closed or not pages.caches(sequence) or limit < size:
            return
        known = sequence.cache_key(0, limit)
        path = pages.tree.match(known, salt, limit)
        last = limit // size
        keys = [known[at * size : (at + 1) * size] for at in range(len(path), last)]
        parent = path[-1].digest if path else root_digest(salt)
        if not keys or not self.files.has(Name(parent, digest_after(parent, keys[0]))):
            return
        sequence.is_loading = True
        restore = _Restore(sequence, keys, parent, len(path), path[-1] if path else None)
        self._reader.submit(self._read, restore)

    def _read(self, restore: _Restore) -> None:
        """In the reader's thread: one page after the other, a few ahead of the engine."""
        try:
            names = self._found(restore)
            for at, name in enumerate(names):
                while not restore.room.acquire(timeout=0.1):
                    if self._closed:
                        return
                if restore.stopped:
                    return
                found = self.files.read(name, PAGE, self._sizes)
                if found is None:  # it was wrong, and those behind it may be: they make room for what is right
                    for behind in names[at + 1 :]:
                        self.files.read(behind, PAGE, self._sizes)
                    return
                self._ask(partial(self._place, restore, at, len(names), found))
            if names:
                self.files.touch(names[-1])
                state = self.files.read(names[-1], STATE, self._state_sizes) if self._state_sizes else None
                if state is not None:
                    self._ask(partial(self._place_state, restore, state))
        except Exception:
            log.exception("kept pages were not read")
        finally:
            self._ask(partial(self._end, restore))

    def _found(self, restore: _Restore) -> list[Name]:
        """The pages that are there one after the other, up to the last one with states where the model keeps such."""
        names: list[Name] = []
        parent = restore.parent
        for key in restore.keys:
            name = Name(parent, digest_after(parent, key))
            if not self.files.has(name):
                break
            names.append(name)
            parent = name.digest
        while self._state_sizes and names and not self.files.has(names[-1], STATE):
            names.pop()
        return names

    def _place(self, restore: _Restore, at: int, count: int, found: Found) -> None:
        """Put one page into the cache and the tree."""
        restore.room.release()
        tree, size = self._pages.tree, self._pages.page_size
        restore.stopped |= restore.sequence.state is SequenceState.FINISHED
        if restore.stopped:
            return
        end, index = (restore.first + count) * size, restore.first + at
        wanted = [part if index >= tree.needed_from(group, end) else None for group, part in enumerate(found.parts)]
        taken = self._pages.take([part is not None for part in wanted])
        if taken is None or (restore.node is not None and restore.node.parent is None):  # it had to go: no room
            self._pages.give_back(taken or [])
            restore.stopped = True
            return
        for group, (page, part) in enumerate(zip(taken, wanted, strict=True)):
            if page is not None and part is not None:
                self._cache.write_page(group, page, part)
        node = restore.node or tree.root(restore.sequence.cache_salt)
        restore.node, used = tree.insert(node, restore.keys[at], taken)
        self._new.pop(restore.node, None)  # it is in a file
        self._pages.give_back(used)
        self.num_read += 1

    def _place_state(self, restore: _Restore, found: Found) -> None:
        node, data = restore.node, found.parts[0]
        if not restore.stopped and node is not None and node.parent is not None and data is not None:
            self._pages.add_checkpoint(node, lambda slot: self._cache.write_slot(slot, data))
            self._new_states.pop(node, None)  # it is in a file

    def _end(self, restore: _Restore) -> None:
        restore.sequence.is_loading = False

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, flush: bool = True) -> None:
        """Write what is left, which takes up to FLUSH_S, and end the threads. In the engine's thread, or after it."""
        if flush and not self._closed:
            until = time.monotonic() + FLUSH_S
            self._save_all(wait=True, until=until)
        self._closed = True
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=flush, cancel_futures=not flush)

    def facts(self) -> dict[str, Any]:
        """Counters, by the names that `EngineStats` has for them."""
        return {
            "kv_store_bytes": self.files.num_bytes,
            "kv_store_limit": self.files.limit,
            "kv_store_read_tokens": self.num_read * self._pages.page_size,
            "kv_store_written_tokens": self.num_written * self._pages.page_size,
            "kv_store_dropped": self.num_dropped,
        }
