"""Request bodies of Anthropic's /v1/messages, and their conversion into OpenAI chat requests."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from localllm.server.errors import ApiError, invalid, not_text, unsupported
from localllm.server.openai.reading import chat_request
from localllm.server.openai.schemas import MAX_MESSAGES, Body, CacheSalt, ChatRequest, Name, Number, ranged

# Claude Code begins its prompt with this line, which differs in every request and so would defeat the prefix cache
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")

Blocks = StrictStr | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1024)]


class MessageParam(Body):
    """One message: text or blocks."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Thinking(Body):
    """Whether to think first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[StrictInt, Field(ge=1)] | None = None


class OutputConfig(Body):
    """Effort and format of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens"""

    model: StrictStr | None = None
    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    thread: Any = None


class MessagesRequest(CountRequest):
    """POST /v1/messages"""

    max_tokens: Annotated[StrictInt, ranged("max_tokens")]
    stop_sequences: Annotated[list[StrictStr], Field(fail_fast=True, max_length=64)] | None = None
    stream: StrictBool | None = None
    temperature: Annotated[Number, ranged("temperature", le=1)] | None = None
    top_p: Annotated[Number, ranged("top_p")] | None = None
    top_k: Annotated[StrictInt, ranged("top_k", ge=0)] | None = None
    metadata: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    service_tier: StrictStr | None = None
    cache_salt: CacheSalt | None = None
    user: Name | None = None


def to_chat(body: CountRequest) -> ChatRequest:
    """Convert into an OpenAI chat request. Raises ApiError."""
    if body.thread is not None:  # on this error, clients send the whole conversation
        details = {"error_code": "thread_unsupported_request"}
        raise ApiError(400, "Threads are not supported: send the whole conversation.", param="thread", details=details)
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": without_billing(_text(body.system, "system"))})
    for number, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{number}]")
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        fields["continue_final_message"] = True  # Anthropic's prefill
    thinks: dict[str, Any] = {}  # arguments of the chat template
    if body.thinking is not None:
        thinks["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        thinks["reasoning_effort"] = body.output_config.effort
    if thinks:
        fields["chat_template_kwargs"] = thinks
    if body.tools is not None:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    if isinstance(body, MessagesRequest):
        form = body.output_format or (body.output_config.format if body.output_config is not None else None)
        user = (body.metadata or {}).get("user_id")
        fields |= body.model_dump(include={"stream", "temperature", "top_p", "top_k", "cache_salt"}) | {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "user": body.user or (user[:512] if isinstance(user, str) else None),
            "response_format": None if form is None else _format(form),
        }
    return chat_request(body, fields, "output_config.format")


def without_billing(system: str) -> str:
    """Remove the line with which Claude Code begins its system prompt."""
    begin = _BILLING.match(system)
    return system[begin.end() if begin else 0 :]


def renamed(param: str | None) -> str | None:
    """Translate a chat request's field name into Anthropic's."""
    if param is not None and param.startswith("tools["):
        return param.replace(".function.parameters", ".input_schema").replace(".function", "")
    return _NAMES.get(param or "", param)


_NAMES = {
    "max_completion_tokens": "max_tokens", "response_format": "output_config.format", "stop": "stop_sequences",
}  # fmt: skip


def _messages(message: MessageParam, where: str) -> list[dict[str, Any]]:
    """Convert one Anthropic message into one or more chat messages: tool results become messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    out: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for number, block in enumerate(message.content):
        at = f"{where}.content[{number}]"
        kind = block.get("type")
        if kind == "text":
            parts.append({"type": "text", "text": _string(block, "text", at)})
        elif kind == "image":
            parts.append(_image(block, at))
        elif kind == "thinking":
            reasoning.append(_string(block, "thinking", at))
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": _string(block, "name", at), "arguments": arguments}
            calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
        elif kind == "tool_result":
            given = block.get("content") or ""
            blocks = given if isinstance(given, list) else []
            shown = [one for one in blocks if isinstance(one, dict) and one.get("type") == "image"]
            parts += [_image(one, at) for one in shown]  # templates accept images only in user messages
            result = _text([one for one in given if one not in shown] if shown else given, at)
            out.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": result})
        else:
            raise not_text("A block", kind, at)
    if parts or calls or not out:
        plain = all(part["type"] == "text" for part in parts)
        content = "".join(part["text"] for part in parts) if plain else parts
        made: dict[str, Any] = {"role": message.role, "content": content}
        if calls:
            made["tool_calls"] = calls
        if reasoning:
            made["reasoning_content"] = "".join(reasoning)
        out.append(made)
    return out


def _image(block: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert an image block, which must be base64."""
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise invalid("An image's source must be of type base64: nothing is fetched.", where, "unsupported_value")
    url = f"data:{_string(source, 'media_type', where)};base64,{_string(source, 'data', where)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(blocks: Any, where: str) -> str:
    if isinstance(blocks, str):
        return blocks
    if not isinstance(blocks, list) or not all(isinstance(b, dict) and b.get("type") == "text" for b in blocks):
        raise invalid("Only text blocks are supported here.", where, "unsupported_value")
    return "\n".join(_string(block, "text", where) for block in blocks)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if value is None:
        raise invalid("is missing.", f"{where}.{name}", "missing_required_parameter")
    if not isinstance(value, str):
        raise invalid("must be a string.", f"{where}.{name}", "invalid_type")
    return value


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"Tools of type {str(tool.get('type'))[:40]!r} are not supported, only custom ones.", where)
    more = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema"), **more}
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    disabled = choice.get("disable_parallel_tool_use")
    if disabled is not None and not isinstance(disabled, bool):
        message = "tool_choice.disable_parallel_tool_use must be true or false."
        raise invalid(message, "tool_choice", "invalid_type")
    parallel = {} if disabled is None else {"parallel_tool_calls": not disabled}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    ours = {"auto": "auto", "none": "none", "any": "required", "tool": named}
    if not isinstance(kind, str) or kind not in ours:
        raise invalid("tool_choice.type must be one of auto, any, tool, none.", "tool_choice")
    return {"tool_choice": ours[kind], **parallel}


def _format(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise invalid("The output format must be of type json_schema.", "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema"), "strict": True}}
