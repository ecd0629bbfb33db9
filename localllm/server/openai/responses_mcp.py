"""Tools of type "mcp" in /v1/responses: those of the owner's servers, never of one that a client names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.mcp.client import Result, Tool
from localllm.server.errors import invalid, unsupported
from localllm.server.openai.output import new_id
from localllm.server.openai.responses_schemas import ResponsesRequest
from localllm.server.response_stream import AsyncResponseStream
from localllm.server.service import Service

MAX_ROUNDS = 16  # of calls in one response
MAX_CALLS = 64
OWN = ("server_url", "connector_id", "authorization", "headers", "tunnel_id")


@dataclass(slots=True)
class McpRounds:
    """How a response goes on by itself while the model calls tools of MCP servers.

    call   a name and arguments as JSON text -> what came of it
    again  opens the next answer, after these items
    most   calls in one response
    """

    tools: Mapping[str, Tool] = field(default_factory=dict)
    call: Callable[[str, str], Awaitable[Result]] | None = None
    again: Callable[[list[dict[str, Any]]], Awaitable[AsyncResponseStream]] | None = None
    most: int = MAX_CALLS
    rounds: int = 0

    def goes_on(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The calls that wait for results. None where the client has to make calls, too, or where there were enough."""
        waiting = [item for item in output if item["type"] == "mcp_call" and item["status"] == "in_progress"]
        if any(item["type"] == "function_call" for item in output):
            return []
        num_calls = sum(item["type"] == "mcp_call" for item in output)
        return waiting if self.rounds < MAX_ROUNDS and num_calls <= self.most else []


async def offered(service: Service, body: ResponsesRequest) -> dict[str, Tool]:
    """The tools that a request offers of the owner's servers, by name. Raises ApiError."""
    found: dict[str, Tool] = {}
    for number, asked in enumerate(body.tools or ()):
        if asked.get("type") == "mcp":
            found |= await _of_server(service, asked, f"tools[{number}]")
    return found


async def _of_server(service: Service, asked: Mapping[str, Any], where: str) -> dict[str, Tool]:
    labels = service.mcp.labels if service.mcp is not None else []
    label = asked.get("server_label")
    if service.mcp is None or label not in labels:
        known = ", ".join(labels) or "none; `localllm serve --mcp FILE` offers some"
        raise invalid(f"There is no MCP server {str(label)[:64]!r} here. There are: {known}.", f"{where}.server_label")
    for name in OWN:
        if asked.get(name) is not None:
            raise unsupported(f"{name} is not taken: the owner of this server has configured it.", f"{where}.{name}")
    if asked.get("require_approval") != "never":
        raise unsupported('approvals are not supported: require_approval must be "never".', f"{where}.require_approval")
    allowed = asked.get("allowed_tools")
    if isinstance(allowed, dict):
        allowed = allowed.get("tool_names")
    if allowed is not None and not (isinstance(allowed, list) and all(isinstance(one, str) for one in allowed)):
        raise invalid("allowed_tools must be a list of names.", f"{where}.allowed_tools")
    tools = (await service.mcp.tools()).tools
    mine = {tool.name: tool for tool in tools if tool.server == label}
    return {name: tool for name, tool in mine.items() if allowed is None or name in allowed or tool.own in allowed}


def shaped(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """As a chat request has them."""
    return [tool.in_openai_shape() for tool in tools.values()]


def listings(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """An item of type mcp_list_tools for each server."""
    found: dict[str, list[dict[str, Any]]] = {}
    for tool in tools.values():
        one = {"name": tool.name, "description": tool.about, "input_schema": dict(tool.parameters), "annotations": None}
        found.setdefault(tool.server, []).append(one)
    return [
        {"type": "mcp_list_tools", "id": new_id("mcpl_"), "server_label": label, "tools": tools, "error": None}
        for label, tools in found.items()
    ]
