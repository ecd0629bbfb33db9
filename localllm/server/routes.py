"""Every route: its method, path and endpoint; and the OpenAPI document, made of them and of the request models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm._version import __version__
from localllm.server.anthropic import messages as anthropic
from localllm.server.anthropic.schemas import CountRequest, MessagesRequest
from localllm.server.anthropic.schemas import renamed as anthropic_renamed
from localllm.server.body import read_body
from localllm.server.errors import Rename, is_anthropic
from localllm.server.ollama import routes as ollama
from localllm.server.ollama import schemas as ollama_bodies
from localllm.server.openai import embeddings as vectors
from localllm.server.openai import responses
from localllm.server.openai.completions import chat_completions, completions
from localllm.server.openai.models import model, models
from localllm.server.openai.responses_schemas import ResponsesRequest
from localllm.server.openai.responses_schemas import renamed as responses_renamed
from localllm.server.openai.schemas import ChatRequest, CompletionRequest
from localllm.server.other import status
from localllm.server.other import text as texts


@dataclass(frozen=True, slots=True)
class Route:
    """One operation."""

    method: str
    path: str  # `{name:path}` takes slashes, too
    endpoint: Callable[..., Awaitable[Response | dict[str, Any]]]  # of the request, and of its body where it has one
    body: type[BaseModel] | None = None
    answer: tuple[str, ...] = ()  # keys that a JSON answer always has
    streams: str = ""  # the media type of a streamed answer
    media: str = "application/json"
    # refused while the queue is full, before anything is read; not Ollama's, which also unload models
    needs_room: bool = False
    for_owner: bool = False  # only the owner's token opens it, a key does not

    async def __call__(self, request: Request) -> Response:
        """Answer. Raises LocalLLMError, ClientLeft."""
        if self.for_owner:
            status.check_owner(request)
        body = () if self.body is None else (await read_body(request, self.body),)
        answer = await self.endpoint(request, *body)
        return JSONResponse(answer) if isinstance(answer, dict) else answer


SSE = "text/event-stream"
LINES = "application/x-ndjson"
# where a field of a chat request has a name of its own: for errors
RENAMES: dict[str, Rename] = {
    "/v1/responses": responses_renamed,
    "/v1/messages": anthropic_renamed,
    "/v1/messages/count_tokens": anthropic_renamed,
    "/api/chat": ollama_bodies.renamed,
    "/api/generate": ollama_bodies.renamed,
}
COMPLETION = ("id", "object", "created", "model", "choices", "usage")
RESPONSE = ("id", "object", "status", "output")
MESSAGE = ("id", "type", "role", "content", "usage")
OLLAMA = ("model", "created_at", "done")

ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", chat_completions, ChatRequest, COMPLETION, SSE, needs_room=True),
    Route("POST", "/v1/completions", completions, CompletionRequest, COMPLETION, SSE, needs_room=True),
    Route("POST", "/v1/responses", responses.create_response, ResponsesRequest, RESPONSE, SSE, needs_room=True),
    Route("GET", "/v1/responses/{response_id}", responses.get_response, None, RESPONSE),
    Route("DELETE", "/v1/responses/{response_id}", responses.delete_response, None, ("id", "object", "deleted")),
    Route("GET", "/v1/responses/{response_id}/input_items", responses.list_input_items, None, ("object", "data")),
    Route("POST", "/v1/responses/{response_id}/cancel", responses.cancel_response, None, ("id",)),
    Route("POST", "/v1/messages", anthropic.messages, MessagesRequest, MESSAGE, SSE, needs_room=True),
    Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens, CountRequest, ("input_tokens",)),
    Route("POST", "/v1/embeddings", vectors.embeddings, vectors.EmbeddingRequest, ("object", "data", "model", "usage")),
    Route("POST", "/v1/score", vectors.score, vectors.ScoreRequest, ("object", "data", "model", "method")),
    Route("POST", "/score", vectors.score, vectors.ScoreRequest, ("object", "data", "model", "method")),
    Route("POST", "/v1/rerank", vectors.rerank, vectors.RerankRequest, ("id", "model", "results", "method")),
    Route("POST", "/v2/rerank", vectors.rerank, vectors.RerankRequest, ("id", "model", "results", "method")),
    Route("POST", "/rerank", vectors.rerank, vectors.RerankRequest, ("id", "model", "results", "method")),
    Route("POST", "/tokenize", texts.tokenize, texts.TokenizeRequest, ("tokens",)),
    Route("POST", "/detokenize", texts.detokenize, texts.DetokenizeRequest, ("prompt", "content")),
    Route("POST", "/apply-template", texts.apply_template, ChatRequest, ("prompt",)),
    Route("GET", "/v1/models", models, None, ("object", "data")),
    Route("GET", "/v1/models/{model_id:path}", model, None, ("id", "object", "created", "owned_by")),
    Route("POST", "/api/chat", ollama.chat, ollama_bodies.OllamaChatRequest, OLLAMA, LINES),
    Route("POST", "/api/generate", ollama.generate, ollama_bodies.OllamaGenerateRequest, OLLAMA, LINES),
    Route("POST", "/api/embed", ollama.embed, ollama_bodies.OllamaEmbedRequest, ("model", "embeddings")),
    Route("POST", "/api/show", ollama.show, ollama_bodies.ShowRequest, ("details", "model_info")),
    Route("GET", "/api/tags", ollama.tags, None, ("models",)),
    Route("GET", "/api/ps", ollama.running, None, ("models",)),
    Route("GET", "/api/version", status.version, None, ("version",)),
    Route("GET", "/", status.root, None, ("name", "version", "apis")),
    Route("GET", "/health", status.health, None, ("status",)),
    Route("GET", "/ping", status.ping),
    Route("GET", "/version", status.version, None, ("version",)),
    Route("GET", "/metrics", status.metrics, media="text/plain"),
    Route("GET", "/localllm/ps", status.processes, None, ("models",), for_owner=True),
    Route("POST", "/localllm/unload", status.unload, status.ModelRequest, ("model", "done"), for_owner=True),
    Route("POST", "/localllm/park", status.park, status.ModelRequest, ("model", "done"), for_owner=True),
)


# --- the OpenAPI document --------------------------------------------------------------------------------------------

REF = "#/components/schemas/{model}"
TEXT = {"type": "string"}
TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


EVENT = _object(data=TEXT) | {"properties": {"data": TEXT, "event": TEXT}}
ERROR = _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL))
ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT))


def document() -> dict[str, Any]:
    """The whole document (OpenAPI 3.1)."""
    models = {route.body for route in ROUTES if route.body is not None}
    named = sorted(models, key=lambda m: m.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in named], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(_path(route), {})[route.method.lower()] = _operation(route)
    components = {**schemas.get("$defs", {}), "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "localllm", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _path(route: Route) -> str:
    return re.sub(r":path}", "}", route.path)


def _operation(route: Route) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{route.method.lower()}{_path(route)}").strip("_")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": (inspect.getdoc(route.endpoint) or "").splitlines()[0],
        "responses": {"200": _success(route), **{code: _failure(route) for code in ("4XX", "5XX")}},
    }
    parameters = re.findall(r"{(\w+)", route.path)
    if parameters:
        operation["parameters"] = [
            {"name": one, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for one in parameters
        ]
    if route.body is not None:
        schema = {"$ref": REF.format(model=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _success(route: Route) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"} if route.media == "application/json" else TEXT
    if route.answer:
        schema = {"type": "object", "required": list(route.answer)}
    content = {route.media: {"schema": schema}}
    if route.streams:
        content[route.streams] = {"schema": EVENT if route.streams == "text/event-stream" else {}}
    return {"description": "The answer.", "content": content}


def _failure(route: Route) -> dict[str, Any]:
    name = "AnthropicError" if is_anthropic(route.path) else "Error"
    content = {"application/json": {"schema": {"$ref": REF.format(model=name)}}}
    return {"description": "The refusal.", "content": content}
