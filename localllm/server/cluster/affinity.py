"""Routing by prefix: a request goes to the replica that has cached its beginning, else to the least loaded one.

A request's text is cut at the end of each message, and every `PIECE` characters in longer ones; each cut has the digest
of all text before it. The next request of a conversation begins with the text of the previous one, so it has the same
cuts and finds the replica noted for them. This module does not depend on Ray.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

from localllm.server.anthropic.schemas import without_billing

PIECE = 1024  # characters, about 16 pages
MAX_NOTED = 200_000  # most recent cuts kept
MAX_CUTS = 4096  # cuts per request; text after them is ignored
MAX_HOLDERS = 4  # replicas kept per cut
TAG_CHARS = 8
_TAG = re.compile(rf"[^/_]_([0-9a-f]{{{TAG_CHARS}}})")
# fields of a message that become prompt text; the others are options
READ = ("text", "content", "arguments", "input", "output", "tool_calls", "function", "image_url", "source")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a request, for routing.

    cuts   (characters up to here, their digest), ascending
    own    a match of at least this many characters is this conversation's; a shorter one may be a shared system prompt
    maker  the tag of the replica that stores what the request refers to, such as an earlier response
    """

    cuts: tuple[tuple[int, bytes], ...] = ()
    own: int = 0
    maker: str = ""

    @property
    def size(self) -> int:
        return self.cuts[-1][0] if self.cuts else 0


def tag_of(replica: str) -> str:
    """The tag that a replica puts into the ids of the objects it stores."""
    return blake2b(replica.encode(), digest_size=TAG_CHARS // 2).hexdigest()


def prefix_of(path: str, body: bytes) -> Prefix:
    """Return the prefix of a request to any route. A body that is not a JSON object has none; its route rejects it."""
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Prefix(maker=_tag_in(path))
    turns = list(islice(_turns(fields), MAX_CUTS))
    maker = _tag_in(path) or _maker(fields)
    first = next((number for number, (role, _) in enumerate(turns) if role not in ("system", "developer")), 0)
    cuts: list[tuple[int, bytes]] = []
    digest, size, own = b"", 0, 0
    for number, (role, text) in enumerate(turns):
        for start in range(0, len(text) or 1, PIECE):
            piece = text[start : start + PIECE]
            size += len(piece) + 1
            digest = blake2b(f"{role}\0{piece}".encode("utf-8", "replace"), digest_size=12, key=digest).digest()
            cuts.append((size, digest))
            if len(cuts) == MAX_CUTS:
                return Prefix(tuple(cuts), own or (size + 1) // 2, maker)
        if number == first:
            own = size
    return Prefix(tuple(cuts), own if len(turns) > 1 or "prompt" not in fields else (size + 1) // 2, maker)


def _turns(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (role, text) in prompt order, for a request of any API."""
    for name in ("system", "instructions"):
        if fields.get(name):
            yield "system", without_billing("\n".join(_texts(fields[name])))
    for name in ("messages", "input"):
        value = fields.get(name)
        for item in value if isinstance(value, list) else [value] if value else ():
            role = item.get("role") if isinstance(item, dict) else None
            yield str(role or name), "".join(_texts(item))
    if fields.get("prompt"):
        yield "prompt", "".join(_texts(fields["prompt"]))


def _texts(value: Any, depth: int = 8) -> Iterator[str]:
    """Yield the parts of a message that become prompt text, such as texts and call arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and depth:
        for item in value:
            yield from _texts(item, depth - 1)
    elif isinstance(value, int):  # token ids
        yield f"{value} "
    elif isinstance(value, dict) and depth:
        for name in READ:
            if name in value:
                yield from _texts(value[name], depth - 1)


def _maker(fields: Mapping[str, Any]) -> str:
    """The tag in the first id of a stored object: a response, one of its items, or a call that waits for approval."""
    items = fields.get("input")
    named = [fields.get("previous_response_id")]
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            named += [item.get("approval_request_id"), item.get("id") if item.get("type") == "item_reference" else None]
    return next((tag for name in named if isinstance(name, str) and (tag := _tag_in(name))), "")


def _tag_in(name: str) -> str:
    """`abcd1234` from `/v1/responses/resp_abcd1234…/input_items` or `msg_abcd1234…`; "" from other names."""
    found = _TAG.search(name)
    return found[1] if found else ""


class Fleet:
    """The running replicas, shared by this process's router and door, which run in different threads."""

    running: frozenset[str] = frozenset()


class Affinity:
    """Record of which replica got which prefix. Used from one thread.

    spare  a replica keeps its conversations as long as it has fewer than this many requests more than the least loaded
           one; beyond that, prefilling a conversation elsewhere costs less than waiting
    """

    def __init__(self, spare: int, max_noted: int = MAX_NOTED) -> None:
        self._spare, self._max_noted = spare, max_noted
        self._holders: OrderedDict[bytes, list[str]] = OrderedDict()  # by cut, most recent replica first

    def rank(self, prefix: Prefix, loads: Mapping[str, int]) -> list[str]:
        """Order the replicas of `loads` (name -> requests), best first; only the maker if the request refers to one."""
        if made := [name for name in loads if prefix.maker and tag_of(name) == prefix.maker]:
            return made  # alone, since Ray would try the next one if this one is slow to report its load
        key = self._key(prefix)
        rest = sorted(loads, key=lambda name: (loads[name], _tie_break(key, name)))
        chosen = self._holding(prefix, loads)
        return [*chosen, *(name for name in rest if name not in chosen)]

    def _holding(self, prefix: Prefix, loads: Mapping[str, int]) -> list[str]:
        """The replica that holds enough of the prefix and is not too busy, or an empty list."""
        for size, digest in reversed(prefix.cuts):
            if size < prefix.own and 2 * size < prefix.size:
                break
            holders = [name for name in self._holders.get(digest, ()) if name in loads]
            if holders:
                best = min(holders, key=loads.__getitem__)
                return [best] if loads[best] - min(loads.values()) < self._spare else []
        return []

    def note(self, prefix: Prefix, replica: str) -> None:
        """Record that a request went to this replica, which will hold its pages."""
        for _, digest in prefix.cuts:
            holders = self._holders.pop(digest, [])
            self._holders[digest] = [replica, *(name for name in holders if name != replica)][:MAX_HOLDERS]
        while len(self._holders) > self._max_noted:
            self._holders.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all replicas except these."""
        gone = {name for holders in self._holders.values() for name in holders}.difference(replicas)
        if gone:
            left = ((cut, [name for name in holders if name not in gone]) for cut, holders in self._holders.items())
            self._holders = OrderedDict((cut, holders) for cut, holders in left if holders)

    def _key(self, prefix: Prefix) -> bytes:
        """A key common to all requests of a conversation, so that every door breaks ties alike."""
        return next((digest for size, digest in prefix.cuts if size >= prefix.own), b"")


def _tie_break(key: bytes, name: str) -> bytes:
    return blake2b(name.encode(), key=key, digest_size=8).digest()
