"""POST /tokenize and /detokenize, in the dialects of vLLM and llama.cpp, and /apply-template."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import Response

from localllm.llm.llm import LLM
from localllm.server.body import checked
from localllm.server.errors import invalid
from localllm.server.generation import Conversation
from localllm.server.openai.output import TokenNames
from localllm.server.openai.reading import further, read_conversation
from localllm.server.openai.schemas import MAX_MESSAGES, Body, ChatMessage, ChatRequest
from localllm.server.reply import unless_left, with_lists
from localllm.server.service import service_of

MAX_TOKENS = 1 << 20


class TokenizeRequest(Body):
    """POST /tokenize, in vLLM's dialect (prompt or messages) or llama.cpp's (content)."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    content: StrictStr | None = None
    add_special_tokens: StrictBool | None = None
    add_special: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    return_token_strs: StrictBool | None = None
    with_pieces: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: StrictStr | None = None
    tokens: Annotated[list[StrictInt], Field(fail_fast=True, max_length=MAX_TOKENS)]


async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Tokenize a text or a conversation."""
    answer = await tokens_of(request, body)
    return await with_lists(answer, len(answer["tokens"]))


async def tokens_of(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Return the body of a `tokenize` response, with `tokens` and more. Raises LocalLLMError, ClientLeft."""
    service = service_of(request)
    given = [name for name in ("prompt", "messages", "content") if getattr(body, name) is not None]
    if len(given) != 1:
        message = "Exactly one of prompt, messages and content is required."
        raise invalid(message, "prompt", "missing_required_parameter")
    conversation = None
    if body.messages is not None:
        named = body.model_dump(include={"messages", "chat_template_kwargs", "add_generation_prompt"})
        conversation = read_conversation(checked(further(body) | named, ChatRequest))
    async with unless_left(request.receive), service.reserve(request, body.model) as reservation:
        llm = reservation.llm
        work = partial(_tokens, llm, body, conversation)
        size = len(body.prompt or body.content or "")
        return await (service.text_work(size, work) if conversation is None else service.in_thread(work))


def _tokens(llm: LLM, body: TokenizeRequest, conversation: Conversation | None) -> dict[str, Any]:
    if conversation is not None:
        ids = conversation.encode(llm)
    else:
        text = body.prompt if body.prompt is not None else body.content or ""
        adds = body.add_special if body.prompt is None else body.add_special_tokens is not False
        ids = llm.encode_prompt(text) if adds else llm.tokenizer.encode(text, special=True)
    names = TokenNames(llm)
    if body.content is not None:  # llama.cpp
        if body.with_pieces:
            return {"tokens": [{"id": i, "piece": names.text(i)} for i in ids]}
        return {"tokens": ids}
    strings = [names.text(i) for i in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": llm.plan.ctx, "tokens": ids, "token_strs": strings}


async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
    """Decode token ids into text, returned under both names that clients expect."""
    service = service_of(request)
    async with unless_left(request.receive), service.reserve(request, body.model) as reservation:
        llm = reservation.llm
        for token in body.tokens:
            if not 0 <= token < llm.facts.vocab_size:
                last = llm.facts.vocab_size - 1
                raise invalid(f"tokens contains {str(token)[:40]}; valid ids are 0 to {last}.", "tokens")
        decode = llm.tokenizer.decode
        text = await service.text_work(len(body.tokens), lambda: decode(body.tokens, skip_special=False))
    return {"prompt": text, "content": text}


async def apply_template(request: Request, body: ChatRequest) -> dict[str, Any]:
    """Render a conversation as the prompt text of the model: {"prompt": ...}."""
    service = service_of(request)
    conversation = read_conversation(body)
    async with unless_left(request.receive), service.reserve(request, body.model) as reservation:
        llm = reservation.llm
        (ids,) = await service.encode(llm, conversation)
        text = await service.text_work(len(ids), lambda: llm.tokenizer.decode(ids, skip_special=False))
    return {"prompt": text}
