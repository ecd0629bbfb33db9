"""The ASGI application: routes, error handlers, the layers around them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from localllm._version import __version__
from localllm.errors import LocalLLMError

from .errors import ApiError, ClientLeft, bug, from_error, gone, respond
from .exchange import Exchanges, note_error
from .middleware import Gate, QueueLimit
from .openapi import document
from .routes import ROUTES
from .service import Service

MAX_BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AppOptions:
    """How the server treats its callers."""

    loopback: bool = True  # reachable from this machine only: Host must be local
    api_keys: tuple[str, ...] = ()  # one of them must come with every request; none: no key is needed
    origins: tuple[str, ...] = ()  # browser origins that may call
    max_body_bytes: int = MAX_BODY_BYTES
    log_format: str = "text"  # text | json
    token: str = ""  # counts as a key, and is the only one for the routes that manage models; "" for no such routes


def create_app(service: Service, options: AppOptions | None = None) -> Any:
    """The application, as ASGI."""
    options = options or AppOptions()
    app = FastAPI(title="localllm", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service, app.state.token = service, options.token
    app.state.tells_details = options.loopback and not options.api_keys
    app.openapi = cache(document)  # type: ignore[method-assign]
    for route in ROUTES:  # plain routes: FastAPI's own would check and convert everything a second time
        app.router.add_route(route.path, route.endpoint, methods=[route.method])
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(LocalLLMError, _on_our_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    keys = [key.encode() for key in options.api_keys]
    if keys and options.token:
        keys.append(options.token.encode())
    crowded = frozenset(route.path for route in ROUTES if route.needs_room)
    limit = QueueLimit(app, service.check_room, crowded)  # type: ignore[arg-type]
    gate = Gate(limit, options.loopback, keys, options.origins, options.max_body_bytes)
    return Exchanges(gate, service.metrics.ended, options.log_format)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    note_error(request.scope, error.code)
    return respond(error, request.scope["path"])


async def _on_our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LocalLLMError)
    return await _on_api_error(request, from_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await _on_api_error(request, ApiError(404, "There is no such route.", code="unknown_url"))
    if error.status_code == 405:
        failed = ApiError(405, "This route does not take that method.", code="method_not_supported")
        response = await _on_api_error(request, failed)
        response.headers["Allow"] = ", ".join(sorted(_methods(request)))
        return response
    return await _on_api_error(request, ApiError(error.status_code, str(error.detail)))


def _methods(request: Request) -> set[str]:
    """The methods that a path takes: each has a route of its own, and an error knows only the first."""
    matching = (route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE)
    return {method for route in matching for method in route.methods or ()}


async def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again afterwards: `Exchanges` logs it."""
    left = isinstance(error, ClientLeft | ClientDisconnect)
    return respond(gone() if left else bug(), request.scope["path"])
