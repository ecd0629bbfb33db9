"""Ollama's API: /api/chat, generate, embed, tags, show, ps and version; streams are lines of JSON.

`library.py` has the routes that pull, copy and delete models.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm._version import __version__
from localllm.chat.parser import reasoning_tags
from localllm.llm.outputs import OutputDelta, add_tool_call
from localllm.request import FinishReason, Timing, TokenLogprob, Usage
from localllm.server.errors import invalid
from localllm.server.ollama import schemas
from localllm.server.ollama.library import OLLAMA_LINES
from localllm.server.openai.embeddings import MAX_TEXTS, Vectors, pooled_texts, unit
from localllm.server.openai.output import TokenNames, arguments_of
from localllm.server.openai.reading import read_chat, read_completion, split_prompts
from localllm.server.openai.schemas import ChatRequest, CompletionRequest
from localllm.server.reply import line, reply, unless_left, with_rows
from localllm.server.response_stream import AsyncResponseStream
from localllm.server.served_model import MAX_TTL_S, ServedModel
from localllm.server.service import Reservation, service_of

VERSION = "0.14.0"  # version of Ollama's API implemented here: clients require 0.6.4 (VS Code) or later


async def chat(request: Request, body: schemas.OllamaChatRequest) -> Response | dict[str, Any]:
    """Answer a conversation, streamed by default."""
    if not body.messages:
        return await _load_or_unload(request, body, {"message": {"role": "assistant", "content": ""}})
    return await _answer(request, body, schemas.chat_of(body))


async def generate(request: Request, body: schemas.OllamaGenerateRequest) -> Response | dict[str, Any]:
    """Answer a prompt, through the model's template or raw. As in Ollama, a base model continues it."""
    schemas.check_generate(body)
    if not body.prompt:
        return await _load_or_unload(request, body, {"response": ""})
    model = await service_of(request).find(body.model)
    raw = body.raw or not (model.chat or model.embeds or body.system or body.images)
    return await _answer(request, body, schemas.generate_of(body, raw=raw))


async def _answer(request: Request, body: schemas.Asked, asked: ChatRequest | CompletionRequest) -> Response:
    keep, started = schemas.keep_alive_s(body.keep_alive), time.monotonic()
    generation = read_chat(asked) if isinstance(asked, ChatRequest) else read_completion(asked)

    def render(reservation: Reservation) -> LineRendering:
        if keep != "default":
            service_of(request).pool.keep(reservation.model.name, keep)
        return LineRendering(reservation.stream, body, started, TokenNames(reservation.llm))

    return await reply(request, generation, render, OLLAMA_LINES)


@dataclass(slots=True)
class LineRendering:
    """Renders one response, whole or as lines; `started` is on the monotonic clock."""

    stream: AsyncResponseStream
    body: schemas.Asked
    started: float
    names: TokenNames
    calls: list[dict[str, str]] = field(default_factory=list)

    async def whole(self) -> dict[str, Any]:
        (output,) = await self.stream.outputs()
        (one,) = output.completions
        end = _end(one.finish_reason, output.usage, output.timing, self.started)
        answer = self._line({"content": one.text, "reasoning": one.reasoning}, one.tool_calls)
        return answer | self._logprobs(one.logprobs) | end

    def chunks(self) -> AsyncIterator[bytes]:
        return self.stream.rendered(self._lines)

    def _line(self, texts: dict[str, str], calls: list[dict[str, str]]) -> dict[str, Any]:
        """The JSON object for texts by kind, and tool calls."""
        content = texts.get("content", "")
        more: dict[str, Any] = {"thinking": texts["reasoning"]} if texts.get("reasoning") else {}
        if not isinstance(self.body, schemas.OllamaChatRequest):
            return _head(self.body.model) | {"response": content} | more
        if calls:
            more["tool_calls"] = [
                {"id": call["id"], "function": {"index": i, "name": call["name"], "arguments": arguments_of(call)}}
                for i, call in enumerate(calls)
            ]
        return _head(self.body.model) | {"message": {"role": "assistant", "content": content} | more}

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": [self.names.entry(entry) for entry in entries]} if self.body.logprobs and entries else {}

    def _lines(self, number: int, delta: OutputDelta) -> list[bytes]:
        lines, logprobs = [], self._logprobs(delta.logprobs)
        for kind, text in delta.parts:
            if kind == "tool_call":  # sent as one line when it is complete
                add_tool_call(self.calls, json.loads(text))
            else:
                lines.append(line(self._line({kind: text}, []) | logprobs | {"done": False}))
                logprobs = {}
        if logprobs:  # of tokens whose text is still to come
            lines.append(line(self._line({}, []) | logprobs | {"done": False}))
        if delta.finish_reason is not None:
            if self.calls:
                lines.append(line(self._line({}, self.calls) | {"done": False}))
            end = _end(delta.finish_reason, delta.usage or Usage(), delta.timing or Timing(), self.started)
            lines.append(line(self._line({}, []) | end))
        return lines


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": _iso(time.time())}


def _end(reason: FinishReason | None, usage: Usage, timing: Timing, started: float) -> dict[str, Any]:
    prompt_s = max(0.0, timing.ttft_s - timing.queue_s)
    total_s = time.monotonic() - started
    return {
        "done": True, "done_reason": "length" if reason is FinishReason.LENGTH else "stop",
        "total_duration": _ns(total_s), "load_duration": _ns(max(0.0, total_s - timing.total_s)),
        "prompt_eval_count": usage.prompt_tokens, "prompt_eval_duration": _ns(prompt_s),
        "eval_count": usage.completion_tokens, "eval_duration": _ns(max(0.0, timing.total_s - timing.ttft_s)),
    }  # fmt: skip


async def _load_or_unload(request: Request, body: schemas.Asked, empty: dict[str, Any]) -> dict[str, Any]:
    """Handle a request without a prompt: load the model, or unload it if keep_alive is 0."""
    service = service_of(request)
    keep = schemas.keep_alive_s(body.keep_alive)
    model = await service.find(body.model)
    if keep == 0:
        if not service.pool.keep(model.name, 0.0):
            why = "it is pinned, or was named when the server started"
            raise invalid(f"{model.name} stays loaded: {why}. localllm stop {model.name} unloads it.", "keep_alive")
        return _head(body.model) | empty | {"done": True, "done_reason": "unload"}
    async with unless_left(request.receive), service.reserve(request, body.model):
        if keep != "default":
            service.pool.keep(model.name, keep)
    return _head(body.model) | empty | {"done": True, "done_reason": "load"}


async def embed(request: Request, body: schemas.OllamaEmbedRequest) -> Response:
    """Embed texts as vectors of length 1; without any text, only load the model."""
    started = time.monotonic()
    texts = split_prompts(body.input, "input", MAX_TEXTS) if body.input not in ("", []) else []
    vectors, count, pooling = await _vectors(request, body, texts, "input", truncate=body.truncate is not False)
    took = _ns(time.monotonic() - started)
    head = {
        "model": body.model, "total_duration": took, "load_duration": 0, "prompt_eval_count": count, "pooling": pooling,
    }  # fmt: skip
    rows = (unit(vector[: body.dimensions]).tolist() for vector in vectors)
    return await with_rows(head, "embeddings", rows, len(vectors))


async def embedding(request: Request, body: schemas.OllamaEmbeddingRequest) -> dict[str, Any]:
    """Embed one text, without normalizing; without a text, only load the model and return an empty vector."""
    vectors, *_ = await _vectors(request, body, [body.prompt] if body.prompt else [], "prompt", truncate=True)
    return {"embedding": vectors[0].tolist() if vectors else []}


async def _vectors(
    request: Request, body: schemas.Embedded, texts: list[Any], param: str, *, truncate: bool
) -> tuple[Vectors, int, str]:
    """Return (a vector per text, prompt tokens, pooling method)."""
    service, keep = service_of(request), schemas.keep_alive_s(body.keep_alive)
    service.refuse_adapter(body.model)
    async with unless_left(request.receive), service.reserve(request, body.model) as reservation:
        if keep != "default":
            service.pool.keep(reservation.model.name, keep)
        pooling = reservation.llm.default_pooling
        if not texts:
            return [], 0, pooling
        return *await pooled_texts(service, reservation, texts, pooling, param, truncate=truncate), pooling


async def version(request: Request) -> dict[str, Any]:
    """Return the version of Ollama's API, and the program's own."""
    return {"version": VERSION, "localllm": __version__}


async def tags(request: Request) -> dict[str, Any]:
    """List the models on this machine."""
    return {"models": [_tag(model) for model in await service_of(request).models()]}


async def running(request: Request) -> dict[str, Any]:
    """List the models in memory."""
    service = service_of(request)
    rows = []
    for row in service.pool.loaded():
        model = service.pool.known(row.name)
        if model is None or row.llm is None:
            continue
        expires = time.time() + (MAX_TTL_S if row.expires_in_s is None else row.expires_in_s)
        size = row.llm.resident_bytes
        on_gpu = size if row.llm.plan.device != "cpu" and row.llm.is_awake else 0
        rows.append(
            _tag(model)
            | {"size": size, "size_vram": on_gpu, "expires_at": _iso(expires), "context_length": row.llm.plan.ctx}
        )
    return {"models": rows}


async def show(request: Request, body: schemas.ShowRequest) -> dict[str, Any]:
    """Describe a model."""
    service = service_of(request)
    model = await service.find(body.model or body.name)
    arch = model.architecture
    llm = service.pool.llm_of(model.name)
    template = (llm.tokenizer.chat_template or "") if llm else await asyncio.to_thread(model.template_of)
    return {
        "modelfile": "", "parameters": "", "template": template,
        "license": model.license, "details": details(model), "modified_at": _iso(model.modified),
        "model_info": {
            "general.architecture": arch, "general.basename": _basename(model.name),
            "general.parameter_count": model.params,
            f"{arch}.context_length": model.max_context,
        },
        "capabilities": _capabilities(model, template),
    }  # fmt: skip


def _capabilities(model: ServedModel, template: str) -> list[str]:
    """The capabilities of a model, by Ollama's names."""
    if model.embeds:
        return ["embedding"]
    can = {"vision": model.sees, "tools": "tools" in template, "thinking": reasoning_tags(template) is not None}
    return ["completion", *(name for name, does in can.items() if does)]


def _tag(model: ServedModel) -> dict[str, Any]:
    return {
        "name": model.name, "model": model.name, "modified_at": _iso(model.modified), "size": model.size_bytes,
        "digest": hashlib.sha256(f"{model.name}:{model.size_bytes}".encode()).hexdigest(), "details": details(model),
    }  # fmt: skip


def details(model: ServedModel) -> dict[str, Any]:
    """Ollama's `details` of a model."""
    unit, letter = next((u, c) for u, c in ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, "")) if model.params >= u or u == 1)
    return {
        "parent_model": "", "format": model.container, "family": model.architecture, "families": [model.architecture],
        "parameter_size": f"{model.params / unit:.{1 if letter == 'B' else 0}f}{letter}",
        "quantization_level": model.quant,
    }  # fmt: skip


def _basename(name: str) -> str:
    """The display name of a model: without its owner, quant and container."""
    return re.sub(r"-GGUF$", "", name.partition(":")[0].rpartition("/")[2].removesuffix(".gguf"), flags=re.IGNORECASE)


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
