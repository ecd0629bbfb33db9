"""Request bodies of /v1/responses, and their conversion into chat requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from localllm.server.errors import invalid, not_text, unsupported
from localllm.server.openai.reading import chat_request
from localllm.server.openai.schemas import MAX_MESSAGES, Body, ChatRequest, Filed, Generates, Name, ranged

log = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = {"input_text", "output_text", "text"}


class Reasoning(Body):
    """Reasoning options."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: StrictStr | None = None


class TextOptions(Body):
    """Format and verbosity of the text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(Generates, Filed):
    """POST /v1/responses"""

    input: StrictStr | Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: StrictStr | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[StrictInt, ranged("max_tokens", ge=16)] | None = None
    max_tool_calls: Annotated[StrictInt, Field(ge=1)] | None = None
    top_logprobs: Annotated[StrictInt, ranged("logprobs")] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: Name | None = None
    conversation: Any = None
    include: Annotated[list[StrictStr], Field(max_length=16)] | None = None
    background: StrictBool | None = None
    prompt: Any = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether to include the log-probabilities of the output."""
        return "message.output_text.logprobs" in (self.include or [])


def refuse(body: ResponsesRequest) -> None:
    """Raise ApiError for fields that only a hosted service supports."""
    if body.background:
        raise unsupported("Background responses are not supported.", "background")
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise unsupported(f"{name} is not supported: the server stores no {name}s.", name)


def to_chat(
    body: ResponsesRequest, items: list[dict[str, Any]], mcp: Sequence[dict[str, Any]] = (), earlier: int = 0
) -> ChatRequest:
    """Build the chat request for these items and these MCP tools, given in the chat format. Raises ApiError.

    earlier   number of leading items that come from earlier responses
    """
    messages = messages_of(items, earlier)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    same = {"model", "stream", "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key"}
    fields = body.model_dump(include=same) | {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": True if body.wants_logprobs else None,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "parallel_tool_calls": body.parallel_tool_calls if body.tools else None,
    }
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    if body.tools is not None:
        fields["tools"] = [*_functions(body.tools), *mcp]
    if body.tool_choice is not None and (body.tools is not None or body.tool_choice not in ("none", "auto")):
        if body.tools and not fields["tools"] and body.tool_choice not in ("none", "auto"):
            message = "tool_choice needs a function among the tools: the server ignores tools of other types."
            raise invalid(message, "tool_choice", "invalid_value")
        fields["tool_choice"] = _choice(body.tool_choice)
    return chat_request(body, fields, "text.format")


def renamed(param: str | None) -> str | None:
    """Translate a chat request's field name into that of /v1/responses."""
    if param is not None and param.startswith("messages"):
        return "input" + param.removeprefix("messages")
    if param is not None and param.startswith("tools["):
        return param.replace("].function", "]", 1)  # functions are flat there
    return {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}.get(param or "", param)


def input_items(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the input as items."""
    if not isinstance(body.input, str):
        return body.input
    return [{"type": "message", "role": "user", "content": _input_text(body.input)}]


def _input_text(text: str) -> list[dict[str, Any]]:
    return [{"type": "input_text", "text": text}]


def in_full(item: dict[str, Any]) -> dict[str, Any]:
    """Complete an input item for a listing: a message may be given without its type, and its content as a string."""
    if item.get("type", "message") != "message":
        return item
    content = item.get("content")
    if isinstance(content, str):
        is_output = item.get("role") == "assistant"
        content = [{"type": "output_text", "text": content, "annotations": []}] if is_output else _input_text(content)
    return {"type": "message", "status": "completed", **item, "content": content}


def messages_of(items: list[dict[str, Any]], earlier: int = 0) -> list[dict[str, Any]]:
    """Convert items into chat messages: calls join the assistant message before them, reasoning the one after it.

    Raises ApiError with the position of an invalid item in the request; `earlier` is as in `to_chat`.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""
    shown: list[dict[str, Any]] = []  # images in call results, since templates accept images only in user messages
    made = {str(item.get("approval_request_id")) for item in items if item.get("type") == "mcp_call"}
    for number, item in enumerate(items):
        where = f"input[{number - earlier}]"
        kind = item.get("type", "message")
        if shown and kind != "function_call_output":
            messages.append({"role": "user", "content": shown})
            shown = []
        if kind == "message":
            if item.get("role") not in ROLES:
                roles = ", ".join(ROLES[:-1])
                raise invalid(f"A message's role must be one of {roles} or {ROLES[-1]}.", f"{where}.role")
            message: dict[str, Any] = {
                "role": item.get("role"),
                "content": _content(item.get("content"), f"{where}.content", images=item.get("role") == "user"),
            }  # fmt: skip
            if reasoning and message["role"] == "assistant":
                message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"), "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }  # fmt: skip
            if not all(isinstance(v, str) for v in (item.get("call_id"), item.get("name"), item.get("arguments"))):
                raise invalid("A function_call must have call_id, name and arguments.", where)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
                if reasoning:
                    messages[-1]["reasoning_content"], reasoning = reasoning, ""
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise invalid("call_id is missing.", f"{where}.call_id", "missing_required_parameter")
            output = _content(item.get("output"), f"{where}.output", images=True)
            shown += [part for part in output if isinstance(part, dict) and part["type"] == "image_url"]
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(output)})
        elif kind == "mcp_call" or (kind == "mcp_approval_request" and str(item.get("id")) not in made):
            function = {"name": str(item.get("name")), "arguments": str(item.get("arguments") or "{}")}
            call = {"id": str(item.get("id")), "type": "function", "function": function}
            result = str(item.get("output") or item.get("error") or "") if kind == "mcp_call" else _denied(item, items)
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": result},
            ]
        elif kind in ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"):
            continue  # the request lists its tools again, and an approval shows in its call
        elif kind == "reasoning":
            reasoning += _text(item.get("content"))
        else:
            raise invalid(f"Items of type {str(kind)[:40]!r} are not supported.", where, "unsupported_value")
    return [*messages, {"role": "user", "content": shown}] if shown else messages


def _denied(asked: dict[str, Any], items: list[dict[str, Any]]) -> str:
    """The text that the model reads as the result of a call that was not approved."""
    answers = [one for one in items if one.get("type") == "mcp_approval_response"]
    answer = next((one for one in answers if one.get("approval_request_id") == asked.get("id")), {})
    reason = str(answer.get("reason") or "")
    return "The user did not approve this call" + (f": {reason}" if reason else ".")


def _content(content: Any, where: str, images: bool = False) -> Any:
    """Convert content parts to those of a chat request; `images`: whether image parts are allowed."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        name = where.rpartition(".")[2]
        raise invalid(f"{name} must be text or a list of parts.", where, "invalid_type")
    parts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict):
            raise invalid("A part of content must be an object.", f"{where}[{number}]")
        kind = part.get("type")
        if images and kind == "input_image":
            url = part.get("image_url")
            if not isinstance(url, str) or not url.startswith("data:"):
                what = "An image must be a data: URL: nothing is fetched, no files are stored."
                raise invalid(what, f"{where}[{number}]", "unsupported_value")
            parts.append({"type": "image_url", "image_url": {"url": url}})
            continue
        if not isinstance(kind, str) or (kind not in TEXT_PARTS and kind != "refusal"):
            raise not_text("Content", kind, f"{where}[{number}]")
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            raise invalid(f"{name} is missing.", f"{where}[{number}].{name}", "missing_required_parameter")
        parts.append({"type": "text", "text": part[name]})
    return parts


def _text(parts: Any) -> str:
    if not isinstance(parts, list):
        return str(parts or "")
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


def _functions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep only the function tools; agents offer hosted tools by default, and manage without them."""
    others = sorted({str(tool.get("type"))[:40] for tool in tools if tool.get("type") not in ("function", "mcp")})
    if others:
        log.warning("ignored tools of type %s: only functions can be called", ", ".join(others))
    functions = [tool for tool in tools if tool.get("type") == "function"]
    return [
        one if "function" in one else {"type": "function", "function": {k: v for k, v in one.items() if k != "type"}}
        for one in functions
    ]


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_choice(tool) for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    return choice
