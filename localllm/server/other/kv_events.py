"""GET /localllm/kv_events: the pages that a model's prefix cache gains and loses, as server-sent events.

Only for the owner, because events contain the tokens of prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.llm.llm import LLM
from localllm.server.errors import ApiError
from localllm.server.reply import EVENTS, Stream, data
from localllm.server.service import Service, service_of

MOST_BATCHES = 1024  # unread batches at which a slow reader's stream ends; a new request starts with all current pages
LOOK_S = 0.5  # between two checks whether the server is shutting down


async def kv_events(request: Request) -> Response:
    """Stream the events of the model in `?model=`, which must be loaded: all current pages, then every change."""
    service = service_of(request)
    name = request.query_params.get("model")
    if not name:  # no default: a client that tries every route would never see this stream end
        raise ApiError(400, "Name a model: add ?model=NAME to the URL.", param="model")
    model = await service.find(name)
    llm = dict(service.pool.awake()).get(model.name)
    if llm is None:
        raise ApiError(404, f"{model.name} is not loaded.", code="model_not_loaded", param="model")
    stream = Stream(_batches(service, llm), EVENTS)
    await stream.begin()
    return stream


async def _batches(service: Service, llm: LLM) -> AsyncGenerator[bytes]:
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_BATCHES + 1)

    def put(item: bytes | None) -> None:
        if waiting.qsize() < MOST_BATCHES:
            waiting.put_nowait(item)
        elif not waiting.full():
            waiting.put_nowait(None)

    def tell(batch: dict[str, Any] | None) -> None:
        loop.call_soon_threadsafe(put, None if batch is None else data(batch))

    stop = llm.engine.watch_pages(tell)
    try:
        while not service.is_draining:
            try:
                async with asyncio.timeout(LOOK_S):  # `wait_for` of Python 3.11 may ignore that the client left
                    item = await waiting.get()
            except TimeoutError:
                continue
            if item is None:
                return
            yield item
    finally:
        stop()
