"""Streamed answers: server-sent events and lines of JSON, kept alive while nothing comes, ended when the client leaves.

A stream may begin before its answer does: when the first piece takes longer than `PATIENCE_S`, the headers go out and
comments keep the connection open; what fails from then on is an event of the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localllm.errors import LocalLLMError

from .errors import ApiError, ClientLeft, bug, from_error

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
PATIENCE_S = 5.0
"""how long an error before the first piece still gets a status of its own"""
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
PING = b": ping\n\n"


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that has begun.

    chunks  what to send
    close   ends the requests behind it; called in any case, also when `chunks` was never asked for anything
    """

    chunks: AsyncIterator[bytes]
    close: Callable[[], None]


class Stream(Response):
    """Bytes as they come.

    ping  sent when nothing came for `KEEP_ALIVE_S`; b"" for formats without comments
    """

    def __init__(self, opened: Opened, media_type: str, ping: bytes = PING) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background: BackgroundTask | None = None
        self.init_headers(HEADERS)
        self._opened, self._ping = opened, ping
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises ClientLeft when the client does."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._sent_at = loop.time()
        watcher = asyncio.ensure_future(self._watch(receive, send, task))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._opened.chunks) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    self._sent_at = loop.time()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not watcher.done() or watcher.cancelled() or not watcher.result():
                raise
            task.uncancel()
            raise ClientLeft from None
        finally:
            watcher.cancel()
            self._opened.close()

    async def _watch(self, receive: Receive, send: Send, task: asyncio.Task[Any]) -> bool:
        """Keep the connection open; end the stream when the client leaves (then True)."""
        loop = asyncio.get_running_loop()
        message = asyncio.ensure_future(receive())
        try:
            while True:
                wait = self._sent_at + KEEP_ALIVE_S - loop.time()
                done, _ = await asyncio.wait({message}, timeout=max(0.01, wait))
                if done:
                    if message.result()["type"] == "http.disconnect":
                        task.cancel()
                        return True
                    message = asyncio.ensure_future(receive())
                elif self._ping and loop.time() - self._sent_at >= KEEP_ALIVE_S:
                    await send({"type": "http.response.body", "body": self._ping, "more_body": True})
                    self._sent_at = loop.time()
        finally:
            message.cancel()


def event_stream(opened: Opened, done: bytes = b"data: [DONE]\n\n") -> Stream:
    """Server-sent events in OpenAI's way: an error is an event, `[DONE]` is the end."""
    return _stream(opened, lambda error: data(error.body), done, "text/event-stream; charset=utf-8", PING)


def named_event_stream(opened: Opened, on_error: Callable[[ApiError], bytes]) -> Stream:
    """Server-sent events with names; `on_error` writes the last one when something fails."""
    return _stream(opened, on_error, b"", "text/event-stream; charset=utf-8", PING)


def line_stream(opened: Opened) -> Stream:
    """Ollama's way: one JSON object a line."""
    return _stream(opened, lambda e: line({"error": e.body["error"]["message"]}), b"", "application/x-ndjson", b"")


def _stream(opened: Opened, on_error: Callable[[ApiError], bytes], done: bytes, media_type: str, ping: bytes) -> Stream:
    return Stream(Opened(_guarded(opened.chunks, on_error, done), opened.close), media_type, ping)


async def _guarded(
    chunks: AsyncIterator[bytes], on_error: Callable[[ApiError], bytes], done: bytes
) -> AsyncIterator[bytes]:
    error: ApiError | None = None
    async with aclosing(chunks) as inner:  # type: ignore[type-var]
        try:
            async for chunk in inner:
                yield chunk
        except ApiError as failed:
            error = failed
        except LocalLLMError as failed:
            error = from_error(failed)
        except Exception:
            log.exception("a stream failed")
            error = bug()
    yield (on_error(error) if error is not None else b"") + done


async def first_or_stream(opening: Coroutine[Any, Any, Opened], wrap: Callable[[Opened], Stream]) -> Stream:
    """A stream over what `opening` gives, begun at the latest after `PATIENCE_S`.

    An error that `opening` raises before that is raised here, so that it gets a status of its own.
    """
    task = asyncio.ensure_future(opening)

    def close() -> None:
        """The opening ends if it still goes on; what it has opened already is closed."""
        task.cancel()
        task.add_done_callback(_close)

    try:
        done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
    except asyncio.CancelledError:
        close()
        raise
    return wrap(task.result() if done else Opened(_later(task), close))


def _close(task: asyncio.Task[Opened]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _later(task: asyncio.Task[Opened]) -> AsyncIterator[bytes]:
    opened = await asyncio.shield(task)
    async with aclosing(opened.chunks) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            yield chunk


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
