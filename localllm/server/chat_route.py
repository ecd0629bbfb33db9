"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.answer import Completion, Piece, add_usage
from localllm.request import Usage

from .body import read_body
from .sampling import messages_of, sampling_params, template_kwargs
from .schemas import ChatRequest
from .service import AsyncTurn, Service, finish_name, new_id, unless_left, usage_json
from .sse import event_stream


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatRequest)
    model = service.check_model(body.model)
    service.check_ready()
    params = sampling_params(body, service.llm.default_params())
    messages, kwargs = messages_of(body), template_kwargs(body)
    prompt = await asyncio.to_thread(service.llm.encode_chat, messages, None, kwargs)
    turn = service.submit(
        lambda listener: service.llm.submit(
            prompt, params, splits_reasoning=True, cache_salt=body.cache_salt or "", listener=listener
        )
    )
    head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}
    await unless_left(request, turn.admitted(), turn)
    if body.stream:
        wants_usage = bool(body.stream_options is not None and body.stream_options.include_usage)
        return event_stream(_chunks(service, turn, head, wants_usage, bool(body.logprobs)))
    answer = await unless_left(request, turn.answer(), turn)
    choices = [_choice(service, one, bool(body.logprobs)) for one in answer.completions]
    return JSONResponse(
        {**head, "object": "chat.completion", "service_tier": "default", "choices": choices,
         "usage": usage_json(answer.usage)}
    )  # fmt: skip


def _choice(service: Service, one: Completion, wants_logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
    if one.reasoning:
        message |= {"reasoning": one.reasoning, "reasoning_content": one.reasoning}
    return {
        "index": one.index,
        "message": message,
        "logprobs": service.chat_logprobs(one.logprobs) if wants_logprobs else None,
        "finish_reason": finish_name(one.finish_reason),
        "stop_reason": one.stop_reason,
    }


async def _chunks(
    service: Service, turn: AsyncTurn, head: dict[str, Any], wants_usage: bool, wants_logprobs: bool
) -> AsyncIterator[dict[str, Any]]:
    head = {**head, "object": "chat.completion.chunk"} | ({"usage": None} if wants_usage else {})
    usage = Usage()
    for index in range(turn.turn.num_answers):
        yield head | {"choices": [_delta(index, {"role": "assistant", "content": ""})]}
    async for piece in turn.pieces():
        if piece.error is not None:
            raise piece.error
        logprobs = service.chat_logprobs(piece.logprobs) if wants_logprobs and piece.logprobs else None
        delta = _text_delta(piece)
        if delta or logprobs:
            yield head | {"choices": [_delta(piece.index, delta, logprobs)]}
        if piece.finish_reason is not None:
            yield head | {"choices": [_delta(piece.index, {}, None, finish_name(piece.finish_reason))]}
            usage = add_usage(usage, piece.usage or Usage())
    if wants_usage:
        yield head | {"choices": [], "usage": usage_json(usage)}


def _text_delta(piece: Piece) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if content := piece.text:
        delta["content"] = content
    if reasoning := "".join(text for kind, text in piece.parts if kind == "reasoning"):
        delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return delta


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
