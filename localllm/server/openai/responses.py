"""/v1/responses: create (whole or streamed), get, delete, list the input items; kept in memory for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.errors import ContextTooLong
from localllm.server.body import read_body
from localllm.server.errors import ApiError, renaming
from localllm.server.generation import Chat, open_chat
from localllm.server.openai.output import TokenNames
from localllm.server.openai.responses_events import Growing
from localllm.server.openai.responses_schemas import (
    ResponsesRequest,
    input_items,
    refuse,
    renamed,
    to_chat,
    without_oldest,
)
from localllm.server.openai.responses_store import Stored
from localllm.server.openai.schemas import ChatRequest
from localllm.server.response_stream import unless_left
from localllm.server.service import Service
from localllm.server.sse import Opened, first_or_stream, named_event_stream


async def create_response(request: Request) -> Response:
    """Answer, with what an earlier response left as its beginning."""
    service: Service = request.app.state.service
    body = await read_body(request, ResponsesRequest)
    refuse(body)
    items = [*_earlier(service, body), *_named(service, input_items(body))]
    chat_body = to_chat(body, items)
    growing: list[Growing] = []

    async def open_one() -> tuple[Chat, Growing]:
        with renaming(renamed):
            chat = await _open(service, request, chat_body, shortens=body.truncation == "auto")
        names = TokenNames(chat.place.llm.tokenizer)
        growing.append(Growing(body, chat_body, chat.model, names))
        return chat, growing[0]

    def keep(one: Growing) -> None:
        if body.store is not False:
            service.responses.put(one.json(), items)

    async def open_stream() -> Opened:
        chat, one = await open_one()
        return Opened(_events(chat, one, keep), chat.turn.abort)

    if body.stream:

        def on_error(error: ApiError) -> bytes:
            one = growing[0] if growing else Growing(body, chat_body, body.model or "", TokenNames(_NoTokens()))
            return one.fail(error)

        async with unless_left(request):
            return await first_or_stream(open_stream(), lambda opened: named_event_stream(opened, on_error))
    async with unless_left(request):
        chat, one = await open_one()
        async for pieces in chat.turn.batches():
            for piece in pieces:
                one.take(piece)
    keep(one)
    return JSONResponse(one.json())


async def _open(service: Service, request: Request, body: ChatRequest, *, shortens: bool) -> Chat:
    """`open_chat`; with `shortens`, of a conversation longer than the window what its end leaves room for."""
    while True:
        try:
            return await open_chat(service, request, body)
        except ContextTooLong as error:
            share = 1 - error.context["max_context"] / error.context["prompt_tokens"]
            shorter = without_oldest(body.messages, share) if shortens else None
            if shorter is None:
                raise
            body = body.model_copy(update={"messages": shorter})


async def _events(chat: Chat, one: Growing, keep: Any) -> AsyncIterator[bytes]:
    yield b"".join(one.begin())
    async for pieces in chat.turn.batches():
        events = [event for piece in pieces for event in one.take(piece)]
        if any(piece.finish_reason is not None for piece in pieces):
            keep(one)
        if events:
            yield b"".join(events)


def _earlier(service: Service, body: ResponsesRequest) -> list[dict[str, Any]]:
    """The items of the conversation that `previous_response_id` names."""
    if body.previous_response_id is None:
        return []
    stored = service.responses.get(body.previous_response_id)
    if stored is None:
        raise ApiError(
            404, f"There is no response {body.previous_response_id[:80]!r} (any more).",
            code="previous_response_not_found", param="previous_response_id",
        )  # fmt: skip
    return [*stored.input_items, *stored.response["output"]]


def _named(service: Service, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items, references replaced by what they name."""
    found = list(items)
    for number, item in enumerate(items):
        if item.get("type") != "item_reference":
            continue
        named = service.responses.item(str(item.get("id")))
        if named is None:
            raise ApiError(
                404, f"There is no item {str(item.get('id'))[:80]!r} (any more).", code="item_not_found",
                param=f"input[{number}].id",
            )  # fmt: skip
        found[number] = named
    return found


def _stored(request: Request) -> Stored:
    service: Service = request.app.state.service
    found = service.responses.get(request.path_params["response_id"])
    if found is None:
        raise ApiError(404, "There is no such response (any more).", code="not_found", param="response_id")
    return found


async def get_response(request: Request) -> Response:
    """A response by its id."""
    return JSONResponse(_stored(request).response)


async def delete_response(request: Request) -> Response:
    """Forget a response."""
    service: Service = request.app.state.service
    response_id = _stored(request).response["id"]
    service.responses.remove(response_id)
    return JSONResponse({"id": response_id, "object": "response.deleted", "deleted": True})


async def list_input_items(request: Request) -> Response:
    """What a response was asked with, the newest first."""
    stored = _stored(request)
    items = [{"id": f"{stored.response['id']}_{i}", **item} for i, item in enumerate(stored.input_items)]
    if request.query_params.get("order") != "asc":
        items.reverse()
    return JSONResponse(
        {
            "object": "list", "data": items, "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None, "has_more": False,
        }
    )  # fmt: skip


async def cancel_response(request: Request) -> Response:
    """Only background responses can be cancelled, and there are none: leaving the connection ends a response."""
    _stored(request)
    raise ApiError(400, "This response does not run in the background.", code="invalid_value", param="response_id")


class _NoTokens:
    """Names for an answer that never had a token."""

    def token_bytes(self, index: int) -> bytes:
        """Nothing."""
        return b""
