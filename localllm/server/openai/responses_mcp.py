"""Tools of type "mcp" in /v1/responses: only those of the owner's servers, never of a server that a client names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.chat.mcp.client import Result, Tool
from localllm.server.errors import invalid, unsupported
from localllm.server.openai.output import new_id
from localllm.server.openai.responses_schemas import ResponsesRequest
from localllm.server.response_stream import AsyncResponseStream
from localllm.server.service import Service

MAX_ROUNDS = 16  # rounds of calls per response
MAX_CALLS = 64
OWN = ("server_url", "connector_id", "authorization", "headers", "tunnel_id")


@dataclass(slots=True)
class McpRounds:
    """How a response continues automatically while the model calls tools of MCP servers.

    guarded  names of tools whose calls need the client's approval
    done     approved calls, made before the model continues
    call     calls a tool, given its name and its arguments as JSON text
    again    starts the next generation, after these items
    most     limit of calls per response
    """

    tools: Mapping[str, Tool] = field(default_factory=dict)
    guarded: frozenset[str] = frozenset()
    done: Sequence[dict[str, Any]] = ()
    call: Callable[[str, str], Awaitable[Result]] | None = None
    again: Callable[[list[dict[str, Any]]], Awaitable[AsyncResponseStream]] | None = None
    most: int = MAX_CALLS
    rounds: int = 0

    def goes_on(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the calls to make now; none if the client has to make calls too, or if a limit is reached."""
        waiting = [item for item in output if item["type"] == "mcp_call" and item["status"] == "in_progress"]
        if any(item["type"] == "function_call" for item in output):
            return []
        num_calls = sum(item["type"] == "mcp_call" for item in output)
        return waiting if self.rounds < MAX_ROUNDS and num_calls <= self.most else []


async def offered(service: Service, body: ResponsesRequest) -> tuple[dict[str, Tool], frozenset[str]]:
    """Return the owner's tools that a request offers, by name, and which of them need approval. Raises ApiError."""
    found: dict[str, Tool] = {}
    guarded: set[str] = set()
    for number, asked in enumerate(body.tools or ()):
        if asked.get("type") == "mcp":
            tools = await _of_server(service, asked, f"tools[{number}]")
            found |= tools
            guarded |= _guarded(asked.get("require_approval"), tools, f"tools[{number}].require_approval")
    return found, frozenset(guarded)


def _guarded(policy: Any, tools: Mapping[str, Tool], where: str) -> set[str]:
    """The tools that need approval: as in OpenAI's API, all except those that the request exempts."""
    if policy in ("always", "never", None):
        return set() if policy == "never" else set(tools)
    if not isinstance(policy, dict) or set(policy) - {"always", "never"}:
        raise invalid('require_approval must be "always", "never" or an object with always and never.', where)
    always, never = (_names(policy.get(kind), f"{where}.{kind}") or () for kind in ("always", "never"))
    return {name for name, t in tools.items() if {name, t.own} & {*always} or not {name, t.own} & {*never}}


def _names(filtered: Any, where: str) -> list[str] | None:
    """Read the names of a filter, a list or an object with tool_names; None without a filter."""
    if isinstance(filtered, dict):
        if filtered.get("read_only") is not None:
            raise unsupported("read_only is not supported: list the names in tool_names.", f"{where}.read_only")
        filtered = filtered.get("tool_names")
    if filtered is not None and not (isinstance(filtered, list) and all(isinstance(one, str) for one in filtered)):
        raise invalid(f"{where.rpartition('.')[2]} must be a list of names.", where)
    return filtered


def approved(items: Sequence[dict[str, Any]], tools: Mapping[str, Tool], earlier: int = 0) -> list[dict[str, Any]]:
    """Return the calls that these items approve and that were not made yet, as mcp_call items. Raises ApiError.

    earlier   number of leading items that come from earlier responses
    """
    requests = {str(item.get("id")): item for item in items if item.get("type") == "mcp_approval_request"}
    made = {str(item.get("approval_request_id")) for item in items if item.get("type") == "mcp_call"}
    calls = []
    for number, item in enumerate(items):
        if item.get("type") != "mcp_approval_response":
            continue
        where, name = f"input[{number - earlier}]", str(item.get("approval_request_id"))
        request = requests.get(name)
        if request is None:
            raise invalid(f"No approval request {name[:80]!r} precedes this item.", f"{where}.approval_request_id")
        if not isinstance(item.get("approve"), bool):
            raise invalid("approve must be true or false.", f"{where}.approve")
        if not item["approve"] or name in made:
            continue
        made.add(name)
        tool = tools.get(str(request.get("name")))
        if tool is None or tool.server != request.get("server_label"):
            message = f"The approved tool {str(request.get('name'))[:64]!r} must be among the tools of this request."
            raise invalid(message, "tools")
        calls.append(call_item(tool, str(request.get("arguments") or "{}"), name))
    return calls


def call_item(tool: Tool, arguments: str = "", approval: str | None = None) -> dict[str, Any]:
    """The output item of a call that has not been made yet."""
    item = {"type": "mcp_call", "id": new_id("mcp_"), "server_label": tool.server, "name": tool.name}
    more = {"arguments": arguments, "output": None, "error": None, "approval_request_id": approval}
    return item | more | {"status": "in_progress"}


def ended(item: dict[str, Any], result: Result) -> None:
    """Record the result of a call in its item."""
    item["error" if result.failed else "output"] = result.text
    item["status"] = "failed" if result.failed else "completed"


async def _of_server(service: Service, asked: Mapping[str, Any], where: str) -> dict[str, Tool]:
    labels = service.mcp.labels if service.mcp is not None else []
    label = asked.get("server_label")
    if service.mcp is None or label not in labels:
        known = ", ".join(labels) or "none; add some with `localllm serve --mcp FILE`"
        raise invalid(f"There is no MCP server {str(label)[:64]!r} here. Available: {known}.", f"{where}.server_label")
    for name in OWN:
        if asked.get(name) is not None:
            raise unsupported(f"{name} is not accepted: the server's owner configures MCP.", f"{where}.{name}")
    allowed = _names(asked.get("allowed_tools"), f"{where}.allowed_tools")
    tools = (await service.mcp.tools()).tools
    mine = {tool.name: tool for tool in tools if tool.server == label}
    return {name: tool for name, tool in mine.items() if allowed is None or name in allowed or tool.own in allowed}


def shaped(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """The tools in the format of a chat request."""
    return [tool.in_openai_shape() for tool in tools.values()]


def listings(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """Return one mcp_list_tools item per server."""
    found: dict[str, list[dict[str, Any]]] = {}
    for tool in tools.values():
        one = {"name": tool.name, "description": tool.about, "input_schema": dict(tool.parameters)}
        found.setdefault(tool.server, []).append(one)
    return [
        {"type": "mcp_list_tools", "id": new_id("mcpl_"), "server_label": label, "tools": tools}
        for label, tools in found.items()
    ]
