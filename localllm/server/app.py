"""The ASGI application: all routes, the layers around them, error handling, and the OpenAPI document."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, get_type_hints

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from localllm._version import __version__
from localllm.errors import LocalLLMError
from localllm.server.anthropic import messages as anthropic
from localllm.server.anthropic import schemas as anthropic_schemas
from localllm.server.body import read_body
from localllm.server.errors import ApiError, bug, is_anthropic, is_ollama
from localllm.server.exchange import Exchanges, refuse
from localllm.server.middleware import AppOptions, Gate
from localllm.server.ollama import library
from localllm.server.ollama import routes as ollama
from localllm.server.ollama import schemas as ollama_schemas
from localllm.server.openai import completions, embeddings, models, responses, responses_schemas
from localllm.server.other import adapters, kv_events, pins, status, text
from localllm.server.service import Service


@dataclass(frozen=True)
class Route:
    """One operation."""

    method: str
    path: str  # `{name:path}` also matches slashes
    endpoint: Callable[..., Awaitable[Response | dict[str, Any]]]  # takes the request, and its body if it has one
    answer: tuple[str, ...] = ()  # keys that a JSON response always has
    streams: str = ""  # the media type of a streamed response
    media: str = "application/json"
    # rejected before reading while the queue is full; not set for Ollama's routes, which also unload models
    needs_room: bool = False
    changes_models: bool = False  # only at the address of `serve --ollama`
    for_owner: bool = False  # requires the owner's token; an API key is not enough

    @cached_property
    def body(self) -> type[BaseModel] | None:
        """The body model of the endpoint, if it takes one."""
        return get_type_hints(self.endpoint).get("body")

    async def __call__(self, request: Request) -> Response:
        """Handle a request. Raises LocalLLMError, ClientLeft."""
        if self.for_owner:
            status.check_owner(request)
        if self.changes_models:
            library.check_changes(request)
        body = () if self.body is None else (await read_body(request, self.body),)
        answer = await self.endpoint(request, *body)
        return JSONResponse(answer) if isinstance(answer, dict) else answer


SSE = "text/event-stream"
LINES = "application/x-ndjson"
# per path, the function that renames chat request fields to the API's own names, for errors
RENAMES: dict[str, Callable[[str | None], str | None]] = {
    "/v1/responses": responses_schemas.renamed,
    "/v1/responses/input_tokens": responses_schemas.renamed,
    "/v1/messages": anthropic_schemas.renamed,
    "/v1/messages/count_tokens": anthropic_schemas.renamed,
    "/api/chat": ollama_schemas.renamed,
    "/api/generate": ollama_schemas.renamed_to_generate,
}
COMPLETION = ("id", "object", "created", "model", "choices", "usage")
RESPONSE = ("id", "object", "status", "output")
MESSAGE = ("id", "type", "role", "content", "usage")
OLLAMA = ("model", "created_at", "done")

ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", completions.chat_completions, COMPLETION, SSE, needs_room=True),
    Route("POST", "/v1/completions", completions.completions, COMPLETION, SSE, needs_room=True),
    Route("POST", "/v1/responses", responses.create_response, RESPONSE, SSE, needs_room=True),
    Route("POST", "/v1/responses/input_tokens", responses.count_input_tokens, ("object", "input_tokens")),
    Route("GET", "/v1/responses/{response_id}", responses.get_response, RESPONSE),
    Route("DELETE", "/v1/responses/{response_id}", responses.delete_response, ("id", "object", "deleted")),
    Route("GET", "/v1/responses/{response_id}/input_items", responses.list_input_items, ("object", "data")),
    Route("POST", "/v1/responses/{response_id}/cancel", responses.cancel_response, ("id",)),
    Route("POST", "/v1/messages", anthropic.messages, MESSAGE, SSE, needs_room=True),
    Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens, ("input_tokens",)),
    Route("POST", "/v1/embeddings", embeddings.embeddings, ("object", "data", "model", "usage")),
    Route("POST", "/v1/score", embeddings.score, ("object", "data", "model", "method")),
    Route("POST", "/score", embeddings.score, ("object", "data", "model", "method")),
    Route("POST", "/v1/rerank", embeddings.rerank, ("id", "model", "results", "method")),
    Route("POST", "/v2/rerank", embeddings.rerank, ("id", "model", "results", "method")),
    Route("POST", "/rerank", embeddings.rerank, ("id", "model", "results", "method")),
    Route("POST", "/tokenize", text.tokenize, ("tokens",)),
    Route("POST", "/detokenize", text.detokenize, ("prompt", "content")),
    Route("POST", "/apply-template", text.apply_template, ("prompt",)),
    Route("POST", "/v1/load_lora_adapter", adapters.load, media="text/plain"),
    Route("POST", "/v1/unload_lora_adapter", adapters.unload, media="text/plain"),
    Route("GET", "/v1/models", models.models, ("object", "data")),
    Route("GET", "/v1/models/{model_id:path}", models.model, ("id", "object", "created", "owned_by")),
    Route("POST", "/api/chat", ollama.chat, OLLAMA, LINES),
    Route("POST", "/api/generate", ollama.generate, OLLAMA, LINES),
    Route("POST", "/api/embed", ollama.embed, ("model", "embeddings")),
    Route("POST", "/api/show", ollama.show, ("details", "model_info")),
    Route("POST", "/api/embeddings", ollama.embedding, ("embedding",)),
    Route("POST", "/api/pull", library.pull, ("status",), LINES, changes_models=True),
    Route("POST", "/api/copy", library.copy, changes_models=True),
    Route("DELETE", "/api/delete", library.delete, changes_models=True),
    Route("GET", "/api/tags", ollama.tags, ("models",)),
    Route("GET", "/api/ps", ollama.running, ("models",)),
    Route("GET", "/api/version", ollama.version, ("version",)),
    Route("GET", "/", status.root, ("name", "version", "apis")),
    Route("GET", "/health", status.health, ("status",)),
    Route("GET", "/ping", status.ping),
    Route("GET", "/version", status.version, ("version",)),
    Route("GET", "/metrics", status.metrics, media="text/plain"),
    Route("GET", "/localllm/ps", status.processes, ("models",), for_owner=True),
    Route("GET", "/localllm/kv_events", kv_events.kv_events, media=SSE, streams=SSE, for_owner=True),
    Route("GET", "/localllm/pins", pins.pins, ("pins",), for_owner=True),
    Route("POST", "/localllm/pins", pins.pin, ("id", "model", "tokens", "priority", "expires_in_s"), for_owner=True),
    Route("POST", "/localllm/unpin", pins.unpin, ("id", "deleted"), for_owner=True),
    Route("POST", "/localllm/unload", status.unload, ("model", "done"), for_owner=True),
    Route("POST", "/localllm/park", status.park, ("model", "done"), for_owner=True),
)


def create_app(service: Service, options: AppOptions | None = None) -> Any:
    """Create the ASGI application."""
    options = options or AppOptions()
    app = FastAPI(title="localllm", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service, app.state.token = service, options.token
    app.state.library, app.state.ollama, app.state.num_pulls = options.library, options.ollama, 0
    app.state.tells_details = options.loopback and not options.api_keys
    app.openapi = cache(document)  # type: ignore[method-assign]
    for route in ROUTES:  # plain Starlette routes: FastAPI's would validate and convert everything a second time
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
    """Convert any error into a response in the shape of the API that was called."""
    match error:
        case LocalLLMError():
            shown = error
            if rename := RENAMES.get(request.scope["path"]):
                theirs, ours = rename(shown.param), f"{shown.param}:"
                if shown.message.startswith(ours):
                    shown.message = f"{theirs}:{shown.message.removeprefix(ours)}"
                shown.param = theirs
        case HTTPException(status_code=404):
            shown = ApiError(404, "This route does not exist.", code="unknown_url")
        case HTTPException(status_code=405) if request.method == "POST" and _is_named_by_id(request):
            shown = ApiError(404, "This route does not exist.", code="unknown_url")  # an operation of other servers
        case HTTPException(status_code=405):
            shown = ApiError(405, "This route does not support that method.", code="method_not_supported")
        case HTTPException():
            shown = ApiError(error.status_code, str(error.detail))
        case _:  # Starlette raises it again afterwards, and `Exchanges` logs it
            shown = bug()
    response = refuse(request.scope, shown)
    if shown.status == 405:
        response.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """All methods of a path: each has its own route, and the error names only the first."""
    return {method for route in _matching(request) for method in route.methods or ()}


def _is_named_by_id(request: Request) -> bool:
    """Whether the last part of the path matches only as an id, as in /v1/responses/compact."""
    return all(route.path.endswith("}") for route in _matching(request))


def _matching(request: Request) -> list[Any]:
    return [route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE]


REF = "#/components/schemas/{model}"
TEXT = {"type": "string"}
TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


EVENT = _object(data=TEXT) | {"properties": {"data": TEXT, "event": TEXT}}
ERROR = _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL))
OLLAMA_ERROR = _object(error=TEXT)
ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT))


def document() -> dict[str, Any]:
    """Build the OpenAPI 3.1 document."""
    bodies = sorted({route.body for route in ROUTES if route.body is not None}, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
    errors = {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR, "OllamaError": OLLAMA_ERROR}
    components = {**schemas.get("$defs", {}), **errors}
    info = {"title": "localllm", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _operation(route: Route, path: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"} if route.media == "application/json" else TEXT
    if route.answer:
        schema = {"type": "object", "required": list(route.answer)}
    content = {route.media: {"schema": schema}}
    if route.streams:
        content[route.streams] = {"schema": EVENT if route.streams == SSE else {}}
    api = "Anthropic" if is_anthropic(route.path) else "Ollama" if is_ollama(route.path) else ""
    error = {"$ref": REF.format(model=f"{api}Error")}
    failure = {"description": "The error.", "content": {"application/json": {"schema": error}}}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_"),
        "summary": (inspect.getdoc(route.endpoint) or "").splitlines()[0],
        "responses": {"200": {"description": "The response.", "content": content}, "4XX": failure, "5XX": failure},
    }
    if parameters := re.findall(r"{(\w+)", path):
        of_path = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [{"name": name, **of_path} for name in parameters]
    if route.body is not None:
        schema = {"$ref": REF.format(model=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
