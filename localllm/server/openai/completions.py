"""POST /v1/chat/completions and /v1/completions; the latter scores a prompt if echo and logprobs are set."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.llm.outputs import CompletionOutput, OutputDelta, RequestOutput, add_usage
from localllm.request import FinishReason, TokenLogprob, Usage
from localllm.server.openai.output import (
    TextOffsets,
    TokenNames,
    finish_name,
    has_called,
    new_id,
    timings_json,
    tool_calls_json,
    tool_delta,
    usage_json,
)
from localllm.server.openai.reading import read_chat, read_completion
from localllm.server.openai.schemas import ChatRequest, CompletionRequest, Sampled
from localllm.server.reply import EVENTS, data, dumps, reply
from localllm.server.service import Reservation


async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, whole or streamed."""
    rendering = partial(ChatRendering, body)
    return await reply(request, read_chat(body), rendering, EVENTS)


async def completions(request: Request, body: CompletionRequest) -> Response:
    """Complete one or more prompts, whole or streamed."""
    rendering = partial(CompletionRendering, body)
    return await reply(request, read_completion(body), rendering, EVENTS)


class OpenAIRendering(ABC):
    """Common part of both routes, whole and streamed; subclasses build the choices."""

    objects = ("", "")  # `object` of a whole response and of a chunk
    prefix = ""
    generates = True

    def __init__(self, body: Sampled, reservation: Reservation) -> None:
        self._reservation, self._stream, self._asked = reservation, reservation.stream, body
        self.names = TokenNames(reservation.llm, as_ids=bool(body.return_tokens_as_token_ids))
        self.head = {"id": new_id(self.prefix), "created": int(time.time()), "model": reservation.name}
        options = body.stream_options
        self.continuous = bool(options and options.continuous_usage_stats)
        self.wants_usage = self.continuous or bool(options and options.include_usage)
        self._usages = [Usage() for _ in self._stream.prompts]
        self._running = [Usage(len(ids)) for ids in self._stream.prompts]

    @abstractmethod
    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]: ...
    @abstractmethod
    def choices_of(self, number: int, delta: OutputDelta) -> list[dict[str, Any]]: ...  # one chunk per choice

    async def whole(self) -> dict[str, Any]:
        outputs = await self._stream.outputs()
        usage = self._sum([output.usage for output in outputs])
        whole = {
            **self.head, "object": self.objects[0], "choices": self.choices(outputs), "usage": usage_json(usage),
        }  # fmt: skip
        return whole | ({"timings": timings_json(usage, outputs[0].timing)} if self._asked.timings_per_token else {})

    async def stream(self, head: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the chunks of all deltas, each beginning with `head`, then the usage if requested."""
        begin = b"data: " + dumps(head)[:-1] + b',"choices":['  # serialized once

        def render(number: int, delta: OutputDelta) -> list[bytes]:
            if delta.usage is not None:
                self._usages[number] = add_usage(self._usages[number], delta.usage)
            if self.continuous:
                used = Usage(self._running[number].prompt_tokens, 0, len(delta.token_ids))
                self._running[number] = add_usage(self._running[number], used)
                stats = {"usage": usage_json(self._sum(self._running))}
                chunks = [data(head | stats | {"choices": [choice]}) for choice in self.choices_of(number, delta)]
            else:
                chunks = [begin + dumps(choice) + b"]}\n\n" for choice in self.choices_of(number, delta)]
            if delta.finish_reason is not None and self._asked.timings_per_token and delta.timing is not None:
                timings = dumps(timings_json(self._sum([self._usages[number]]), delta.timing))
                chunks[-1] = chunks[-1].removesuffix(b"}\n\n") + b',"timings":' + timings + b"}\n\n"
            return chunks

        async for chunk in self._stream.rendered(render):
            yield chunk
        if self.wants_usage:
            yield data(head | {"choices": [], "usage": usage_json(self._sum(self._usages))})

    def _sum(self, usages: list[Usage]) -> Usage:
        return Usage(
            sum(u.prompt_tokens for u in usages),
            sum(u.cached_tokens for u in usages),
            sum(u.completion_tokens for u in usages) if self.generates else 0,
            sum(u.reasoning_tokens for u in usages),
        )


class ChatRendering(OpenAIRendering):
    """Renders the responses to a conversation."""

    objects = ("chat.completion", "chat.completion.chunk")
    prefix = "chatcmpl"

    def __init__(self, body: ChatRequest, reservation: Reservation) -> None:
        super().__init__(body, reservation)
        self._body = body
        self._shows_reasoning = body.include_reasoning is not False
        self.head["service_tier"] = "default"
        self._called: dict[int, str] = {}  # by choice: the arguments of its last call
        self._is_legacy = body.functions is not None and body.tools is None  # calls are shown as one `function_call`

    async def whole(self) -> dict[str, Any]:
        whole = await super().whole()
        prompt = list(self._stream.prompts[0])
        return whole | ({"prompt_token_ids": prompt} if self._body.return_token_ids else {})

    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
        return [self._choice(one) for one in outputs[0].completions]

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        calls = tool_calls_json(one.tool_calls)
        message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None, "annotations": []}
        if calls:
            message["content"] = one.text or None
            message |= {"function_call": calls[0]["function"]} if self._is_legacy else {"tool_calls": calls}
        if one.reasoning and self._shows_reasoning:
            message |= {"reasoning": one.reasoning, "reasoning_content": one.reasoning}
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": self.names.chat(one.logprobs) if self._body.logprobs else None,
            "finish_reason": self._finish(
                one.finish_reason, one.stop_reason, calls[-1]["function"]["arguments"] if calls else None
            ),
            "stop_reason": one.stop_reason,
        }
        return choice | ({"token_ids": one.token_ids} if self._body.return_token_ids else {})

    def _finish(self, reason: FinishReason | None, stop: int | str | None, arguments: str | None) -> str | None:
        name = finish_name(reason, has_tool_calls=has_called(arguments, stop))
        return "function_call" if name == "tool_calls" and self._is_legacy else name

    async def chunks(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        head = {**self.head, "object": self.objects[1]}
        if options and options.include_usage:
            head["usage"] = None
        first = {"prompt_token_ids": list(self._stream.prompts[0])} if self._body.return_token_ids else {}
        yield b"".join(
            data(head | ({} if index else first) | {"choices": [_delta(index, {"role": "assistant", "content": ""})]})
            for index in range(self._stream.num_answers)
        )
        async for chunk in self.stream(head):
            yield chunk

    def choices_of(self, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """Return one choice per part of the delta; log-probabilities and token ids go with the first."""
        choices = []
        logprobs = self.names.chat(delta.logprobs) if self._body.logprobs and delta.logprobs else None
        more = {"token_ids": delta.token_ids} if self._body.return_token_ids and delta.token_ids else {}
        for part in self._parts(delta):
            choices.append(_delta(delta.index, part, logprobs) | more)
            logprobs, more = None, {}
        if logprobs or more:
            choices.append(_delta(delta.index, {}, logprobs) | more)
        if delta.finish_reason is not None:
            finish = self._finish(delta.finish_reason, delta.stop_reason, self._called.get(delta.index))
            choices.append(_delta(delta.index, {}, None, finish) | {"stop_reason": delta.stop_reason})
        return choices

    def _parts(self, delta: OutputDelta) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for kind, text in delta.parts:
            if kind == "tool_call":
                call = tool_delta(text)
                before = "" if call.get("id") else self._called.get(delta.index, "")
                self._called[delta.index] = before + call["function"]["arguments"]
                parts.append({"function_call": call["function"]} if self._is_legacy else {"tool_calls": [call]})
            elif kind == "content":
                parts.append({"content": text})
            elif self._shows_reasoning:
                parts.append({"reasoning": text, "reasoning_content": text})
        return parts


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


class CompletionRendering(OpenAIRendering):
    """Renders the responses to prompts; choices are numbered across all prompts."""

    objects = ("text_completion", "text_completion")
    prefix = "cmpl"

    def __init__(self, body: CompletionRequest, reservation: Reservation) -> None:
        super().__init__(body, reservation)
        self.generates = body.max_tokens != 0
        self._body, self._per_prompt = body, self._stream.num_answers
        self._seen: set[int] = set()  # choices whose first chunk was sent
        self._scored: dict[int, list[TokenLogprob | None]] = {}  # by prompt; delivered with its first sequence
        self._offsets = [TextOffsets() for _ in range(len(self._stream.prompts) * self._per_prompt)]  # by choice

    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
        choices = []
        for number, output in enumerate(outputs):
            for one in output.completions:
                all_of_it = OutputDelta(
                    one.index, [("content", one.text)], one.token_ids, one.logprobs, one.finish_reason,
                    one.stop_reason, prompt_logprobs=output.prompt_logprobs,
                )  # fmt: skip
                (choice,) = self.choices_of(number, all_of_it)
                if self._body.logprobs is not None:
                    choice["logprobs"] = choice["logprobs"] or self.names.completion([], [], TextOffsets())
                if self._body.return_token_ids:
                    choice |= {"token_ids": one.token_ids, "prompt_token_ids": output.prompt_token_ids}
                choices.append(choice)
        return choices

    def chunks(self) -> AsyncIterator[bytes]:
        return self.stream({**self.head, "object": self.objects[1], **({"usage": None} if self.wants_usage else {})})

    def choices_of(self, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """Return one choice, or none for a delta with nothing to show."""
        body, prompt = self._body, self._stream.prompts[number]
        index = number * self._per_prompt + delta.index
        ended = delta.finish_reason is not None
        text = delta.text if self.generates else ""
        more: dict[str, Any] = {}
        scored: list[TokenLogprob | None] | None = None
        if body.return_token_ids and self.generates and delta.token_ids:
            more["token_ids"] = delta.token_ids
        if delta.prompt_logprobs:
            self._scored[number] = delta.prompt_logprobs
        if index not in self._seen and (delta.token_ids or ended):
            self._seen.add(index)
            scored = self._scored.get(number)
            if body.echo:
                text = self._reservation.llm.tokenizer.decode(prompt, skip_special=False) + text
            if body.return_token_ids:
                more["prompt_token_ids"] = list(prompt)
        logprobs = None
        entries: list[TokenLogprob | None] = list(delta.logprobs) if self.generates else []
        ids = [e.token_id for e in delta.logprobs] if self.generates else []
        if body.echo and scored:
            cached = [None] * (len(prompt) - len(scored))
            entries, ids = [*cached, *scored, *entries], [*prompt, *ids]
        if body.logprobs is not None and entries:
            logprobs = self.names.completion(entries, ids, self._offsets[index])
        if not (text or logprobs or more or ended):
            return []
        finish = "length" if ended and not self.generates else finish_name(delta.finish_reason)
        return [
            {
                "text": text, "index": index, "logprobs": logprobs, "finish_reason": finish,
                "stop_reason": delta.stop_reason, **more,
            }
        ]  # fmt: skip
