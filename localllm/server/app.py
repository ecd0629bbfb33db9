"""The ASGI application: routes, error handlers, the layers around them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from localllm._version import __version__
from localllm.errors import LocalLLMError

from . import ollama_route as ollama
from .chat_route import chat_completions
from .completion_route import completions
from .control_route import park, processes, unload
from .embedding_route import embeddings, rerank, score
from .errors import ApiError, ClientLeft, bug, from_error, gone, respond
from .exchange import Exchanges, note_error
from .messages_route import count_tokens, messages
from .middleware import Gate
from .models_route import model, models
from .responses_route import cancel_response, create_response, delete_response, get_response, list_input_items
from .service import Service
from .status_route import health, metrics, ping, version
from .text_route import apply_template, detokenize, tokenize

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20

Endpoint = Callable[[Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", create_response),
    ("GET", "/v1/responses/{response_id}", get_response),
    ("DELETE", "/v1/responses/{response_id}", delete_response),
    ("GET", "/v1/responses/{response_id}/input_items", list_input_items),
    ("POST", "/v1/responses/{response_id}/cancel", cancel_response),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/score", score),
    ("POST", "/score", score),
    ("POST", "/v1/rerank", rerank),
    ("POST", "/v2/rerank", rerank),
    ("POST", "/rerank", rerank),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/apply-template", apply_template),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{model_id:path}", model),
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/embed", ollama.embed),
    ("POST", "/api/show", ollama.show),
    ("GET", "/api/tags", ollama.tags),
    ("GET", "/api/ps", ollama.running),
    ("GET", "/api/version", ollama.api_version),
    ("GET", "/health", health),
    ("GET", "/ping", ping),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/localllm/ps", processes),
    ("POST", "/localllm/unload", unload),
    ("POST", "/localllm/park", park),
)


@dataclass(frozen=True, slots=True)
class AppOptions:
    """How the server treats its callers."""

    loopback: bool = True
    """reachable from this machine only: Host must be local"""
    api_keys: tuple[str, ...] = ()
    """one of them must come with every request; none: no key is needed"""
    origins: tuple[str, ...] = ()
    """browser origins that may call"""
    max_body_bytes: int = MAX_BODY_BYTES
    log_format: str = "text"
    """text | json"""
    token: str = ""
    """counts as a key, and is the only one for the routes that manage models; "" for no such routes"""


def create_app(service: Service, options: AppOptions | None = None) -> Any:
    """The application, as ASGI."""
    options = options or AppOptions()
    app = FastAPI(title="localllm", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service, app.state.token = service, options.token
    for method, path, endpoint in ROUTES:
        app.router.add_route(path, endpoint, methods=[method])
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(LocalLLMError, _on_our_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    keys = [key.encode() for key in options.api_keys]
    if keys and options.token:
        keys.append(options.token.encode())
    gate = Gate(app, options.loopback, keys, options.origins, options.max_body_bytes)  # type: ignore[arg-type]
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
        response.headers.update(error.headers or {})
        return response
    return await _on_api_error(request, ApiError(error.status_code, str(error.detail)))


async def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again afterwards: `Exchanges` logs it."""
    left = isinstance(error, ClientLeft | ClientDisconnect)
    return respond(gone() if left else bug(), request.scope["path"])
