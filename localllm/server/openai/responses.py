"""/v1/responses: create (whole or streamed), get, delete, and list input items. Responses are kept in memory only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.server.errors import ApiError, invalid, unsupported
from localllm.server.generation import Generation
from localllm.server.openai import responses_schemas as schemas
from localllm.server.openai.reading import read_chat, read_conversation
from localllm.server.openai.responses_events import ResponseBuilder
from localllm.server.openai.responses_mcp import MAX_CALLS, McpRounds, approved, ended, offered, shaped
from localllm.server.openai.responses_store import Stored
from localllm.server.reply import StreamFormat, reply, unless_left
from localllm.server.response_stream import AsyncResponseStream
from localllm.server.service import Service, service_of


async def create_response(request: Request, body: schemas.ResponsesRequest) -> Response:
    """Create a response, continuing an earlier one if the request names it."""
    service = service_of(request)
    schemas.refuse(body)
    before = _earlier_items(service, body)
    items = [*before, *_resolved(service, schemas.input_items(body))]
    tools, guarded = await offered(service, body)
    calls = approved(items, tools, len(before))

    def read(items: list[dict[str, Any]]) -> Generation:
        chat = schemas.to_chat(body, items, shaped(tools), len(before))
        return replace(read_chat(chat), shortens=body.truncation == "auto")

    def after(output: list[dict[str, Any]]) -> Generation:
        asked = read([*items, *output])
        if asked.tool_use is not None:  # a required call has already been made
            asked = replace(asked, tool_use=replace(asked.tool_use, choice="auto", only=()))
        return asked

    async def again(output: list[dict[str, Any]]) -> AsyncResponseStream:
        return (await service.open(request, after(output))).stream

    async def make_calls() -> Generation:
        assert service.mcp is not None
        for item in calls:
            ended(item, await service.mcp.call_once(item["approval_request_id"], item["name"], item["arguments"]))
        return after(calls)

    asked = read(items)

    def keep(response: dict[str, Any]) -> None:
        if body.store is not False:
            service.responses.put(response, items)

    rounds = McpRounds(most=body.max_tool_calls or MAX_CALLS)
    if tools and service.mcp is not None:
        rounds = McpRounds(tools, guarded, calls, service.mcp.call, again, rounds.most)
    builder = ResponseBuilder(body, asked.tool_use, keep, rounds)
    return await reply(request, asked, builder.opened, StreamFormat(builder.fail), make_calls if calls else None)


async def count_input_tokens(request: Request, body: schemas.ResponsesRequest) -> dict[str, Any]:
    """Count the input tokens of a response, including those of an earlier one that it continues."""
    service = service_of(request)
    before = _earlier_items(service, body)
    items = [*before, *_resolved(service, schemas.input_items(body))]
    tools, _ = await offered(service, body)
    conversation = read_conversation(schemas.to_chat(body, items, shaped(tools), len(before)))
    async with unless_left(request.receive), service.reserve(request, body.model) as reservation:
        (ids,) = await service.encode(reservation.llm, conversation)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


def _not_found(what: str, code: str, param: str) -> ApiError:
    return ApiError(404, f"There is no {what}; it may have been discarded.", code=code, param=param)


def _earlier_items(service: Service, body: schemas.ResponsesRequest) -> list[dict[str, Any]]:
    """Return the items of the conversation that `previous_response_id` names."""
    previous = body.previous_response_id
    if previous is None:
        return []
    stored = service.responses.get(previous)
    if stored is None:
        raise _not_found(f"response {previous[:80]!r}", "previous_response_not_found", "previous_response_id")
    return [*stored.input_items, *stored.response["output"]]


def _resolved(service: Service, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace item references by the stored items."""
    found = list(items)
    for number, item in enumerate(items):
        if item.get("type") == "item_reference":
            name = str(item.get("id"))
            named = service.responses.item(name)
            if named is None:
                raise _not_found(f"item {name[:80]!r}", "item_not_found", f"input[{number}].id")
            found[number] = named
    return found


def _stored(request: Request) -> Stored:
    found = service_of(request).responses.get(request.path_params["response_id"])
    if found is None:
        raise _not_found("such response", "not_found", "response_id")
    return found


async def get_response(request: Request) -> dict[str, Any]:
    """Return a stored response."""
    if request.query_params.get("stream", "").lower() == "true":
        raise unsupported("stream is not supported: only background responses can be resumed.", "stream")
    return _stored(request).response


async def delete_response(request: Request) -> dict[str, Any]:
    """Delete a stored response."""
    response_id = _stored(request).response["id"]
    service_of(request).responses.remove(response_id)
    return {"id": response_id, "object": "response.deleted", "deleted": True}


async def list_input_items(request: Request) -> dict[str, Any]:
    """List the input items of a response, newest first: at most `limit`, those after the item `after`."""
    stored, query = _stored(request), request.query_params
    items = [
        {"id": f"{stored.response['id']}_{i}", **schemas.in_full(item)} for i, item in enumerate(stored.input_items)
    ]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(f"order must be asc or desc, not {order[:40]!r}.", "order", "invalid_value")
    if order == "desc":
        items.reverse()
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit) <= 100:
        raise invalid(f"limit must be a whole number from 1 to 100, not {limit[:40]!r}.", "limit", "invalid_value")
    first, after = 0, query.get("after")
    if after is not None:
        first = next((index for index, item in enumerate(items, 1) if item["id"] == after), 0)
        if not first:
            raise invalid(f"after names no input item of this response: {after[:40]!r}.", "after", "invalid_value")
    shown = items[first : first + int(limit)]
    return {
        "object": "list", "data": shown, "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None, "has_more": first + len(shown) < len(items),
    }  # fmt: skip


async def cancel_response(request: Request) -> dict[str, Any]:
    """Reject cancellation, which needs background responses; closing the connection ends a response."""
    _stored(request)
    raise invalid("This response is not running in the background.", "response_id", "invalid_value")
