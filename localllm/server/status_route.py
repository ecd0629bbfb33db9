"""How the server is: /health, /ping, /version, /metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm._version import __version__

from .service import Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(request: Request) -> Response:
    """200 while requests are taken, 503 with the reason otherwise."""
    service: Service = request.app.state.service
    service.check_ready()
    return JSONResponse({"status": "ok"})


async def ping(request: Request) -> Response:
    """200 as long as the process answers at all."""
    return JSONResponse({})


async def version(request: Request) -> Response:
    """The program's version."""
    return JSONResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    """Counters and gauges for Prometheus."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), headers={"content-type": METRICS_TYPE})
