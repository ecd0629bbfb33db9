"""Server-sent events: one `data:` line per object, `[DONE]` at the end, an error object if it breaks on the way."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from localllm.errors import LocalLLMError

from .errors import ApiError, from_error

log = logging.getLogger(__name__)

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event_stream(objects: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """A response that streams the objects."""
    return StreamingResponse(_lines(objects), media_type="text/event-stream; charset=utf-8", headers=HEADERS)


async def _lines(objects: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for item in objects:
            yield _data(item)
    except LocalLLMError as error:
        yield _data(from_error(error).body)
    except Exception:
        log.exception("a stream failed")
        yield _data(ApiError(500, "The server failed while answering.", "server_error", "internal_error").body)
    yield b"data: [DONE]\n\n"


def _data(item: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
