"""The frame of an answer of /v1/chat/completions and /v1/completions, whole and streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from localllm.llm.outputs import OutputDelta, RequestOutput, add_usage
from localllm.request import Usage
from localllm.server.openai.output import TokenNames, new_id, timings_json, usage_json
from localllm.server.openai.schemas import Sampled
from localllm.server.response_stream import rendered
from localllm.server.service import Reservation
from localllm.server.sse import data, dumps


class Rendering:
    """What both have in common; each makes its own choices.

    objects  what the whole answer and a chunk call themselves
    """

    objects = ("", "")
    prefix = ""

    def __init__(self, reservation: Reservation, body: Sampled, *, generates: bool = True) -> None:
        self.streams, self._asked, self.generates = reservation.streams, body, generates
        self.tokenizer = reservation.llm.tokenizer
        self.names = TokenNames(self.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self.head = {"id": new_id(self.prefix), "created": int(time.time()), "model": reservation.model.name}
        options = body.stream_options
        self.continuous = bool(options and options.continuous_usage_stats)
        self.wants_usage = self.continuous or bool(options and options.include_usage)
        self._usages = [Usage() for _ in self.streams]
        self._running = [Usage(len(stream.prompt_token_ids)) for stream in self.streams]

    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
        raise NotImplementedError

    def choices_of(self, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """The choices that a delta of the stream of this number becomes: a chunk each."""
        raise NotImplementedError

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        usage = self._sum([output.usage for output in outputs])
        whole = {
            **self.head, "object": self.objects[0], "choices": self.choices(outputs), "usage": usage_json(usage),
        }  # fmt: skip
        return whole | ({"timings": timings_json(usage, outputs[0].timing)} if self._asked.timings_per_token else {})

    async def stream(self, head: dict[str, Any]) -> AsyncIterator[bytes]:
        """The chunks of all deltas, then the usage where that is wanted.

        head  what all chunks begin with
        """
        begin = b"data: " + dumps(head)[:-1] + b',"choices":['  # written once

        def render(number: int, delta: OutputDelta) -> list[bytes]:
            if self.continuous:
                used = Usage(self._running[number].prompt_tokens, 0, len(delta.token_ids))
                self._running[number] = add_usage(self._running[number], used)
                stats = {"usage": usage_json(self._sum(self._running))}
                chunks = [data(head | stats | {"choices": [choice]}) for choice in self.choices_of(number, delta)]
            else:
                chunks = [begin + dumps(choice) + b"]}\n\n" for choice in self.choices_of(number, delta)]
            if delta.usage is not None:
                self._usages[number] = add_usage(self._usages[number], delta.usage)
            if delta.finish_reason is not None and self._asked.timings_per_token and delta.timing is not None:
                timings = timings_json(self._sum([self._usages[number]]), delta.timing)
                chunks.append(data(head | {"choices": [], "timings": timings}))
            return chunks

        async for chunk in rendered(self.streams, render):
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
