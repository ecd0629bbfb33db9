"""Every route: its method, path and endpoint, and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from localllm.server.anthropic import messages as anthropic
from localllm.server.anthropic.schemas import CountRequest, MessagesRequest
from localllm.server.anthropic.schemas import renamed as anthropic_renamed
from localllm.server.errors import Rename
from localllm.server.ollama import routes as ollama
from localllm.server.ollama import schemas as ollama_bodies
from localllm.server.openai import embeddings as vectors
from localllm.server.openai import responses
from localllm.server.openai.completions import chat_completions, completions
from localllm.server.openai.models import model, models
from localllm.server.openai.responses_schemas import ResponsesRequest
from localllm.server.openai.responses_schemas import renamed as responses_renamed
from localllm.server.openai.schemas import ChatRequest, CompletionRequest
from localllm.server.other import control, status
from localllm.server.other import schemas as bodies
from localllm.server.other import text as texts


@dataclass(frozen=True, slots=True)
class Route:
    """One operation."""

    method: str
    path: str  # `{name:path}` takes slashes, too
    endpoint: Callable[[Request], Awaitable[Response]]
    body: type[BaseModel] | None = None
    answer: tuple[str, ...] = ()  # keys that a JSON answer always has
    streams: str = ""  # the media type of a streamed answer
    media: str = "application/json"
    # refused while the queue is full, before anything is read; not Ollama's, which also unload models
    needs_room: bool = False


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
    Route("POST", "/v1/embeddings", vectors.embeddings, bodies.EmbeddingRequest, ("object", "data", "model", "usage")),
    Route("POST", "/v1/score", vectors.score, bodies.ScoreRequest, ("object", "data", "model", "method")),
    Route("POST", "/score", vectors.score, bodies.ScoreRequest, ("object", "data", "model", "method")),
    Route("POST", "/v1/rerank", vectors.rerank, bodies.RerankRequest, ("id", "model", "results", "method")),
    Route("POST", "/v2/rerank", vectors.rerank, bodies.RerankRequest, ("id", "model", "results", "method")),
    Route("POST", "/rerank", vectors.rerank, bodies.RerankRequest, ("id", "model", "results", "method")),
    Route("POST", "/tokenize", texts.tokenize, bodies.TokenizeRequest, ("tokens",)),
    Route("POST", "/detokenize", texts.detokenize, bodies.DetokenizeRequest, ("prompt", "content")),
    Route("POST", "/apply-template", texts.apply_template, ChatRequest, ("prompt",)),
    Route("GET", "/v1/models", models, None, ("object", "data")),
    Route("GET", "/v1/models/{model_id:path}", model, None, ("id", "object", "created", "owned_by")),
    Route("POST", "/api/chat", ollama.chat, ollama_bodies.OllamaChatRequest, OLLAMA, LINES),
    Route("POST", "/api/generate", ollama.generate, ollama_bodies.OllamaGenerateRequest, OLLAMA, LINES),
    Route("POST", "/api/embed", ollama.embed, ollama_bodies.OllamaEmbedRequest, ("model", "embeddings")),
    Route("POST", "/api/show", ollama.show, ollama_bodies.ShowRequest, ("details", "model_info")),
    Route("GET", "/api/tags", ollama.tags, None, ("models",)),
    Route("GET", "/api/ps", ollama.running, None, ("models",)),
    Route("GET", "/api/version", ollama.api_version, None, ("version",)),
    Route("GET", "/", status.root, None, ("name", "version", "apis")),
    Route("GET", "/health", status.health, None, ("status",)),
    Route("GET", "/ping", status.ping),
    Route("GET", "/version", status.version, None, ("version",)),
    Route("GET", "/metrics", status.metrics, media="text/plain"),
    Route("GET", "/localllm/ps", control.processes, None, ("models",)),
    Route("POST", "/localllm/unload", control.unload, control.ModelRequest, ("model", "done")),
    Route("POST", "/localllm/park", control.park, control.ModelRequest, ("model", "done")),
)
