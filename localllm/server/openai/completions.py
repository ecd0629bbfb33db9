"""POST /v1/completions: text in, text on; with echo and logprobs it scores a prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.errors import ContextTooLong
from localllm.llm.llm import LLM
from localllm.llm.outputs import CompletionOutput, OutputDelta, RequestOutput, add_usage
from localllm.request import TokenLogprob, Usage
from localllm.server.body import read_body
from localllm.server.errors import ApiError
from localllm.server.openai.constraints import wanted
from localllm.server.openai.output import TokenNames, finish_name, new_id, timings_json, usage_json
from localllm.server.openai.reading import check_fields, deadline_of, sampling_params
from localllm.server.openai.schemas import MAX_PROMPTS, CompletionRequest
from localllm.server.response_stream import AsyncTurn, unless_left
from localllm.server.service import Place, Service, Wish
from localllm.server.sse import Opened, data, event_stream, first_or_stream


async def completions(request: Request) -> Response:
    """Complete one or more prompts, whole or streamed."""
    service: Service = request.app.state.service
    body = await read_body(request, CompletionRequest)
    check_fields(body)
    prompts = split_prompts(body.prompt, "prompt", MAX_PROMPTS)
    if len(prompts) * (body.n or 1) > MAX_PROMPTS:
        raise ApiError(400, f"{len(prompts)} prompts times n {body.n} is more than {MAX_PROMPTS}.", param="prompt")
    if body.stream:
        async with unless_left(request):
            return await first_or_stream(_open_stream(service, request, body, prompts), event_stream)
    async with unless_left(request):
        place = await open_completion(service, request, body, prompts)
        try:
            answers = [await turn.answer() for turn in place.turns]
        finally:
            _end(place.turns)
    return JSONResponse(Shape(place, body).whole(answers))


def split_prompts(value: Any, param: str, limit: int) -> list[str | list[int]]:
    """str | [str] | [int] | [[int]] -> one item per prompt. Raises ApiError at the first that is none of these."""
    if isinstance(value, str) or _is_ids(value):
        prompts = [value]
    elif isinstance(value, list):
        prompts = value
    else:
        what = "missing" if value is None else "text, token ids, or a list of either"
        raise ApiError(400, f"{param} is {what}.", code="invalid_type", param=param)
    if not prompts or len(prompts) > limit:
        raise ApiError(400, f"{len(prompts)} texts; 1 to {limit} are taken.", param=param)
    if not all(isinstance(p, str) or _is_ids(p) for p in prompts):
        raise ApiError(400, f"{param} is text, token ids, or a list of either.", code="invalid_type", param=param)
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


async def encode_all(service: Service, llm: LLM, prompts: list[str | list[int]]) -> list[list[int]]:
    """Token ids of every prompt; long texts off the event loop."""
    size = sum(len(p) for p in prompts if isinstance(p, str))
    return await service.text_work(size, lambda: [llm.encode_prompt(p) for p in prompts])


async def open_completion(
    service: Service, request: Request, body: CompletionRequest, prompts: list[str | list[int]]
) -> Place:
    """Wait, tokenise, submit: a place with a turn per prompt. Raises ApiError, LocalLLMError."""
    async with service.place(
        request, body.model, user=body.user or "", priority=body.priority, cost=len(prompts) * (body.n or 1),
        deadline=deadline_of(body),
    ) as place:  # fmt: skip
        params = sampling_params(body, place.llm.default_params())
        ids = await encode_all(service, place.llm, prompts)
        wish = Wish(bool(body.stream), cache_salt=body.cache_salt or "", generates=body.max_tokens != 0)
        llm, bound = place.llm, wanted(body)
        if bound.constraint is not None:
            wish.more["spec"] = await asyncio.to_thread(llm.output_spec, (), chat=False, constraint=bound.constraint)
        try:
            await service.start(place, ids, params, wish)
        except ContextTooLong as error:
            error.param = "prompt"
            raise
    return place


async def _open_stream(
    service: Service, request: Request, body: CompletionRequest, prompts: list[str | list[int]]
) -> Opened:
    place = await open_completion(service, request, body, prompts)
    try:
        await place.turns[0].ready()
    except BaseException:
        _end(place.turns)
        raise
    return Opened(Shape(place, body).chunks(), lambda: _end(place.turns))


def _end(turns: list[AsyncTurn]) -> None:
    for turn in turns:
        turn.abort()


class Shape:
    """How this request's answers look."""

    def __init__(self, place: Place, body: CompletionRequest) -> None:
        self._turns, self._body = place.turns, body
        self._tokenizer = place.llm.tokenizer
        self._names = TokenNames(self._tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs is not None
        self._generates = body.max_tokens != 0
        self.head = {
            "id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": place.model.name,
        }  # fmt: skip

    def whole(self, answers: list[RequestOutput]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        per = self._turns[0].num_answers
        choices = [
            self._choice(answer, one, number * per + one.index)
            for number, answer in enumerate(answers)
            for one in answer.completions
        ]
        used = self._sum([answer.usage for answer in answers])
        whole = {**self.head, "choices": choices, "usage": usage_json(used)}
        return whole | ({"timings": timings_json(used, answers[0].timing)} if self._body.timings_per_token else {})

    def _choice(self, answer: RequestOutput, one: CompletionOutput, index: int) -> dict[str, Any]:
        text = one.text if self._generates else ""
        entries: list[TokenLogprob | None] = list(one.logprobs) if self._generates else []
        ids = list(one.token_ids) if self._generates else []
        if self._logprobs:
            ids = [e.token_id for e in entries if e is not None]
        if self._echo:
            text = self._prompt_text(answer.prompt_token_ids) + text
            entries = [*(answer.prompt_logprobs or []), *entries]
            ids = [*answer.prompt_token_ids, *ids]
        logprobs = self._names.completion(entries, ids, 0) if self._logprobs else None
        finish = finish_name(one.finish_reason) if self._generates else "length"
        choice = {
            "text": text, "index": index, "logprobs": logprobs, "finish_reason": finish, "stop_reason": one.stop_reason,
        }  # fmt: skip
        if self._body.return_token_ids:
            choice |= {"token_ids": one.token_ids, "prompt_token_ids": answer.prompt_token_ids}
        return choice

    def _prompt_text(self, ids: Any) -> str:
        return self._tokenizer.decode(ids, skip_special=False)

    def _sum(self, usages: list[Usage]) -> Usage:
        return Usage(
            sum(u.prompt_tokens for u in usages),
            sum(u.cached_tokens for u in usages),
            sum(u.completion_tokens for u in usages) if self._generates else 0,
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """The whole stream but its end."""
        options = self._body.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        wants_usage = continuous or bool(options and options.include_usage)
        head = self.head | ({"usage": None} if wants_usage else {})
        usages = [Usage() for _ in self._turns]
        running = [Usage(len(turn.prompt_token_ids)) for turn in self._turns]
        lengths = [0] * (len(self._turns) * self._turns[0].num_answers)
        seen: set[int] = set()
        async for number, pieces in merged(self._turns):
            chunks = []
            for piece in pieces:
                if piece.error is not None:
                    raise piece.error
                running[number] = add_usage(
                    running[number], Usage(running[number].prompt_tokens, 0, len(piece.token_ids))
                )
                choice = self._of_piece(number, piece, seen, lengths)
                if choice is not None:
                    stats = {"usage": usage_json(self._sum(running))} if continuous else {}
                    chunks.append(data(head | stats | {"choices": [choice]}))
                if piece.usage is not None:
                    usages[number] = add_usage(usages[number], piece.usage)
                if piece.finish_reason is not None and self._body.timings_per_token and piece.timing is not None:
                    timings = timings_json(self._sum([usages[number]]), piece.timing)
                    chunks.append(data(head | {"choices": [], "timings": timings}))
            if chunks:
                yield b"".join(chunks)
        if wants_usage:
            yield data(head | {"choices": [], "usage": usage_json(self._sum(usages))})

    def _of_piece(self, number: int, piece: OutputDelta, seen: set[int], lengths: list[int]) -> dict[str, Any] | None:
        turn = self._turns[number]
        index = number * turn.num_answers + piece.index
        text = piece.text if self._generates else ""
        more: dict[str, Any] = {}
        if self._body.return_token_ids and self._generates and piece.token_ids:
            more["token_ids"] = piece.token_ids
        if index not in seen and (piece.token_ids or piece.finish_reason is not None):
            seen.add(index)
            if self._echo:
                text = self._prompt_text(turn.prompt_token_ids) + text
            if self._body.return_token_ids:
                more["prompt_token_ids"] = list(turn.prompt_token_ids)
        logprobs = None
        entries: list[TokenLogprob | None] = list(piece.logprobs) if self._generates else []
        ids = [e.token_id for e in piece.logprobs] if self._generates else []
        if self._echo and piece.prompt_logprobs:
            entries, ids = [*piece.prompt_logprobs, *entries], [*turn.prompt_token_ids, *ids]
        if self._logprobs and entries:
            logprobs = self._names.completion(entries, ids, lengths[index])
            lengths[index] += sum(map(len, logprobs["tokens"]))
        if not (text or logprobs or more or piece.finish_reason is not None):
            return None
        finish = finish_name(piece.finish_reason)
        if piece.finish_reason is not None and not self._generates:
            finish = "length"
        return {
            "text": text, "index": index, "logprobs": logprobs, "finish_reason": finish,
            "stop_reason": piece.stop_reason, **more,
        }  # fmt: skip


async def merged(turns: list[AsyncTurn]) -> AsyncIterator[tuple[int, list[OutputDelta]]]:
    """The pieces of several turns as they come, with the number of the turn."""
    if len(turns) == 1:
        async for some in turns[0].batches():
            yield 0, some
        return
    queue: asyncio.Queue[tuple[int, list[OutputDelta] | None]] = asyncio.Queue(maxsize=2 * len(turns))

    async def forward(number: int, turn: AsyncTurn) -> None:
        async for pieces in turn.batches():
            await queue.put((number, pieces))
        await queue.put((number, None))

    tasks = [asyncio.create_task(forward(i, turn)) for i, turn in enumerate(turns)]
    open_turns = len(turns)
    try:
        while open_turns:
            number, pieces = await queue.get()
            if pieces is None:
                open_turns -= 1
            else:
                yield number, pieces
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
