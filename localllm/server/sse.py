"""Streamed answers: server-sent events and lines of JSON, kept alive while nothing comes, ended when the client leaves.

A stream may begin before its answer does: when the first piece takes longer than `PATIENCE_S`, the headers go out and
comments keep the connection open; what fails from then on is an event of the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
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
PATIENCE_S = 5.0  # how long an error before the first piece still gets a status of its own
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that has begun.

    chunks  what to send
    close   ends the requests behind it; called in any case, also when `chunks` was never asked for anything
    """

    chunks: AsyncIterator[bytes]
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How a stream is written.

    on_error  the last chunk when something fails
    done      the end
    ping      sent when nothing came for `KEEP_ALIVE_S`; b"" for formats without comments
    """

    on_error: Callable[[ApiError], bytes]
    done: bytes = b""
    media_type: str = "text/event-stream; charset=utf-8"
    ping: bytes = b": ping\n\n"


class Stream(Response):
    """Bytes as they come."""

    def __init__(self, opened: Opened, stream_format: StreamFormat) -> None:
        self.status_code = 200
        self.media_type = stream_format.media_type
        self.background: BackgroundTask | None = None
        self.init_headers(HEADERS)
        self._chunks, self._close = _guarded(opened.chunks, stream_format), opened.close
        self._ping = stream_format.ping
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
            async with aclosing(self._chunks) as chunks:
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
            self._close()

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


async def _guarded(chunks: AsyncIterator[bytes], stream_format: StreamFormat) -> AsyncGenerator[bytes]:
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
    yield (stream_format.on_error(error) if error is not None else b"") + stream_format.done


async def first_or_stream(opening: Coroutine[Any, Any, Opened], stream_format: StreamFormat) -> Stream:
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
    return Stream(task.result() if done else Opened(_later(task), close), stream_format)


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


# OpenAI's server-sent events: an error is an event, `[DONE]` is the end
EVENTS = StreamFormat(lambda error: data(error.body), b"data: [DONE]\n\n")
