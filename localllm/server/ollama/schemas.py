"""Request bodies of Ollama's routes, and their conversion into OpenAI chat and completion requests."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from localllm.server.body import checked
from localllm.server.errors import invalid, unsupported
from localllm.server.openai.reading import with_further
from localllm.server.openai.schemas import MAX_MESSAGES, TEXTS_OR_IDS, Body, ChatRequest, CompletionRequest, Number

PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")
WAIT = re.compile(r"\d+(\.\d+)?|(\d+(\.\d+)?(ms|s|m|h))+")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
# Ollama's sampling options -> ours; load options (num_ctx, num_gpu, ...) are fixed when the server starts
OPTIONS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "seed": "seed", "stop": "stop",
}  # fmt: skip
WHOLE = ("num_predict", "seed", "top_k")  # integers, which clients may send as 40.0, as Ollama's own server accepts


class OllamaMessage(Body):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: StrictStr | None = None
    thinking: StrictStr | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_name: StrictStr | None = None
    tool_call_id: StrictStr | None = None


class Asked(Body):
    """Fields shared by /api/chat and /api/generate."""

    model: StrictStr
    stream: StrictBool | None = None
    format: Any = None
    options: dict[str, Any] | None = None
    keep_alive: StrictStr | Number | None = None
    think: StrictBool | Literal["low", "medium", "high"] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None


class OllamaChatRequest(Asked):
    """POST /api/chat"""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(Asked):
    """POST /api/generate"""

    prompt: StrictStr | None = None
    suffix: StrictStr | None = None
    system: StrictStr | None = None
    template: StrictStr | None = None
    raw: StrictBool | None = None
    images: list[Any] | None = None
    context: list[Any] | None = None


class Embedded(Body):
    """Fields shared by both embedding routes."""

    model: StrictStr
    keep_alive: StrictStr | Number | None = None
    options: dict[str, Any] | None = None


class OllamaEmbedRequest(Embedded):
    """POST /api/embed"""

    input: Annotated[Any, Field(json_schema_extra={"anyOf": TEXTS_OR_IDS})]
    truncate: StrictBool | None = None
    dimensions: Annotated[StrictInt, Field(ge=1, le=65536)] | None = None


class OllamaEmbeddingRequest(Embedded):
    """POST /api/embeddings, replaced by /api/embed"""

    prompt: StrictStr = ""


class ShowRequest(Body):
    """POST /api/show"""

    model: StrictStr | None = None
    name: StrictStr | None = None
    verbose: StrictBool | None = None


def chat_of(body: OllamaChatRequest) -> ChatRequest:
    """Convert into an OpenAI chat request. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # calls whose results are still to come
    for number, message in enumerate(body.messages or ()):
        content = _with_images(message.content or "", message.images, f"messages[{number}].images")
        one: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking is not None:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            one["tool_calls"] = waiting = [
                {"type": "function", **call, "id": call.get("id") or f"call_{number}_{i}"}
                for i, call in enumerate(message.tool_calls)
            ]
        if message.role == "tool":
            call = _call_of(message, waiting)
            waiting = [other for other in waiting if other is not call] or waiting[-1:]
            one |= {"tool_call_id": call["id"], **({"name": message.tool_name} if message.tool_name else {})}
        messages.append(one)
    fields = with_further(body, _common(body), "format") | {"messages": messages}
    if body.tools:
        fields["tools"] = body.tools
    return checked(fields, ChatRequest)


def _call_of(message: OllamaMessage, waiting: list[dict[str, Any]]) -> dict[str, Any]:
    """Find the call that a result belongs to: by id, by function name, or else in the order of the calls."""
    own = [call for call in waiting if call["id"] == message.tool_call_id]
    functions = ((call, call.get("function")) for call in waiting)
    own = own or [call for call, one in functions if isinstance(one, dict) and one.get("name") == message.tool_name]
    return (own or waiting or [{"id": "call_0"}])[0]


def generate_of(body: OllamaGenerateRequest, *, raw: bool) -> ChatRequest | CompletionRequest:
    """Convert into a chat request, or if raw, into a completion request without template. Raises ApiError."""
    fields = with_further(body, _common(body), "format")
    if raw:
        fields |= {"prompt": body.prompt or "", "max_tokens": fields.pop("max_completion_tokens", None)}
        top = fields.pop("top_logprobs", None)
        fields["logprobs"] = (top or 0) if fields.get("logprobs") else None
        return checked(fields, CompletionRequest)
    messages = [{"role": "system", "content": body.system}] if body.system else []
    content = _with_images(body.prompt or "", body.images, "images")
    return checked(fields | {"messages": [*messages, {"role": "user", "content": content}]}, ChatRequest)


def _with_images(text: str, images: list[Any] | None, where: str) -> str | list[dict[str, Any]]:
    """A message's content, with images, which are plain base64, before the text."""
    if not images:
        return text
    if not all(isinstance(one, str) for one in images):
        raise invalid("Images must be base64 strings: nothing is fetched.", where, "invalid_type")
    urls = [f"data:image/any;base64,{one}" for one in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}]


def check_generate(body: OllamaGenerateRequest) -> None:
    """Raise ApiError for fields that are not supported."""
    if body.suffix:
        raise unsupported("suffix is not supported: no model here does fill-in-the-middle.", "suffix")
    if body.images and body.raw:
        raise unsupported("Images need the model's template: leave out raw.", "images")
    if body.system and body.raw:
        raise invalid("A raw prompt is used as is: include the system text in it, or leave out raw.", "system")
    if body.template:
        raise invalid("A request cannot set the template.", "template")
    if body.context:
        raise unsupported("context is not supported: send the conversation to /api/chat.", "context")


_PART = re.compile(r"messages\[(\d+)\]\.content\[\d+\]")  # in Ollama's requests, only images become parts


def keep_alive_s(value: str | float | None) -> float | None | Literal["default"]:
    """Parse keep_alive into idle seconds; None keeps the model loaded indefinitely. Raises ApiError."""
    if value is None:
        return "default"
    if isinstance(value, str):
        text = value.removeprefix("-")
        if not WAIT.fullmatch(text):
            raise invalid("keep_alive must be a duration such as 5m, or a number of seconds.", "keep_alive")
        seconds = sum(float(number) * SECONDS[unit] for number, unit in PART.findall(text))
        value = seconds if text == value else -seconds
    return None if value < 0 else float(value)


def _common(body: Asked) -> dict[str, Any]:
    options = body.options or {}
    options = options | {
        name: int(value) for name in WHOLE if isinstance(value := options.get(name), float) and value % 1 == 0
    }
    fields: dict[str, Any] = {"model": body.model, "stream": body.stream is not False}
    fields |= {ours: options[theirs] for theirs, ours in OPTIONS.items() if options.get(theirs) is not None}
    fields |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    limit = options.get("num_predict")
    if limit is not None and limit != -1 and limit != -2:
        fields["max_completion_tokens"] = limit
    if fields.get("seed") == -1:
        del fields["seed"]
    if body.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.think is not False}
        if isinstance(body.think, str):
            fields["reasoning_effort"] = body.think
    if body.format not in (None, ""):
        if body.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(body.format, dict):
            schema = {"name": "answer", "schema": body.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        else:
            raise invalid("format must be json or a JSON schema.", "format")
    return fields


def renamed(param: str | None) -> str | None:
    """Translate a chat request's field name into Ollama's."""
    return _NAMES.get(param or "", _PART.sub(r"messages[\1].images", param) if param else param)


def renamed_to_generate(param: str | None) -> str | None:
    """Translate a chat request's field name into that of /api/generate, whose one message is the prompt."""
    if param is not None and param.startswith("messages"):
        return "images" if _PART.fullmatch(param) else "prompt"
    return renamed(param)


_NAMES = {ours: f"options.{theirs}" for theirs, ours in OPTIONS.items()}
_NAMES |= dict.fromkeys(("max_completion_tokens", "max_tokens"), "options.num_predict") | {"response_format": "format"}
