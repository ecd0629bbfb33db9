"""A chat request, from whichever API it came, to a turn: the one way all of them go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from localllm.llm.llm import LLM
from localllm.server.openai.schemas import ChatRequest

from .openai.constraints import wanted
from .openai.reading import check_fields, deadline_of, messages_of, sampling_params, template_kwargs
from .response_stream import AsyncTurn
from .service import Place, Service, Wish


@dataclass(slots=True)
class Chat:
    """A conversation being answered."""

    turn: AsyncTurn
    model: str
    """the id to state in the answer"""
    place: Place


def prompt_of(body: ChatRequest) -> Callable[[LLM], list[int]]:
    """Check a conversation; what makes its token ids, for a thread. Raises ApiError."""
    check_fields(body)
    messages, kwargs, tools = messages_of(body), template_kwargs(body), wanted(body).template_tools
    goes_on, opens = bool(body.continue_final_message), body.add_generation_prompt is not False
    return lambda llm: llm.encode_chat(messages, tools, kwargs, continue_final=goes_on, opens_answer=opens)


async def open_chat(service: Service, request: Request, body: ChatRequest) -> Chat:
    """Check, wait, tokenise, submit. Raises ApiError, LocalLLMError."""
    encode, bound = prompt_of(body), wanted(body)
    user = body.user or body.safety_identifier or body.prompt_cache_key or ""
    async with service.place(
        request, body.model, user=user, priority=body.priority, cost=body.n or 1, deadline=deadline_of(body)
    ) as place:
        llm = place.llm
        params = sampling_params(body, llm.default_params())
        prompt = await service.in_thread(lambda: encode(llm))
        wish = Wish(bool(body.stream), splits_reasoning=True, cache_salt=body.cache_salt or "")
        if bound:
            # not in the threads that make token ids: compiling may take two seconds
            wish.more["spec"] = await asyncio.to_thread(
                llm.output_spec, prompt, chat=True, constraint=bound.constraint, tool_use=bound.tool_use
            )
        (turn,) = await service.start(place, [prompt], params, wish)
    return Chat(turn, place.model.name, place)
