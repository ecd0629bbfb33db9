"""How streams are written: server-sent events and lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localllm.errors import LocalLLMError

from .errors import openai_body


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How a stream is written.

    on_error  the last chunk when something fails
    done      the end
    ping      sent when nothing came for a while; b"" for formats without comments
    """

    on_error: Callable[[LocalLLMError], bytes]
    done: bytes = b""
    media_type: str = "text/event-stream; charset=utf-8"
    ping: bytes = b": ping\n\n"


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dumps(item: dict[str, Any]) -> bytes:
    """Compact JSON."""
    return _encode(item).encode()


def data(item: dict[str, Any]) -> bytes:
    """One unnamed event."""
    return b"data: " + dumps(item) + b"\n\n"


def named(name: str, item: dict[str, Any]) -> bytes:
    """One named event."""
    return b"event: " + name.encode() + b"\n" + data(item)


def line(item: dict[str, Any]) -> bytes:
    """One line of JSON."""
    return dumps(item) + b"\n"


# OpenAI's server-sent events: an error is an event, `[DONE]` is the end
EVENTS = StreamFormat(lambda error: data(openai_body(error)), b"data: [DONE]\n\n")
