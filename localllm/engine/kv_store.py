"""The KV store: saves pages and states of the prefix tree to disk, and restores them when a prompt begins with them.

The engine's thread copies pages out of and into the cache; one thread writes files and another one reads them. No
request waits for a write: a page that was evicted before its turn is dropped and counted. A request whose prompt
continues in files is scheduled once they are read; others run meanwhile.

Pages pass through host memory. A host-memory tier would sit between `_copied` and `PageFiles.write`, and be consulted
before `PageFiles.read`.
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

QUEUED_BYTES = 64 << 20  # most bytes copied out of the cache but not yet written
PAGES_AHEAD = 8  # most pages read but not yet in the cache
SHARE = 0.01  # fraction of the time of steps for copying pages out between them
FLUSH_S = 10.0  # time for the remaining writes when the engine stops


class Cache(Protocol):
    """The part of `KVCache` used here. Bytes cover all layers of a group, or a whole slot."""

    def page_bytes(self, group: int) -> int: ...
    def read_page(self, group: int, page: int) -> memoryview: ...
    def write_page(self, group: int, page: int, data: bytearray) -> None: ...
    def slot_bytes(self) -> int: ...
    def read_slot(self, slot: int) -> memoryview: ...
    def write_slot(self, slot: int, data: bytearray) -> None: ...


@dataclass(eq=False, slots=True)
class _Restore:
    """The restore of one prompt's pages from files into the tree."""

    sequence: Sequence
    keys: list[tuple[int, ...]]  # keys of the pages missing from the tree
    parent: bytes  # digest before the first of them
    first: int  # its page index
    node: Node | None  # the last page in the tree
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(PAGES_AHEAD))
    stopped: bool = False  # the rest of the prompt is computed instead


class KVStore:
    """The KV store of one engine.

    ask        queues a call for the engine's thread, before its next step
    when_idle  queues an idle job for it
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
        self.num_dropped = 0  # pages and states that were evicted before they were written, or failed to write
        self.num_written = 0
        self.num_read = 0  # pages
        self._cache, self._pages, self._ask, self._when_idle = cache, pages, ask, when_idle
        self._sizes = [cache.page_bytes(group) for group in range(len(pages.pools))]
        self._state_sizes = [cache.slot_bytes()] if pages.slots is not None else []
        self._new: dict[Node, None] = {}  # nodes whose pages are not yet written, oldest first
        self._new_states: dict[Node, None] = {}
        self._queued_bytes = 0  # guarded by the lock, like the counters
        self._lock = threading.Lock()
        self._credit_s = 0.0
        self._waits_for_idle = self._closed = False
        self._writer = ThreadPoolExecutor(1, "kv-store-writer")
        self._reader = ThreadPoolExecutor(1, "kv-store-reader")
        self._writer.submit(self.files.count)
        pages.tree.watchers.append(self)

    # --- `radix_cache.Watcher`, called in the engine's thread --------------------------------------------------------

    def stored(self, node: Node) -> None:
        """A page was added to the tree."""
        self._new[node] = None
        self._request_idle_save()

    def kept(self, node: Node) -> None:
        """A node got a checkpoint."""
        self._new_states[node] = None
        self._request_idle_save()

    def removed(self, node: Node) -> None:
        """A node leaves the tree."""
        for waiting in (self._new, self._new_states):
            if node in waiting:
                del waiting[node]
                self.num_dropped += 1

    def _request_idle_save(self) -> None:
        if not (self._waits_for_idle or self._closed):
            self._waits_for_idle = True
            self._when_idle(self._save_when_idle)

    # --- out of the cache --------------------------------------------------------------------------------------------

    def after_step(self, seconds: float) -> None:
        """Copy a few pages out, in a small fraction of the step's time."""
        if not self._new:
            return
        self._credit_s = min(self._credit_s + SHARE * seconds, 0.1)
        while self._new and self._credit_s > 0:
            started = time.monotonic()
            if not self._save_next(self._new, PAGE):
                return
            self._credit_s -= time.monotonic() - started

    def _save_when_idle(self, must_stop: Callable[[], bool]) -> bool:
        """Idle job that saves everything, including states, of which each answer has only the last by now."""
        while (self._new or self._new_states) and not must_stop():
            self._save_all(wait=False)
            if self._new or self._new_states:
                time.sleep(0.001)  # the writer is behind
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
        """Hand the oldest waiting node to the writer; False while too many bytes are queued."""
        size = sum(self._sizes if kind == PAGE else self._state_sizes)
        if self._queued_bytes and self._queued_bytes + size > QUEUED_BYTES:
            return False
        node = next(iter(waiting))
        del waiting[node]
        if node.parent is None or (kind == STATE and node.slot is None):
            return True  # evicted, or its checkpoint was replaced by a later one
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
            log.exception("writing a page failed")
            written = False
        with self._lock:
            self._queued_bytes -= size
            self.num_written += written and kind == PAGE
            self.num_dropped += not written

    # --- into the cache ----------------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> None:
        """Start restoring a new sequence's prefix if files have it; the sequence waits until they are read."""
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
        """Read pages in order, in the reader's thread, at most PAGES_AHEAD before the engine takes them."""
        try:
            names = self._found(restore)
            for at, name in enumerate(names):
                while not restore.room.acquire(timeout=0.1):
                    if self._closed:
                        return
                if restore.stopped:
                    return
                found = self.files.read(name, PAGE, self._sizes)
                if found is None:  # invalid: check the pages after it as well, so that invalid ones are removed
                    for behind in names[at + 1 :]:
                        self.files.read(behind, PAGE, self._sizes)
                    return
                self._ask(partial(self._insert_page, restore, at, len(names), found))
            if names:
                self.files.touch(names[-1])
                state = self.files.read(names[-1], STATE, self._state_sizes) if self._state_sizes else None
                if state is not None:
                    self._ask(partial(self._insert_state, restore, state))
        except Exception:
            log.exception("reading stored pages failed")
        finally:
            self._ask(partial(self._finish, restore))

    def _found(self, restore: _Restore) -> list[Name]:
        """The consecutive stored pages; for models with recurrent layers, up to the last one with stored states."""
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

    def _insert_page(self, restore: _Restore, at: int, count: int, found: Found) -> None:
        """Insert one page into the cache and the tree."""
        restore.room.release()
        tree, size = self._pages.tree, self._pages.page_size
        restore.stopped |= restore.sequence.state is SequenceState.FINISHED
        if restore.stopped:
            return
        end, index = (restore.first + count) * size, restore.first + at
        wanted = [part if index >= tree.needed_from(group, end) else None for group, part in enumerate(found.parts)]
        taken = self._pages.take([part is not None for part in wanted])
        if taken is None or (restore.node is not None and restore.node.parent is None):  # no room, or evicted
            self._pages.give_back(taken or [])
            restore.stopped = True
            return
        try:
            for group, (page, part) in enumerate(zip(taken, wanted, strict=True)):
                if page is not None and part is not None:
                    self._cache.write_page(group, page, part)
        except Exception:
            log.exception("a stored page could not be loaded")
            self._pages.give_back(taken)
            restore.stopped = True
            return
        node = restore.node or tree.root(restore.sequence.cache_salt)
        restore.node, used = tree.insert(node, restore.keys[at], taken)
        self._new.pop(restore.node, None)  # already stored
        self._pages.give_back(used)
        self.num_read += 1

    def _insert_state(self, restore: _Restore, found: Found) -> None:
        node, data = restore.node, found.parts[0]
        if not restore.stopped and node is not None and node.parent is not None and data is not None:
            try:
                self._pages.add_checkpoint(node, lambda slot: self._cache.write_slot(slot, data))
            except Exception:
                log.exception("a stored state could not be loaded")
                return
            self._new_states.pop(node, None)  # already stored

    def _finish(self, restore: _Restore) -> None:
        restore.sequence.is_loading = False

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, flush: bool = True) -> None:
        """Write the rest within FLUSH_S and stop the threads. Call in the engine's thread or after it ended."""
        if flush and not self._closed:
            until = time.monotonic() + FLUSH_S
            self._save_all(wait=True, until=until)
        self._closed = True
        if self in self._pages.tree.watchers:  # else a cycle keeps the pages, which nothing collects after `gc.freeze`
            self._pages.tree.watchers.remove(self)
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=flush, cancel_futures=not flush)

    def facts(self) -> dict[str, Any]:
        """Counters, by their names in `EngineStats`."""
        return {
            "kv_store_bytes": self.files.num_bytes,
            "kv_store_limit": self.files.limit,
            "kv_store_read_tokens": self.num_read * self._pages.page_size,
            "kv_store_written_tokens": self.num_written * self._pages.page_size,
            "kv_store_dropped": self.num_dropped,
        }
