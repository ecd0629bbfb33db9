"""The records of a saved chat: the chat, its messages as a tree, and search hits."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date
from typing import Any, TypeVar

STREAMING = "streaming"  # a message that is still being written
PARTIAL = "partial"  # a message whose writer ended before finishing it
PICTURE_URL = re.compile(r"data:image/[a-z]{3,8};base64,[A-Za-z0-9+/=]+")  # an attached picture's own bytes
LAST_MOMENT = 250_000_000_000.0  # seconds since the epoch, in the year 9892: later times have no date


@dataclass(frozen=True, slots=True)
class SavedMessage:
    """One message. Several with the same parent are branches."""

    id: int
    chat_id: str
    parent_id: int | None
    role: str  # user | assistant | system
    content: str
    reasoning: str = ""
    model: str = ""
    # for a question: attachments; for an answer: rounds of tool calls with their results
    params: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)  # token counts and times of an answer
    created: float = field(default_factory=time.time)  # seconds since the epoch
    status: str = "done"  # done | streaming | partial | abort | length | error


@dataclass(frozen=True, slots=True)
class SavedChat:
    """One conversation, without its messages."""

    id: str
    title: str = ""
    model: str = ""
    system: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)  # sampling, thinking, summary
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    leaf_id: int | None = None  # the last message of the visible branch
    num_messages: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that matches a search."""

    chat_id: str
    title: str
    message_id: int
    role: str
    snippet: str  # text around the matches, which are enclosed in \x02 and \x03
    created: float


R = TypeVar("R", SavedChat, SavedMessage, Hit)


def from_row(kind: type[R], row: Sequence[Any]) -> R:
    """Make a record from a row whose columns are in the order of its fields.

    SQLite stores any type in any column: a value of another type, or out of range, is converted to one that fits.
    """
    return kind(*(_FIT[str(f.type)](value) for f, value in zip(fields(kind), row, strict=True)))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else "" if value is None else str(value)


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _moment(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value <= LAST_MOMENT else 0.0


# type of a field, as written -> converter for a column's value
_FIT: dict[str, Callable[[Any], Any]] = {
    "str": _text,
    "int": lambda value: _whole(value) or 0,
    "int | None": _whole,
    "float": _moment,
    "Mapping[str, Any]": lambda value: value if isinstance(value, dict) else {},
}


def new_chat_id() -> str:
    """Twelve hexadecimal digits; any unambiguous prefix names the chat."""
    return os.urandom(6).hex()


def new_message_id() -> int:
    """A random number that is unique across processes."""
    return int.from_bytes(os.urandom(8)) >> 2 or 1


def active_path(messages: Sequence[SavedMessage], leaf_id: int | None) -> list[SavedMessage]:
    """The messages from the first to `leaf_id`, by default to the newest leaf. Broken parent links end the path."""
    by_id = {message.id: message for message in messages}
    at = by_id.get(leaf_id) if leaf_id is not None else None
    if at is None and messages:
        parents = {message.parent_id for message in messages}
        leaves = [message for message in messages if message.id not in parents] or list(messages)
        at = max(leaves, key=lambda message: message.created)
    path: list[SavedMessage] = []
    seen: set[int] = set()
    while at is not None and at.id not in seen:
        seen.add(at.id)
        path.append(at)
        at = by_id.get(at.parent_id) if at.parent_id is not None else None
    return path[::-1]


def day_of(when: float, now: float | None = None) -> str:
    """Today, Yesterday, Last week, or the month: headings for a list of chats."""
    day = date.fromtimestamp(when)
    gap = (date.fromtimestamp(time.time() if now is None else now) - day).days
    if gap <= 0:
        return "Today"
    if gap == 1:
        return "Yesterday"
    return "Last week" if gap < 7 else day.strftime("%B %Y")
