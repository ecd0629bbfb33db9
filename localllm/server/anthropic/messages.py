"""Anthropic's POST /v1/messages, whole or streamed, and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import LocalLLMError
from localllm.llm.outputs import CompletionOutput, OutputDelta
from localllm.request import FinishReason, Usage
from localllm.server.anthropic.schemas import CountRequest, MessagesRequest, renamed, to_chat
from localllm.server.errors import anthropic_body
from localllm.server.openai.output import arguments_of, has_called, new_id
from localllm.server.openai.reading import read_chat, read_conversation
from localllm.server.reply import StreamFormat, named, reply, unless_left
from localllm.server.response_stream import Blocks
from localllm.server.service import Reservation, service_of

KINDS = {"content": "text", "reasoning": "thinking"}  # kind of text -> Anthropic's block type


def _failed(error: LocalLLMError) -> bytes:
    error.param = renamed(error.param)
    return named("error", anthropic_body(error))


ANTHROPIC_EVENTS = StreamFormat(_failed)


async def messages(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation."""
    return await reply(request, read_chat(to_chat(body)), MessageRendering, ANTHROPIC_EVENTS)


async def count_tokens(request: Request, body: CountRequest) -> dict[str, Any]:
    """Count the tokens of a conversation."""
    service = service_of(request)
    conversation = read_conversation(to_chat(body))
    async with unless_left(request.receive), service.reserve(request, body.model) as reservation:
        (ids,) = await service.encode(reservation.llm, conversation)
    return {"input_tokens": len(ids)}


def _message(model: str) -> dict[str, Any]:
    return {
        "id": new_id("msg_"), "type": "message", "role": "assistant", "model": model, "content": [],
        "stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None,
    }  # fmt: skip


def _blocks(one: CompletionOutput) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if one.reasoning:
        blocks.append({"type": "thinking", "thinking": one.reasoning, "signature": ""})
    if one.text or not one.tool_calls:
        blocks.append(_text(one.text))
    return [*blocks, *(_tool_use(call, arguments_of(call)) for call in one.tool_calls)]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": []}  # not null, which older AI SDKs reject


def _tool_use(call: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    named_call = {"id": call.get("id") or "", "name": call.get("name") or ""}
    return {"type": "tool_use", **named_call, "input": arguments, "caller": {"type": "direct"}}


def _stop(reason: FinishReason | None, what: int | str | None, arguments: str | None) -> tuple[str | None, str | None]:
    """Return (stop_reason, stop_sequence); `arguments` are those of the last call, None without calls."""
    if reason is FinishReason.LENGTH:
        return "max_tokens", None
    if has_called(arguments, what):
        return "tool_use", None
    return ("stop_sequence", what) if isinstance(what, str) else ("end_turn", None)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens, "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cached_tokens, "cache_creation_input_tokens": 0,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}, "server_tool_use": None,
    }  # fmt: skip


# further usage fields of a message, which its last event does not have
_OF_WHOLE = {
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}, "inference_geo": None,
    "service_tier": "standard",
}  # fmt: skip


class MessageRendering:
    """Renders one message, whole or as events, with a new block whenever the kind of text changes."""

    def __init__(self, reservation: Reservation) -> None:
        self._reservation = reservation
        self._blocks, self._index = Blocks(), -1
        self._arguments: str | None = None  # of the last call

    async def whole(self) -> dict[str, Any]:
        outputs = await self._reservation.stream.outputs()
        (one,) = outputs[0].completions
        reason, sequence = _stop(
            one.finish_reason, one.stop_reason, one.tool_calls[-1]["arguments"] if one.tool_calls else None
        )
        return _message(self._reservation.name) | {
            "content": _blocks(one), "stop_reason": reason, "stop_sequence": sequence,
            "usage": _usage(outputs[0].usage) | _OF_WHOLE,
        }  # fmt: skip

    async def chunks(self) -> AsyncIterator[bytes]:
        stream = self._reservation.stream
        has_begun = False

        def render(_: int, delta: OutputDelta) -> list[bytes]:
            nonlocal has_begun
            events, has_begun = [] if has_begun else self._begin(len(stream.prompts[0]), delta), True
            return events + self.take(delta)

        async for chunk in stream.rendered(render):
            yield chunk

    def _begin(self, prompt_tokens: int, first: OutputDelta) -> list[bytes]:
        usage = Usage(prompt_tokens, first.cached_tokens or 0)
        message = _message(self._reservation.name) | {"usage": _usage(usage) | _OF_WHOLE}
        start = named("message_start", {"type": "message_start", "message": message})
        return [start, named("ping", {"type": "ping"})]

    def take(self, delta: OutputDelta) -> list[bytes]:
        events: list[bytes] = []
        for kind, text in delta.parts:
            begins, part = self._blocks.read(kind, text)
            if begins:
                events += [*self._close(), self._open(kind, part)]
            if kind != "tool_call":
                shown = {"type": f"{KINDS[kind]}_delta", KINDS[kind]: text}
                events.append(self._event("content_block_delta", delta=shown))
            elif part.get("arguments"):
                self._arguments = (self._arguments or "") + part["arguments"]
                shown = {"type": "input_json_delta", "partial_json": part["arguments"]}
                events.append(self._event("content_block_delta", delta=shown))
        return [*events, *self._end(delta)] if delta.finish_reason is not None else events

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named(kind, {"type": kind, "index": self._index, **fields})

    def _open(self, kind: str, call: dict[str, Any]) -> bytes:
        self._index += 1
        if kind == "tool_call":
            self._arguments, block = "", _tool_use(call, {})
        else:
            block = _text("") if kind == "content" else {"type": "thinking", "thinking": "", "signature": ""}
        return self._event("content_block_start", content_block=block)

    def _close(self) -> list[bytes]:
        return [self._event("content_block_stop")] if self._index >= 0 else []

    def _end(self, last: OutputDelta) -> list[bytes]:
        reason, sequence = _stop(last.finish_reason, last.stop_reason, self._arguments)
        delta = {
            "type": "message_delta", "usage": _usage(last.usage or Usage()),
            "delta": {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None},
        }  # fmt: skip
        return [*self._close(), named("message_delta", delta), named("message_stop", {"type": "message_stop"})]
