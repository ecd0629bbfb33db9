"""/localllm/pins and /localllm/unpin: prefixes that the cache evicts last, by priority, for a time. For the owner."""

from __future__ import annotations

import time
from math import inf, isfinite
from typing import Annotated, Any

from pydantic import Field, StrictInt, StrictStr
from starlette.requests import Request

from localllm.request import SamplingParams
from localllm.server.errors import ApiError
from localllm.server.openai.schemas import Body
from localllm.server.other.text import TokenizeRequest, tokens_of
from localllm.server.reply import unless_left
from localllm.server.service import service_of

MOST_S = 10 * 366 * 86400


class PinRequest(TokenizeRequest):
    """The prefix to pin, given as for POST /tokenize; higher priorities are evicted later, until `ttl_s` has passed."""

    priority: Annotated[StrictInt, Field(ge=1, le=100)] = 1
    ttl_s: Annotated[float, Field(gt=0, le=MOST_S, strict=True)] | None = None


class UnpinRequest(Body):
    """POST /localllm/unpin"""

    id: Annotated[StrictStr, Field(max_length=100)]


async def pin(request: Request, body: PinRequest) -> dict[str, Any]:
    """Compute a prefix and pin its full pages in the prefix cache."""
    tokens = (await tokens_of(request, body))["tokens"]
    service = service_of(request)
    async with unless_left(request.receive), service.reserve(request, body.model) as reservation:
        llm = reservation.llm
        made = llm.engine.pins.add(tokens, body.priority, inf if body.ttl_s is None else body.ttl_s)
        try:
            once = SamplingParams(temperature=0, max_tokens=1)
            await service.in_thread(lambda: llm.submit(made.token_ids, once).answer())
        except BaseException:
            llm.engine.pins.remove(made.pin_id)
            raise
    return _row(reservation.model.name, made)


async def pins(request: Request) -> dict[str, Any]:
    """List the pins of all loaded models; an unloaded or sleeping model has none."""
    loaded = service_of(request).pool.awake()
    return {"pins": [_row(name, one) for name, llm in loaded for one in llm.engine.pins.all()]}


async def unpin(request: Request, body: UnpinRequest) -> dict[str, Any]:
    """Remove a pin; its pages stay in the cache like any others."""
    if not any(llm.engine.pins.remove(body.id) for _, llm in service_of(request).pool.awake()):
        raise ApiError(404, f"There is no pin {body.id!r}.", code="pin_not_found", param="id")
    return {"id": body.id, "deleted": True}


def _row(model: str, pin: Any) -> dict[str, Any]:
    left = pin.until - time.monotonic()
    return {
        "id": pin.pin_id, "model": model, "tokens": len(pin.token_ids), "priority": pin.priority,
        "expires_in_s": round(left, 1) if isfinite(left) else None,
    }  # fmt: skip
