"""POST /v1/completions: text in, text on; with echo and logprobs it scores a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.llm.outputs import CompletionOutput, OutputDelta, RequestOutput
from localllm.request import TokenLogprob
from localllm.server.body import read_body
from localllm.server.openai.output import finish_name
from localllm.server.openai.reading import read_completion
from localllm.server.openai.rendering import Rendering
from localllm.server.openai.schemas import CompletionRequest
from localllm.server.reply import reply
from localllm.server.service import Reservation
from localllm.server.sse import EVENTS


async def completions(request: Request) -> Response:
    """Complete one or more prompts, whole or streamed."""
    body = await read_body(request, CompletionRequest)
    asked = read_completion(body)
    return await reply(request, asked, lambda reservation: CompletionRendering(reservation, body), EVENTS)


class CompletionRendering(Rendering):
    """How the answers of one request look; those to several prompts are numbered through."""

    objects = ("text_completion", "text_completion")
    prefix = "cmpl"

    def __init__(self, reservation: Reservation, body: CompletionRequest) -> None:
        super().__init__(reservation, body, generates=body.max_tokens != 0)
        self._body = body
        self._echo, self._logprobs = bool(body.echo), body.logprobs is not None
        self._per_prompt = self.streams[0].num_answers
        self._seen: set[int] = set()  # choices whose first chunk is out
        self._lengths = [0] * (len(self.streams) * self._per_prompt)  # characters that log-probabilities have covered

    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
        return [
            self._choice(output, one, number * self._per_prompt + one.index)
            for number, output in enumerate(outputs)
            for one in output.completions
        ]

    def _choice(self, output: RequestOutput, one: CompletionOutput, index: int) -> dict[str, Any]:
        text = one.text if self.generates else ""
        entries: list[TokenLogprob | None] = list(one.logprobs) if self.generates else []
        ids = list(one.token_ids) if self.generates else []
        if self._logprobs:
            ids = [e.token_id for e in entries if e is not None]
        if self._echo:
            text = self._prompt_text(output.prompt_token_ids) + text
            entries = [*(output.prompt_logprobs or []), *entries]
            ids = [*output.prompt_token_ids, *ids]
        logprobs = self.names.completion(entries, ids, 0) if self._logprobs else None
        finish = finish_name(one.finish_reason) if self.generates else "length"
        choice = {
            "text": text, "index": index, "logprobs": logprobs, "finish_reason": finish, "stop_reason": one.stop_reason,
        }  # fmt: skip
        if self._body.return_token_ids:
            choice |= {"token_ids": one.token_ids, "prompt_token_ids": output.prompt_token_ids}
        return choice

    def _prompt_text(self, ids: Any) -> str:
        return self.tokenizer.decode(ids, skip_special=False)

    def chunks(self) -> AsyncIterator[bytes]:
        return self.stream({**self.head, "object": self.objects[1], **({"usage": None} if self.wants_usage else {})})

    def choices_of(self, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """One choice, or none for a delta that shows nothing."""
        stream = self.streams[number]
        index = number * self._per_prompt + delta.index
        ended = delta.finish_reason is not None
        text = delta.text if self.generates else ""
        more: dict[str, Any] = {}
        if self._body.return_token_ids and self.generates and delta.token_ids:
            more["token_ids"] = delta.token_ids
        if index not in self._seen and (delta.token_ids or ended):
            self._seen.add(index)
            if self._echo:
                text = self._prompt_text(stream.prompt_token_ids) + text
            if self._body.return_token_ids:
                more["prompt_token_ids"] = list(stream.prompt_token_ids)
        logprobs = None
        entries: list[TokenLogprob | None] = list(delta.logprobs) if self.generates else []
        ids = [e.token_id for e in delta.logprobs] if self.generates else []
        if self._echo and delta.prompt_logprobs:
            entries, ids = [*delta.prompt_logprobs, *entries], [*stream.prompt_token_ids, *ids]
        if self._logprobs and entries:
            logprobs = self.names.completion(entries, ids, self._lengths[index])
            self._lengths[index] += sum(map(len, logprobs["tokens"]))
        if not (text or logprobs or more or ended):
            return []
        finish = "length" if ended and not self.generates else finish_name(delta.finish_reason)
        return [
            {
                "text": text, "index": index, "logprobs": logprobs, "finish_reason": finish,
                "stop_reason": delta.stop_reason, **more,
            }
        ]  # fmt: skip
