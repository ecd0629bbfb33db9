"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.llm.outputs import CompletionOutput, OutputDelta, add_usage
from localllm.request import Usage
from localllm.server.body import read_body
from localllm.server.generation import Chat, open_chat
from localllm.server.openai.output import (
    TokenNames,
    finish_name,
    new_id,
    timings_json,
    tool_calls_json,
    tool_delta,
    usage_json,
)
from localllm.server.openai.schemas import ChatRequest
from localllm.server.response_stream import unless_left
from localllm.server.service import Service
from localllm.server.sse import Opened, data, dumps, event_stream, first_or_stream


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatRequest)
    if body.stream:
        async with unless_left(request):
            return await first_or_stream(_open_stream(service, request, body), event_stream)
    async with unless_left(request):
        chat = await open_chat(service, request, body)
        answer = await chat.turn.answer()
    shape = Shape(chat, body)
    whole = {
        **shape.head, "object": "chat.completion", "choices": [shape.choice(one) for one in answer.completions],
        "usage": usage_json(answer.usage),
    }  # fmt: skip
    if body.timings_per_token:
        whole["timings"] = timings_json(answer.usage, answer.timing)
    if body.return_token_ids:
        whole["prompt_token_ids"] = answer.prompt_token_ids
    return JSONResponse(whole)


async def _open_stream(service: Service, request: Request, body: ChatRequest) -> Opened:
    chat = await open_chat(service, request, body)
    try:
        await chat.turn.ready()
    except BaseException:
        chat.turn.abort()
        raise
    return Opened(Shape(chat, body).chunks(), chat.turn.abort)


class Shape:
    """How this request's answer looks."""

    def __init__(self, chat: Chat, body: ChatRequest) -> None:
        self._turn, self._body = chat.turn, body
        self._names = TokenNames(chat.place.llm.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._shows_reasoning = body.include_reasoning is not False
        self.head = {
            "id": new_id("chatcmpl"), "created": int(time.time()), "model": chat.model, "service_tier": "default",
        }  # fmt: skip
        self._called: set[int] = set()
        """answers that called a tool"""

    def choice(self, one: CompletionOutput) -> dict[str, Any]:
        """A finished answer."""
        calls = tool_calls_json(one.tool_calls)
        message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
        if calls:
            message |= {"content": one.text or None, "tool_calls": calls}
        if one.reasoning and self._shows_reasoning:
            message |= {"reasoning": one.reasoning, "reasoning_content": one.reasoning}
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": self._names.chat(one.logprobs) if self._body.logprobs else None,
            "finish_reason": finish_name(one.finish_reason, has_tool_calls=bool(calls)),
            "stop_reason": one.stop_reason,
        }
        return choice | ({"token_ids": one.token_ids} if self._body.return_token_ids else {})

    async def chunks(self) -> AsyncIterator[bytes]:
        """The whole stream but its end."""
        options = self._body.stream_options
        wants_usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        head = {**self.head, "object": "chat.completion.chunk"} | ({"usage": None} if wants_usage else {})
        begin = b"data: " + dumps(head)[:-1] + b',"choices":['  # what all chunks share, written once
        usage, running = Usage(), Usage(len(self._turn.prompt_token_ids))
        first = {"prompt_token_ids": list(self._turn.prompt_token_ids)} if self._body.return_token_ids else {}
        yield b"".join(
            data(head | ({} if index else first) | {"choices": [_delta(index, {"role": "assistant", "content": ""})]})
            for index in range(self._turn.num_answers)
        )
        async for pieces in self._turn.batches():
            chunks = []
            for piece in pieces:
                if piece.error is not None:
                    raise piece.error
                if continuous:
                    running = add_usage(running, Usage(running.prompt_tokens, 0, len(piece.token_ids)))
                    stats = {"usage": usage_json(running)}
                    chunks += [data(head | stats | {"choices": [choice]}) for choice in self._of_piece(piece)]
                else:
                    chunks += [begin + dumps(choice) + b"]}\n\n" for choice in self._of_piece(piece)]
                if piece.usage is not None:
                    usage = add_usage(usage, piece.usage)
                if piece.finish_reason is not None and self._body.timings_per_token and piece.timing is not None:
                    chunks.append(data(head | {"choices": [], "timings": timings_json(usage, piece.timing)}))
            if chunks:
                yield b"".join(chunks)
        if wants_usage or continuous:
            yield data(head | {"choices": [], "usage": usage_json(usage)})

    def _of_piece(self, piece: OutputDelta) -> list[dict[str, Any]]:
        choices = []
        logprobs = self._names.chat(piece.logprobs) if self._body.logprobs and piece.logprobs else None
        more = {"token_ids": piece.token_ids} if self._body.return_token_ids and piece.token_ids else {}
        for delta in self._deltas(piece):
            choices.append(_delta(piece.index, delta, logprobs) | more)
            logprobs, more = None, {}
        if logprobs or more:
            choices.append(_delta(piece.index, {}, logprobs) | more)
        if piece.finish_reason is not None:
            finish = finish_name(piece.finish_reason, has_tool_calls=piece.index in self._called)
            choices.append(_delta(piece.index, {}, None, finish) | {"stop_reason": piece.stop_reason})
        return choices

    def _deltas(self, piece: OutputDelta) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for kind, text in piece.parts:
            if kind == "tool_call":
                self._called.add(piece.index)
                deltas.append({"tool_calls": [tool_delta(text)]})
            elif kind == "content":
                deltas.append({"content": text})
            elif self._shows_reasoning:
                deltas.append({"reasoning": text, "reasoning_content": text})
        return deltas


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
