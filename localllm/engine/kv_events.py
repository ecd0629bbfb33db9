"""Prefix cache events for subscribers, in vLLM's format of KV cache events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from .radix_cache import Node, RadixCache

log = logging.getLogger(__name__)

Batch = dict[str, Any]  # ts: seconds since the epoch; events: in order
Listener = Callable[[Batch | None], None]  # called in the engine's thread; None when the engine stops


class KVEvents:
    """Collects events between steps. Costs nothing without listeners.

    medium   where the pages are: GPU or CPU
    """

    def __init__(self, tree: RadixCache, medium: str) -> None:
        self._tree, self._medium = tree, medium
        self._events: list[dict[str, Any]] = []
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        """Add a listener: it gets the present contents first, then all changes."""
        self.flush()
        for node in self._tree.nodes():
            self.stored(node)
        first, self._events = self._events, []
        try:
            listener({"ts": time.time(), "events": first})
        except Exception:  # as in `_send`
            log.exception("a listener of cache events failed")
            return
        if not self._listeners:
            self._tree.watchers.append(self)
        self._listeners.append(listener)

    def drop(self, listener: Listener) -> None:
        """Remove a listener; unknown ones are ignored."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            if not self._listeners:
                self._tree.watchers.remove(self)
                self._events.clear()

    def stored(self, node: Node) -> None:
        assert node.parent is not None
        above = None if node.parent.parent is None else block_hash(node.parent)
        tokens = [max(token, -1) for token in node.key]  # image keys are negative
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockStored" and above == last["block_hashes"][-1]:
            last["block_hashes"].append(block_hash(node))
            last["token_ids"] += tokens
            return
        self._events.append(
            {  # in the order of vLLM's fields
                "type": "BlockStored", "block_hashes": [block_hash(node)], "parent_block_hash": above,
                "token_ids": tokens, "block_size": len(tokens), "lora_id": None, "medium": self._medium,
                "lora_name": None,
            }
        )  # fmt: skip

    def kept(self, node: Node) -> None:
        """Checkpoints are not reported."""

    def removed(self, node: Node) -> None:
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockRemoved":
            last["block_hashes"].append(block_hash(node))
        else:
            hashes = [block_hash(node)]
            self._events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": self._medium})

    def flush(self) -> None:
        """Send the events since the last call."""
        if not self._events:
            return
        events, self._events = self._events, []
        if not self._tree.num_nodes:
            events = [{"type": "AllBlocksCleared"}]
        self._send({"ts": time.time(), "events": events})

    def end(self) -> None:
        """Report that the engine stops and its pages are gone."""
        if self._listeners:
            self._send({"ts": time.time(), "events": [{"type": "AllBlocksCleared"}]})
            self._send(None)

    def _send(self, batch: Batch | None) -> None:
        for listener in list(self._listeners):
            try:
                listener(batch)
            except Exception:  # for example, the subscriber's event loop is closed
                log.exception("a listener of cache events failed")
                self.drop(listener)


def block_hash(node: Node) -> int:
    """64 bits of a page's digest: equal for equal prefixes, in every process."""
    return int.from_bytes(node.digest[:8], "big")
