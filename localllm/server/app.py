"""The ASGI application: routes, error handlers, the layers around them."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from localllm._version import __version__
from localllm.errors import LocalLLMError

from .errors import ApiError, bug
from .exchange import Exchanges, refuse
from .middleware import AppOptions, Gate
from .routes import RENAMES, ROUTES, document
from .service import Service


def create_app(service: Service, options: AppOptions | None = None) -> Any:
    """The application, as ASGI."""
    options = options or AppOptions()
    app = FastAPI(title="localllm", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service, app.state.token = service, options.token
    app.state.tells_details = options.loopback and not options.api_keys
    app.openapi = cache(document)  # type: ignore[method-assign]
    for route in ROUTES:  # plain routes: FastAPI's own would check and convert everything a second time
        app.router.add_route(route.path, route.__call__, methods=[route.method])
    for kind in (LocalLLMError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    keys = [key.encode() for key in options.api_keys]
    if keys and options.token:
        keys.append(options.token.encode())
    crowded = frozenset(route.path for route in ROUTES if route.needs_room)
    gate = Gate(app, keys, options, service.check_room, crowded)  # type: ignore[arg-type]
    return Exchanges(gate, service.metrics.ended, options.log_format)


async def _on_error(request: Request, error: Exception) -> Response:
    """Whatever failed, in the shape of the API that was called."""
    match error:
        case LocalLLMError():
            shown = error
            if rename := RENAMES.get(request.scope["path"]):
                shown.param = rename(shown.param)
        case HTTPException(status_code=404):
            shown = ApiError(404, "There is no such route.", code="unknown_url")
        case HTTPException(status_code=405):
            shown = ApiError(405, "This route does not take that method.", code="method_not_supported")
        case HTTPException():
            shown = ApiError(error.status_code, str(error.detail))
        case _:  # Starlette raises it again afterwards: `Exchanges` logs it
            shown = bug()
    response = refuse(request.scope, shown)
    if shown.status == 405:
        response.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """The methods that a path takes: each has a route of its own, and an error knows only the first."""
    matching = (route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE)
    return {method for route in matching for method in route.methods or ()}
