"""Pinned prefixes and their limits; may be used from any thread.

Pins change the order of eviction but reserve no pages: a running sequence that finds no other page takes a pinned one,
lowest priority first. So pins never prevent a planned request from running.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from math import inf
from uuid import uuid4

from localllm.errors import InvalidRequest
from localllm.terminal import counted

from .pages import Pages
from .radix_cache import Pin, digest_after, root_digest

MOST_PINS = 1000
SHARE = 0.5  # most of the pages that all pins together may cover


class PinBoard:
    """The pins of one engine; `ask` queues a call for its thread."""

    def __init__(self, pages: Pages, ask: Callable[[Callable[[], None]], None]) -> None:
        self._pages, self._ask = pages, ask
        self._lock = threading.Lock()
        self._pins: dict[str, tuple[Pin, set[bytes]]] = {}  # id -> pin and digests of its pages

    def add(self, token_ids: Many[int], priority: int = 1, seconds: float = inf) -> Pin:
        """Pin the full pages of a prefix, for prompts without a salt, from the next step on. Raises InvalidRequest."""
        size, total = self._pages.page_size, self._pages.pools[0].num_pages
        whole = tuple(token_ids[: len(token_ids) // size * size])
        if not self._pages.prefix_cache:
            raise InvalidRequest(
                "the prefix cache of this model is off", "start it without --no-prefix-cache", param="model"
            )
        if not whole:
            raise InvalidRequest(
                f"the prefix has {counted(len(token_ids), 'token')}, but a page has {size}",
                "pin a longer prefix",
                param="prompt",
            )
        pin = Pin(whole, priority, time.monotonic() + seconds, f"pin-{uuid4().hex[:16]}")
        names = self._names(pin)
        with self._lock:
            self._drop_old()
            count, most = len(names.union(*(held for _, held in self._pins.values()))), int(total * SHARE)
            if count > most or len(self._pins) >= MOST_PINS:
                raise InvalidRequest(
                    f"{len(self._pins) + 1:,} pins would cover {count:,} of {total:,} pages,"
                    f" but at most {MOST_PINS:,} pins and {most:,} pages are allowed",
                    "remove a pin that is no longer needed, or pin a shorter prefix",
                    param="prompt",
                )
            self._pins[pin.pin_id] = pin, names
            self._ask(lambda: self._pages.tree.pin(pin))
        return pin

    def _names(self, pin: Pin) -> set[bytes]:
        name, names = root_digest(""), set()
        for key in self._pages.tree.keys(pin.token_ids):
            name = digest_after(name, key)
            names.add(name)
        return names

    def all(self) -> list[Pin]:
        """All pins that have not expired, oldest first."""
        with self._lock:
            self._drop_old()
            return [pin for pin, _ in self._pins.values()]

    def remove(self, pin_id: str) -> bool:
        """Remove a pin; False if it does not exist."""
        with self._lock:
            self._drop_old()
            return self._drop(pin_id)

    def _drop_old(self) -> None:
        now = time.monotonic()
        for pin_id in [pin_id for pin_id, (pin, _) in self._pins.items() if pin.until <= now]:
            self._drop(pin_id)

    def _drop(self, pin_id: str) -> bool:
        pin, _ = self._pins.pop(pin_id, (None, None))
        if pin is not None:
            self._ask(lambda: self._pages.tree.unpin(pin))
        return pin is not None
