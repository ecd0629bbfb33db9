"""From a `Generation` to the response: opened in one place, whole or streamed, in the shape that an API gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.llm.outputs import RequestOutput

from .errors import ClientLeft, Rename, renaming
from .generation import Generation
from .service import Reservation, service_of
from .sse import Opened, StreamFormat, first_or_stream


class Rendering(Protocol):
    """How an API shows the answers of one request."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The body of a request that does not stream"""

    def chunks(self) -> AsyncIterator[bytes]:
        """The stream but its end; raises the error that ended an answer"""


async def reply(
    request: Request, asked: Generation, render: Callable[[Reservation], Rendering], stream_format: StreamFormat,
    rename: Rename = lambda param: param,
) -> Response:  # fmt: skip
    """Answer a request. Raises ApiError, LocalLLMError, ClientLeft.

    rename  a field of a chat request -> its name in this API, for errors
    """
    service = service_of(request)

    async def opened() -> Opened:
        with renaming(rename):
            reservation = await service.open(request, asked)
        try:
            rendering = render(reservation)
            await reservation.streams[0].ready()
        except BaseException:
            reservation.abort()
            raise
        return Opened(rendering.chunks(), reservation.abort)

    async with unless_left(request):
        if asked.streams:
            return await first_or_stream(opened(), stream_format)
        with renaming(rename):
            reservation = await service.open(request, asked)
        rendering = render(reservation)
        outputs = await reservation.outputs()
    return JSONResponse(rendering.whole(outputs))


@asynccontextmanager
async def unless_left(request: Request) -> AsyncIterator[None]:
    """The block ends with ClientLeft when the client leaves first. Not to be used while the body is still read."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
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
