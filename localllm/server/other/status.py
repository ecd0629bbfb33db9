"""How the server is: /, /health, /ping, /version, /metrics; and for its owner what is loaded, and the end of it."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pydantic import StrictStr
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localllm._version import __version__
from localllm.server.errors import ApiError
from localllm.server.middleware import is_at
from localllm.server.openai.schemas import Body
from localllm.server.service import service_of

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def root(request: Request) -> Response | dict[str, Any]:
    """Who answers here, and where its APIs begin; at Ollama's address the words that its clients look for."""
    if is_at(request.scope, request.app.state.ollama):
        return PlainTextResponse("Ollama is running")
    apis = {"openai": "/v1", "anthropic": "/v1/messages", "ollama": "/api", "openapi": "/openapi.json"}
    return {"name": "localllm", "version": __version__, "apis": apis}


async def health(request: Request) -> dict[str, Any]:
    """200 while requests are taken, 503 with the reason otherwise.

    `?details` adds what runs how, where no key is needed anyway; elsewhere /localllm/ps tells the owner.
    """
    service = service_of(request)
    service.check_ready()
    answer: dict[str, Any] = {"status": "ok"}
    if "details" in request.query_params and request.app.state.tells_details:
        answer["models"] = [
            {"model": name, "truth_line": llm.run_summary, "warnings": llm.state().warnings}
            for name, llm in service.pool.awake()
        ]
    return answer


async def ping(request: Request) -> dict[str, Any]:
    """200 as long as the process answers at all."""
    return {}


async def version(request: Request) -> dict[str, Any]:
    """The program's version."""
    return {"version": __version__}


async def metrics(request: Request) -> Response:
    """Counters and gauges for Prometheus."""
    return Response(service_of(request).metrics.text(), headers={"content-type": METRICS_TYPE})


# --- for the owner: `localllm ps` and `stop`; only the owner's token opens these routes, a key does not ---------------


class ModelRequest(Body):
    """Which model."""

    model: StrictStr


async def processes(request: Request) -> dict[str, Any]:
    """The loaded models, with what they hold and do."""
    service = service_of(request)
    rows = []
    for row in service.pool.loaded():
        facts: dict[str, Any] = {
            "model": row.name, "state": str(row.state), "pinned": row.pinned, "users": row.users,
            "up_s": max(0.0, time.time() - row.loaded_at) if row.loaded_at else 0.0, "expires_in_s": row.expires_in_s,
        }  # fmt: skip
        llm = row.llm
        if llm is not None:
            plan, queue = llm.plan, service.queues.get(row.name)
            facts |= {
                "device": plan.device, "ctx": plan.ctx, "parallel": plan.max_parallel, "bytes": llm.resident_bytes,
                "waiting": queue.num_waiting if queue else 0,
            }  # fmt: skip
            if llm.is_awake:
                facts["running"] = llm.stats().num_running
                facts |= {"truth_line": llm.run_summary, "warnings": llm.state().warnings}
        rows.append(facts)
    return {"models": rows, "draining": service.is_draining, "decode_tps": service.metrics.decode_tps}


async def unload(request: Request, body: ModelRequest) -> dict[str, Any]:
    """Unload a model when its requests have ended."""
    return await _done(request, body, service_of(request).pool.unload)


async def park(request: Request, body: ModelRequest) -> dict[str, Any]:
    """Put a model to sleep when its requests have ended."""
    return await _done(request, body, service_of(request).pool.sleep)


async def _done(request: Request, body: ModelRequest, command: Callable[[str], Future[bool]]) -> dict[str, Any]:
    model = await service_of(request).find(body.model)
    return {"model": model.name, "done": await asyncio.wrap_future(command(model.name))}


def check_owner(request: Request) -> None:
    """Raise ApiError 401 for whoever does not have the owner's token."""
    token = request.app.state.token
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if not token or scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise ApiError(401, "This route requires the owner's token.", "authentication_error", "invalid_api_key")
