"""How the server is: /, /health, /ping, /version, /metrics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm._version import __version__
from localllm.server.service import service_of

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def root(request: Request) -> Response:
    """Who answers here, and where its APIs begin; what Ollama's clients look at first."""
    apis = {"openai": "/v1", "anthropic": "/v1/messages", "ollama": "/api", "openapi": "/openapi.json"}
    return JSONResponse({"name": "localllm", "version": __version__, "apis": apis})


async def health(request: Request) -> Response:
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
    return JSONResponse(answer)


async def ping(request: Request) -> Response:
    """200 as long as the process answers at all."""
    return JSONResponse({})


async def version(request: Request) -> Response:
    """The program's version."""
    return JSONResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    """Counters and gauges for Prometheus."""
    service = service_of(request)
    return Response(service.metrics.text(), headers={"content-type": METRICS_TYPE})
