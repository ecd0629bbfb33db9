"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.llm.outputs import CompletionOutput, OutputDelta, RequestOutput
from localllm.server.body import read_body
from localllm.server.openai.output import finish_name, tool_calls_json, tool_delta
from localllm.server.openai.reading import read_chat
from localllm.server.openai.rendering import Rendering
from localllm.server.openai.schemas import ChatRequest
from localllm.server.reply import reply
from localllm.server.service import Reservation
from localllm.server.sse import EVENTS, data


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    body = await read_body(request, ChatRequest)
    return await reply(request, read_chat(body), lambda reservation: ChatRendering(reservation, body), EVENTS)


class ChatRendering(Rendering):
    """How the answers of one request look."""

    objects = ("chat.completion", "chat.completion.chunk")
    prefix = "chatcmpl"

    def __init__(self, reservation: Reservation, body: ChatRequest) -> None:
        super().__init__(reservation, body)
        self._body = body
        self._shows_reasoning = body.include_reasoning is not False
        self.head["service_tier"] = "default"
        self._called: set[int] = set()  # answers that called a tool

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        ids = {"prompt_token_ids": outputs[0].prompt_token_ids} if self._body.return_token_ids else {}
        return super().whole(outputs) | ids

    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
        return [self._choice(one) for one in outputs[0].completions]

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        calls = tool_calls_json(one.tool_calls)
        message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
        if calls:
            message |= {"content": one.text or None, "tool_calls": calls}
        if one.reasoning and self._shows_reasoning:
            message |= {"reasoning": one.reasoning, "reasoning_content": one.reasoning}
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": self.names.chat(one.logprobs) if self._body.logprobs else None,
            "finish_reason": finish_name(one.finish_reason, has_tool_calls=bool(calls)),
            "stop_reason": one.stop_reason,
        }
        return choice | ({"token_ids": one.token_ids} if self._body.return_token_ids else {})

    async def chunks(self) -> AsyncIterator[bytes]:
        options, (stream,) = self._body.stream_options, self.streams
        head = {**self.head, "object": self.objects[1]}
        if options and options.include_usage:
            head["usage"] = None
        first = {"prompt_token_ids": list(stream.prompt_token_ids)} if self._body.return_token_ids else {}
        yield b"".join(
            data(head | ({} if index else first) | {"choices": [_delta(index, {"role": "assistant", "content": ""})]})
            for index in range(stream.num_answers)
        )
        async for chunk in self.stream(head):
            yield chunk

    def choices_of(self, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """A choice per part of the delta; log-probabilities and token ids go with the first."""
        choices = []
        logprobs = self.names.chat(delta.logprobs) if self._body.logprobs and delta.logprobs else None
        more = {"token_ids": delta.token_ids} if self._body.return_token_ids and delta.token_ids else {}
        for part in self._parts(delta):
            choices.append(_delta(delta.index, part, logprobs) | more)
            logprobs, more = None, {}
        if logprobs or more:
            choices.append(_delta(delta.index, {}, logprobs) | more)
        if delta.finish_reason is not None:
            finish = finish_name(delta.finish_reason, has_tool_calls=delta.index in self._called)
            choices.append(_delta(delta.index, {}, None, finish) | {"stop_reason": delta.stop_reason})
        return choices

    def _parts(self, delta: OutputDelta) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for kind, text in delta.parts:
            if kind == "tool_call":
                self._called.add(delta.index)
                parts.append({"tool_calls": [tool_delta(text)]})
            elif kind == "content":
                parts.append({"content": text})
            elif self._shows_reasoning:
                parts.append({"reasoning": text, "reasoning_content": text})
        return parts


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
