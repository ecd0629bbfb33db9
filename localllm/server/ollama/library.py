"""Ollama's routes that pull, copy and delete models of our own store.

They exist only at the address of `serve --ollama`, which is reachable from this machine only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictStr
from starlette.requests import Request
from starlette.responses import Response

from localllm.request import LoadProgress, OnProgress
from localllm.server.errors import ApiError, error_text, invalid
from localllm.server.middleware import is_at
from localllm.server.openai.schemas import Body
from localllm.server.reply import Stream, StreamFormat, line, unless_left
from localllm.server.served_model import Library
from localllm.server.service import service_of

MAX_PULLS = 4  # concurrent downloads
MAX_NAME = 400
OLLAMA_LINES = StreamFormat(
    lambda error: line({"error": error_text(error)}), media_type="application/x-ndjson", ping=b""
)
Name = Annotated[StrictStr, Field(max_length=MAX_NAME)]


class NameRequest(Body):
    """DELETE /api/delete; older clients send `name`."""

    model: Name | None = None
    name: Name | None = None

    @property
    def wanted(self) -> str:
        """The requested model. Raises ApiError if there is none."""
        wanted = self.model or self.name
        if not wanted:
            raise invalid("model is missing.", "model", "missing_required_parameter")
        return wanted


class PullRequest(NameRequest):
    """POST /api/pull"""

    stream: StrictBool | None = None
    insecure: StrictBool | None = None


class CopyRequest(Body):
    """POST /api/copy"""

    source: Name
    destination: Name


async def pull(request: Request, body: PullRequest) -> Response | dict[str, Any]:
    """Download a model into our own store, with progress lines."""
    library, name, state = _library(request), body.wanted, request.app.state

    async def lines() -> AsyncGenerator[bytes]:
        if state.num_pulls >= MAX_PULLS:
            full = f"{MAX_PULLS} downloads are running, which is the limit; retry later."
            raise ApiError(429, full, "rate_limit_error", "queue_full")
        state.num_pulls += 1
        try:
            yield line({"status": "pulling manifest"})
            async with aclosing(_progress(lambda tell, cancel: library.pull(name, tell, cancel))) as steps:
                async for progress in steps:
                    yield line(_progress_line(name, progress))
            service_of(request).pool.look_again()
            for status in ("verifying sha256 digest", "writing manifest", "success"):
                yield line({"status": status})
        finally:
            state.num_pulls -= 1

    if body.stream is not False:
        stream = Stream(lines(), OLLAMA_LINES)
        await stream.begin()
        return stream
    async with unless_left(request.receive):
        last = [one async for one in lines()][-1]
    answer: dict[str, Any] = json.loads(last)
    return answer


async def _progress(work: Callable[[OnProgress, threading.Event], None]) -> AsyncGenerator[LoadProgress]:
    """Run `work` in a thread and yield its progress, without outdated reports. Closing this cancels the work."""
    loop, cancel = asyncio.get_running_loop(), threading.Event()
    told: asyncio.Queue[LoadProgress | None] = asyncio.Queue()

    def tell(progress: LoadProgress) -> None:
        loop.call_soon_threadsafe(told.put_nowait, progress)

    task = asyncio.ensure_future(asyncio.to_thread(work, tell, cancel))
    task.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (progress := await told.get()) is not None:
            while not told.empty() and (newer := told.get_nowait()) is not None:
                progress = newer
            yield progress
            if task.done() and told.empty():
                break
        task.result()
    finally:
        cancel.set()
        task.cancel()


def _progress_line(name: str, progress: LoadProgress) -> dict[str, Any]:
    if progress.name != "download" or progress.total <= 0:
        return {"status": progress.detail or progress.label}
    digest = hashlib.sha256(name.encode()).hexdigest()  # one per model, because its files download in parallel
    done = min(progress.done, progress.total)
    status = f"pulling {digest[:12]}"
    return {"status": status, "digest": f"sha256:{digest}", "total": progress.total, "completed": done}


async def delete(request: Request, body: NameRequest) -> Response:
    """Remove one of our own models. For another program's model, the error names that program's command."""
    library, service = _library(request), service_of(request)
    model = await service.find(body.wanted)
    await asyncio.to_thread(library.remove, model.source)
    if service.pool.llm_of(model.name) is not None:
        service.pool.unload(model.name)
    service.pool.look_again()
    return Response()


async def copy(request: Request, body: CopyRequest) -> Response:
    """Give one of our own models a second name; both share the files."""
    library, service = _library(request), service_of(request)
    model = await service.find(body.source)
    await asyncio.to_thread(library.copy, model.source, body.destination.removesuffix(":latest"))
    service.pool.look_again()
    return Response()


def check_changes(request: Request) -> None:
    """Raise ApiError 404 except at the address of `serve --ollama`."""
    if request.app.state.library is None or not is_at(request.scope, request.app.state.ollama):
        message = "Models can be changed only at the address of localllm serve --ollama."
        raise ApiError(404, message, code="unknown_url")


def _library(request: Request) -> Library:
    made: Library = request.app.state.library
    return made
