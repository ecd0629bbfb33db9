"""POST /v1/completions: text in, text on; with echo and logprobs it scores a prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.answer import Answer, Completion, Piece, add_usage
from localllm.errors import ContextTooLong
from localllm.request import TokenLogprob, Usage

from .body import read_body
from .errors import ApiError
from .sampling import sampling_params
from .schemas import MAX_PROMPTS, CompletionRequest
from .service import AsyncTurn, Service, finish_name, new_id, unless_left, usage_json
from .sse import event_stream


@dataclass(frozen=True, slots=True)
class _Wish:
    """What shapes a choice."""

    echo: bool
    logprobs: bool
    generates: bool


async def completions(request: Request) -> Response:
    """Complete one or more prompts, whole or streamed."""
    service: Service = request.app.state.service
    body = await read_body(request, CompletionRequest)
    model = service.check_model(body.model)
    service.check_ready()
    params = sampling_params(body, service.llm.default_params())
    prompts = await asyncio.to_thread(_prompts, service, body)
    if len(prompts) * params.n > MAX_PROMPTS:
        raise ApiError(400, f"{len(prompts)} prompts times n {params.n} is more than {MAX_PROMPTS}.", param="prompt")
    head = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": model}
    wish = _Wish(bool(body.echo), body.logprobs is not None, body.max_tokens != 0)
    turns: list[AsyncTurn] = []
    try:
        for ids in prompts:
            turns.append(  # noqa: PERF401 - those already started must be ended if a later one is refused
                service.submit(
                    lambda listener, ids=ids: service.llm.submit(  # type: ignore[misc]
                        ids, params, cache_salt=body.cache_salt or "", listener=listener
                    )
                )
            )
    except ContextTooLong as error:
        _end(turns)
        error.param = "prompt"
        raise
    except BaseException:
        _end(turns)
        raise
    await unless_left(request, _any_admitted(turns), *turns)
    if body.stream:
        wants_usage = bool(body.stream_options is not None and body.stream_options.include_usage)
        return event_stream(_chunks(service, turns, head, wish, wants_usage))
    answers = await unless_left(request, _all_answers(turns), *turns)
    choices = [
        _choice(service, answer, one, number * params.n + one.index, wish)
        for number, answer in enumerate(answers)
        for one in answer.completions
    ]
    used = _sum([answer.usage for answer in answers], wish)
    return JSONResponse({**head, "choices": choices, "usage": usage_json(used)})


def _end(turns: list[AsyncTurn]) -> None:
    for turn in turns:
        turn.turn.abort()


async def _any_admitted(turns: list[AsyncTurn]) -> None:
    """Wait until the first of them has its first piece. Raises its error."""
    tasks = [asyncio.ensure_future(turn.admitted()) for turn in turns]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()


async def _all_answers(turns: list[AsyncTurn]) -> list[Answer]:
    return [await turn.answer() for turn in turns]


def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    """str | [str] | [int] | [[int]] -> ids per prompt. Raises ApiError at the first element that is none of these."""
    prompt = body.prompt
    if isinstance(prompt, str) or _is_ids(prompt):
        prompts = [prompt]
    elif isinstance(prompt, list):
        prompts = prompt
    else:
        raise ApiError(400, "prompt is text, token ids, or a list of either.", code="invalid_type", param="prompt")
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"{len(prompts)} prompts; 1 to {MAX_PROMPTS} are taken.", param="prompt")
    if not all(isinstance(p, str) or _is_ids(p) for p in prompts):
        raise ApiError(400, "prompt is text, token ids, or a list of either.", code="invalid_type", param="prompt")
    return [service.llm.encode_prompt(p) for p in prompts]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _sum(usages: list[Usage], wish: _Wish) -> Usage:
    return Usage(
        sum(u.prompt_tokens for u in usages),
        sum(u.cached_tokens for u in usages),
        sum(u.completion_tokens for u in usages) if wish.generates else 0,
    )


def _choice(service: Service, answer: Answer, one: Completion, index: int, wish: _Wish) -> dict[str, Any]:
    text = one.text if wish.generates else ""
    entries: list[TokenLogprob | None] = list(one.logprobs) if wish.generates else []
    ids = [e.token_id for e in one.logprobs] if wish.generates else []
    offset = 0
    prompt_text = service.llm.tokenizer.decode(answer.prompt_token_ids, skip_special=False) if wish.echo else ""
    if wish.echo:
        text = prompt_text + text
        entries = [*(answer.prompt_logprobs or []), *entries]
        ids = [*answer.prompt_token_ids, *ids]
    logprobs = service.text_logprobs(entries, ids, offset) if wish.logprobs else None
    finish = finish_name(one.finish_reason) if wish.generates else "length"
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}


async def _chunks(
    service: Service, turns: list[AsyncTurn], head: dict[str, Any], wish: _Wish, wants_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    head = head | ({"usage": None} if wants_usage else {})
    queue: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()

    async def forward(number: int, turn: AsyncTurn) -> None:
        async for piece in turn.pieces():
            await queue.put((number, piece))
        await queue.put((number, None))

    tasks = [asyncio.create_task(forward(i, turn)) for i, turn in enumerate(turns)]
    usages = [Usage() for _ in turns]
    seen: set[int] = set()
    lengths = [0] * (len(turns) * turns[0].turn.num_answers)
    open_turns = len(turns)
    try:
        while open_turns:
            number, piece = await queue.get()
            if piece is None:
                open_turns -= 1
                continue
            if piece.error is not None:
                raise piece.error
            index = number * turns[number].turn.num_answers + piece.index
            text = piece.text if wish.generates else ""
            if wish.echo and index not in seen and (piece.token_ids or piece.finish_reason is not None):
                seen.add(index)
                text = service.llm.tokenizer.decode(turns[number].turn.prompt_token_ids, skip_special=False) + text
            logprobs = None
            entries: list[TokenLogprob | None] = list(piece.logprobs) if wish.generates else []
            ids = [e.token_id for e in piece.logprobs] if wish.generates else []
            if wish.echo and piece.prompt_logprobs:
                entries, ids = [*piece.prompt_logprobs, *entries], [*turns[number].turn.prompt_token_ids, *ids]
            if wish.logprobs and entries:
                logprobs = service.text_logprobs(entries, ids, lengths[index])
                lengths[index] += sum(map(len, logprobs["tokens"]))
            if text or logprobs or piece.finish_reason is not None:
                choice = {
                    "text": text, "index": index, "logprobs": logprobs,
                    "finish_reason": finish_name(piece.finish_reason),
                }  # fmt: skip
                yield head | {"choices": [choice]}
            if piece.usage is not None:
                usages[number] = add_usage(usages[number], piece.usage)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if wants_usage:
        yield head | {"choices": [], "usage": usage_json(_sum(usages, wish))}
