"""Which prefixes are pinned, and how many may be: for any thread.

Pins give an order of eviction, not room of their own: a running sequence that finds no other page takes a pinned one,
of the least priority first. What the plan lets run therefore runs with any pins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from math import inf
from uuid import uuid4

from localllm.errors import InvalidRequest

from .pages import Pages
from .radix_cache import Pin, digest_after, root_digest

MOST_PINS = 1000
SHARE = 0.5  # of the pages, that pins may cover together


class PinBoard:
    """The pins of one engine; `ask` has something done by its thread."""

    def __init__(self, pages: Pages, ask: Callable[[Callable[[], None]], None]) -> None:
        self._pages, self._ask = pages, ask
        self._lock = threading.Lock()
        self._pins: dict[str, tuple[Pin, set[bytes]]] = {}  # with the names of its pages

    def add(self, token_ids: Many[int], priority: int = 1, seconds: float = inf) -> Pin:
        """Pin the full pages of a prefix (of prompts without a salt) from the next step on. Raises InvalidRequest."""
        size, total = self._pages.page_size, self._pages.pools[0].num_pages
        whole = tuple(token_ids[: len(token_ids) // size * size])
        if not self._pages.prefix_cache:
            raise InvalidRequest("this model keeps no prefixes", "start it without --no-prefix-cache", param="model")
        if not whole:
            raise InvalidRequest(f"{len(token_ids)} tokens fill no page of {size}", "pin a longer one", param="prompt")
        pin = Pin(whole, priority, time.monotonic() + seconds, f"pin-{uuid4().hex[:16]}")
        names = self._names(pin)
        with self._lock:
            self._drop_old()
            count, most = len(names.union(*(held for _, held in self._pins.values()))), int(total * SHARE)
            if count > most or len(self._pins) >= MOST_PINS:
                raise InvalidRequest(
                    f"{count:,} of {total:,} pages would be pinned by {len(self._pins) + 1:,} pins,"
                    f" at most {most:,} pages and {MOST_PINS:,} pins may be",
                    "release one that is not needed, or pin a shorter prefix",
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
        """Those whose time is not over, in the order in which they came."""
        with self._lock:
            self._drop_old()
            return [pin for pin, _ in self._pins.values()]

    def remove(self, pin_id: str) -> bool:
        """False where there is no such pin."""
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
