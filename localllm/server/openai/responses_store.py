"""Bounded in-memory store of finished /v1/responses; the oldest are dropped first. Nothing is written to disk."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """One response, and the conversation it answered."""

    response: dict[str, Any]  # as sent to the client
    # its input, oldest first, including the items of earlier responses
    input_items: list[dict[str, Any]]
    size_bytes: int


class ResponseStore:
    """The most recent responses by id. Used only from the event loop."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._items: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def put(self, response: dict[str, Any], input_items: list[dict[str, Any]]) -> None:
        """Store a response, unless its conversation is larger than the whole store."""
        size = len(json.dumps(response)) + len(json.dumps(input_items))
        if size > self._max_bytes:
            return
        self._items[response["id"]] = Stored(response, input_items, size)
        self._bytes += size
        while self._bytes > self._max_bytes or len(self._items) > self._max_responses:
            self._bytes -= self._items.popitem(last=False)[1].size_bytes

    def get(self, response_id: str) -> Stored | None:
        """Return a response and mark it as the newest."""
        found = self._items.get(response_id)
        if found is not None:
            self._items.move_to_end(response_id)
        return found

    def item(self, item_id: str) -> dict[str, Any] | None:
        """Find an output item by id, searching the newest response first."""
        items = (item for stored in reversed(self._items.values()) for item in stored.response["output"])
        return next((dict(item) for item in items if item.get("id") == item_id), None)

    def remove(self, response_id: str) -> bool:
        found = self._items.pop(response_id, None)
        self._bytes -= found.size_bytes if found is not None else 0
        return found is not None
