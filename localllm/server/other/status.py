"""Server status: /, /health, /ping, /version, /metrics; for the owner, list, unload and park models."""

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
    """Name the server and the paths of its APIs; at Ollama's address, send the text that its clients expect."""
    if is_at(request.scope, request.app.state.ollama):
        return PlainTextResponse("Ollama is running")
    apis = {"openai": "/v1", "anthropic": "/v1/messages", "ollama": "/api", "openapi": "/openapi.json"}
    return {"name": "localllm", "version": __version__, "apis": apis}


async def health(request: Request) -> dict[str, Any]:
    """Return 200 while requests are accepted, else 503 with the reason.

    `?details` adds run summaries and warnings, if the server needs no key; otherwise the owner uses /localllm/ps.
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
    """Return 200 as long as the process responds."""
    return {}


async def version(request: Request) -> dict[str, Any]:
    """Return the program's version."""
    return {"version": __version__}


async def metrics(request: Request) -> Response:
    """Return the Prometheus metrics."""
    return Response(service_of(request).metrics.text(), headers={"content-type": METRICS_TYPE})


# --- for the owner, used by `localllm ps` and `stop`: require the owner's token; an API key is not enough -------------


class ModelRequest(Body):
    """A body that names a model."""

    model: StrictStr


async def processes(request: Request) -> dict[str, Any]:
    """List the loaded models with their state, memory and load."""
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
    """Unload a model once its requests have ended."""
    return await _done(request, body, service_of(request).pool.unload)


async def park(request: Request, body: ModelRequest) -> dict[str, Any]:
    """Put a model to sleep once its requests have ended."""
    return await _done(request, body, service_of(request).pool.sleep)


async def _done(request: Request, body: ModelRequest, command: Callable[[str], Future[bool]]) -> dict[str, Any]:
    model = await service_of(request).find(body.model)
    if service_of(request).pool.is_lent:
        message = (
            f"{model.name} cannot be unloaded or parked here: it is in use by the program that opened this server."
        )
        raise ApiError(409, f"{message} End that program instead.", code="model_in_use")
    return {"model": model.name, "done": await asyncio.wrap_future(command(model.name))}


def check_owner(request: Request) -> None:
    """Raise ApiError 401 unless the request carries the owner's token."""
    check_token(request.app.state.token, request.headers.get("authorization", ""))


def check_token(token: str, header: str) -> None:
    """Raise ApiError 401 unless an Authorization header carries `token`, which is not empty."""
    scheme, _, given = header.partition(" ")
    if not token or scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise ApiError(401, "This route requires the owner's token.", "authentication_error", "invalid_api_key")
