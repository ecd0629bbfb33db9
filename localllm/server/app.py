"""The ASGI application: routes, error handlers, the gate."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm._version import __version__
from localllm.errors import LocalLLMError

from .chat_route import chat_completions
from .completion_route import completions
from .errors import ApiError, from_error, respond
from .middleware import Gate
from .service import Service

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AppOptions:
    """How the server treats its callers."""

    loopback: bool = True
    """bound to this machine only: Host must be local"""
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    """browser origins that may call"""
    max_body_bytes: int = MAX_BODY_BYTES


def create_app(service: Service, options: AppOptions | None = None) -> Any:
    """The application, as ASGI."""
    options = options or AppOptions()
    app = FastAPI(title="localllm", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/version", version, methods=["GET"])
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(LocalLLMError, _on_our_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    key = options.api_key.encode() if options.api_key else None
    return Gate(app, options.loopback, key, options.origins, options.max_body_bytes)  # type: ignore[arg-type]


async def models(request: Request) -> Response:
    """What can be asked for."""
    service: Service = request.app.state.service
    return JSONResponse({"object": "list", "data": [_model_json(service, name) for name in service.names]})


async def model(request: Request) -> Response:
    """One model by its id, slashes and all."""
    service: Service = request.app.state.service
    name = request.path_params["model_id"]
    service.check_model(name)
    return JSONResponse(_model_json(service, name))


def _model_json(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "localllm",
        "root": service.names[0], "parent": None, "max_model_len": service.llm.plan.ctx,
    }  # fmt: skip


async def health(request: Request) -> Response:
    """200 while requests are taken, 503 with the reason otherwise."""
    service: Service = request.app.state.service
    service.check_ready()
    return JSONResponse({"status": "ok"})


async def version(request: Request) -> Response:
    """The program's version."""
    return JSONResponse({"version": __version__})


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return respond(error)


async def _on_our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LocalLLMError)
    return respond(from_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return respond(ApiError(404, "There is no such route.", code="unknown_url"))
    if error.status_code == 405:
        response = respond(ApiError(405, "This route does not take that method.", code="method_not_supported"))
        response.headers.update(error.headers or {})
        return response
    return respond(ApiError(error.status_code, str(error.detail)))


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return respond(ApiError(500, "The server failed on this request; see its log.", "server_error", "internal_error"))
