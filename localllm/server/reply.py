"""From a `Generation` to the response: opened in one place, whole or streamed, in the shape that an API gives it.

A stream may begin before its answer does: when the first piece takes longer than `PATIENCE_S`, the headers go out and
comments keep the connection open; what fails from then on is an event of the stream.
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
PATIENCE_S = 5.0  # how long an error before the first piece still gets a status of its own
FEW_ROWS = 16  # that are written in the event loop
SLICE_ROWS = 4096  # short ones, that are written before other threads may go on
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How a stream is written."""

    on_error: Callable[[LocalLLMError], bytes]  # the last chunk when something fails
    done: bytes = b""  # the end
    media_type: str = "text/event-stream; charset=utf-8"
    ping: bytes = b": ping\n\n"  # sent when nothing came for a while; b"" for formats without comments


class Rendering(Protocol):
    """How an API shows the answers of one request; both raise the error that ended an answer."""

    async def whole(self) -> dict[str, Any]: ...  # the body of a request that does not stream
    def chunks(self) -> AsyncIterator[bytes]: ...  # the stream but its end


async def reply(
    request: Request, asked: Generation, render: Callable[[Reservation], Rendering], stream_format: StreamFormat,
    before: Callable[[], Awaitable[Generation]] | None = None,
) -> Response:  # fmt: skip
    """Answer a request. Raises LocalLLMError, ClientLeft.

    before  work that may take long and says what is asked instead
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
    """Bytes as they come."""

    def __init__(self, chunks: AsyncGenerator[bytes], stream_format: StreamFormat) -> None:
        self.status_code = 200
        self.media_type = stream_format.media_type
        self.background: BackgroundTask | None = None
        self.init_headers(HEADERS)
        self._chunks, self._format = chunks, stream_format
        self._first = asyncio.ensure_future(anext(chunks))
        self._sent_at = 0.0

    async def begin(self) -> None:
        """Wait for the first piece, at most `PATIENCE_S`; an error before that is raised, for a status of its own."""
        try:
            done, _ = await asyncio.wait({self._first}, timeout=PATIENCE_S)
            if done:
                self._first.result()
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises ClientLeft when the client does."""
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
        """Keep the connection open while nothing comes."""
        loop = asyncio.get_running_loop()
        while self._format.ping:
            await asyncio.sleep(max(0.01, self._sent_at + KEEP_ALIVE_S - loop.time()))
            if loop.time() - self._sent_at >= KEEP_ALIVE_S:
                await send({"type": "http.response.body", "body": self._format.ping, "more_body": True})
                self._sent_at = loop.time()

    async def _guarded(self) -> AsyncIterator[bytes]:
        """The pieces, and what ends them: an error is the last of them."""
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
        """End the request behind it, wherever it is."""
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._chunks.aclose()


@asynccontextmanager
async def unless_left(receive: Receive) -> AsyncIterator[None]:
    """The block ends with ClientLeft when the client leaves first. Not to be used while the body is still read."""
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
    """Compact JSON."""
    return _encode(item).encode()


async def with_rows(head: dict[str, Any], name: str, rows: Iterable[Any], count: int) -> Response:
    """`head` and these rows as JSON. Where they are many a thread makes them: the interpreter writes one in one go."""

    def body() -> bytes:
        return dumps(head)[:-1] + f',"{name}":['.encode() + b",".join(map(dumps, rows)) + b"]}"

    made = body() if count <= FEW_ROWS else await asyncio.to_thread(body)
    return Response(made, media_type="application/json")


async def with_lists(answer: dict[str, Any], count: int) -> Response:
    """An answer with lists of so many items as JSON. Long ones are written by a thread, slice by slice, as above."""

    def listed(values: list[Any]) -> bytes:
        slices = (dumps(values[at : at + SLICE_ROWS])[1:-1] for at in range(0, len(values), SLICE_ROWS))
        return b"[" + b",".join(slices) + b"]"

    def body() -> bytes:
        fields = ((dumps(key), listed(one) if isinstance(one, list) else dumps(one)) for key, one in answer.items())
        return b"{" + b",".join(key + b":" + value for key, value in fields) + b"}"

    made = dumps(answer) if count <= SLICE_ROWS else await asyncio.to_thread(body)
    return Response(made, media_type="application/json")


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
