"""Turns a `Generation` into the HTTP response, whole or streamed, in the format of each API.

If the first chunk takes longer than `PATIENCE_S`, a stream sends its headers early, and comments keep the connection
open; errors from then on are events of the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from localllm.errors import LocalLLMError

from .errors import ClientLeft, bug, openai_body
from .generation import Generation
from .service import Reservation, service_of

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
PATIENCE_S = 5.0  # an error before the first chunk gets its own HTTP status if it occurs within this time
FEW_ROWS = 16  # up to this many rows are serialized in the event loop
SLICE_ROWS = 4096  # short items serialized before other threads get the GIL
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """Wire format of a stream."""

    on_error: Callable[[LocalLLMError], bytes]  # the last chunk after an error
    done: bytes = b""  # the end marker
    media_type: str = "text/event-stream; charset=utf-8"
    ping: bytes = b": ping\n\n"  # sent after a silence; b"" for formats without comments


class Rendering(Protocol):
    """Renders the responses of one request in an API's format; both methods raise the error that ended a sequence."""

    async def whole(self) -> dict[str, Any]: ...  # the body without streaming
    def chunks(self) -> AsyncIterator[bytes]: ...  # the stream without its end marker


async def reply(
    request: Request, asked: Generation, render: Callable[[Reservation], Rendering], stream_format: StreamFormat,
    before: Callable[[], Awaitable[Generation]] | None = None,
) -> Response:  # fmt: skip
    """Answer a request. Raises LocalLLMError, ClientLeft.

    before  slow work to do first; returns the `Generation` to run instead of `asked`
    """
    service = service_of(request)

    async def opened() -> Reservation:
        return await service.open(request, asked if before is None else await before())

    async def chunks() -> AsyncGenerator[bytes]:
        reservation = await opened()
        try:
            rendering = render(reservation)
            await reservation.stream.ready()
            async for chunk in rendering.chunks():
                yield chunk
        finally:
            reservation.abort()

    async with unless_left(request.receive):
        if asked.streams:
            stream = Stream(chunks(), stream_format)
            await stream.begin()
            return stream
        reservation = await opened()
        try:
            return JSONResponse(await render(reservation).whole())
        finally:
            reservation.abort()


class Stream(Response):
    """Response that sends chunks as they arrive."""

    def __init__(self, chunks: AsyncGenerator[bytes], stream_format: StreamFormat) -> None:
        self.status_code = 200
        self.media_type = stream_format.media_type
        self.background: BackgroundTask | None = None
        self.init_headers(HEADERS)
        self._chunks, self._format = chunks, stream_format
        self._first = asyncio.ensure_future(anext(chunks))
        self._sent_at = 0.0

    async def begin(self) -> None:
        """Wait up to `PATIENCE_S` for the first chunk; an error in that time is raised and gets its own HTTP status."""
        try:
            done, _ = await asyncio.wait({self._first}, timeout=PATIENCE_S)
            if done:
                self._first.result()
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI). Raises ClientLeft when the client disconnects."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        pinging = asyncio.ensure_future(self._ping(send))
        try:
            async with unless_left(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for chunk in self._guarded():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    self._sent_at = loop.time()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            pinging.cancel()
            await self._close()

    async def _ping(self, send: Send) -> None:
        """Keep the connection open during silences."""
        loop = asyncio.get_running_loop()
        while self._format.ping:
            await asyncio.sleep(max(0.01, self._sent_at + KEEP_ALIVE_S - loop.time()))
            if loop.time() - self._sent_at >= KEEP_ALIVE_S:
                await send({"type": "http.response.body", "body": self._format.ping, "more_body": True})
                self._sent_at = loop.time()

    async def _guarded(self) -> AsyncIterator[bytes]:
        """Yield the chunks, then the error if there is one, then the end marker."""
        end = self._format.done
        try:
            yield await asyncio.shield(self._first)
            async for chunk in self._chunks:
                yield chunk
        except LocalLLMError as error:
            end = self._format.on_error(error) + end
        except Exception:
            log.exception("a stream failed")
            end = self._format.on_error(bug()) + end
        yield end

    async def _close(self) -> None:
        """Abort the underlying request at whatever stage it is."""
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._chunks.aclose()


@asynccontextmanager
async def unless_left(receive: Receive) -> AsyncIterator[None]:
    """End the block with ClientLeft when the client disconnects. Use it only after the body has been read."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
        raise ClientLeft from None
    finally:
        watcher.cancel()


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(item: Any) -> bytes:
    """Serialize to compact JSON."""
    return _encode(item).encode()


async def with_rows(head: dict[str, Any], name: str, rows: Iterable[Any], count: int) -> Response:
    """Respond with `head` and rows as JSON; many rows are serialized one by one in a thread, to keep the GIL free."""

    def body() -> bytes:
        return dumps(head)[:-1] + f',"{name}":['.encode() + b",".join(map(dumps, rows)) + b"]}"

    made = body() if count <= FEW_ROWS else await asyncio.to_thread(body)
    return Response(made, media_type="application/json")


async def with_lists(answer: dict[str, Any], count: int) -> Response:
    """Respond with JSON that holds lists of `count` items; long ones are serialized in a thread, slice by slice."""

    def listed(values: list[Any]) -> bytes:
        slices = (dumps(values[at : at + SLICE_ROWS])[1:-1] for at in range(0, len(values), SLICE_ROWS))
        return b"[" + b",".join(slices) + b"]"

    def body() -> bytes:
        fields = ((dumps(key), listed(one) if isinstance(one, list) else dumps(one)) for key, one in answer.items())
        return b"{" + b",".join(key + b":" + value for key, value in fields) + b"}"

    made = dumps(answer) if count <= SLICE_ROWS else await asyncio.to_thread(body)
    return Response(made, media_type="application/json")


def data(item: dict[str, Any]) -> bytes:
    """One unnamed server-sent event."""
    return b"data: " + dumps(item) + b"\n\n"


def named(name: str, item: dict[str, Any]) -> bytes:
    """One named server-sent event."""
    return b"event: " + name.encode() + b"\n" + data(item)


def line(item: dict[str, Any]) -> bytes:
    """One line of JSON."""
    return dumps(item) + b"\n"


# OpenAI's server-sent events: errors are events, `[DONE]` is the end marker
EVENTS = StreamFormat(lambda error: data(openai_body(error)), b"data: [DONE]\n\n")
