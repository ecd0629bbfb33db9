"""Converts messages and tools to the form templates expect, or to plain text for templates without tool support."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..template import WrittenText
from .calls import json_loads, tool_function
from .formats import GENERIC, ToolFormat

_INSTRUCTIONS = """You may call functions to help with the request. These are the functions, each with a JSON schema \
of its arguments:
<tools>
{tools}
</tools>
To call one, answer with a JSON object of its name and its arguments between tags, and nothing after it:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
What the function returns is given to you between <tool_response> tags. Call a function only when it helps."""


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert tools to the form models were trained with: no other keys of the API."""
    shaped = []
    for tool in tools:
        function = tool_function(tool)
        kept = {key: function[key] for key in ("name", "description") if function.get(key) is not None}
        kept["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
        shaped.append({"type": "function", "function": kept})
    return shaped


def template_messages(
    messages: Sequence[Mapping[str, Any]], tool_format: ToolFormat = GENERIC, *, as_text: bool = False
) -> list[dict[str, Any]]:
    """Convert the arguments of calls to objects: clients send JSON text, and templates serialize objects.

    Ids are mapped to the form the format's templates require; equal ids stay equal.

    as_text  write calls into the text of their messages, in the format's notation, for templates that omit them
    """
    ids = _Ids(tool_format.ids)
    made = []
    for message in messages:
        shaped = _template_message(message, ids, tool_format)
        calls = shaped.pop("tool_calls", None) if as_text else None
        if calls:
            pairs = [(str(f.get("name")), f.get("arguments") or {}) for f in map(tool_function, calls)]
            shaped["content"] = WrittenText.of([(str(shaped.get("content") or ""), False), *tool_format.pieces(pairs)])
        made.append(shaped)
    return made


def _template_message(message: Mapping[str, Any], ids: _Ids, tool_format: ToolFormat) -> dict[str, Any]:
    made = dict(message)
    calls = made.get("tool_calls")
    if isinstance(calls, list | tuple):
        made["tool_calls"] = [_template_call(call, ids, tool_format) for call in calls]
        if not calls:
            del made["tool_calls"]
    if isinstance(made.get("tool_call_id"), str):
        made["tool_call_id"] = ids.known(made["tool_call_id"])
    return made


def _template_call(call: Any, ids: _Ids, tool_format: ToolFormat) -> Any:
    if not isinstance(call, Mapping):
        return call
    made = {"type": "function", **call}
    function = made.get("function")
    if isinstance(function, Mapping):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json_loads(arguments or "{}")
            except ValueError:
                pass  # truncated or not JSON: keep it unchanged
            made["function"] = {**function, "arguments": arguments}
        if tool_format.text_arguments and not isinstance(arguments, str):
            made["function"] = {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
    if isinstance(made.get("id"), str):
        name = function.get("name") if isinstance(function, Mapping) else ""
        made["id"] = ids.new(made["id"], str(name))
    return made


class _Ids:
    """Maps the ids of a conversation's calls to the form of `ToolFormat.ids`."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._made: dict[str, str] = {}
        self._count = 0

    def new(self, call_id: str, name: str) -> str:
        """The id of the next call."""
        made = self.known(call_id)
        if "NAME" in self._form:
            made = self._made[call_id] = self._form.replace("INDEX", str(self._count)).replace("NAME", name)
        self._count += 1
        return made

    def known(self, call_id: str) -> str:
        """The id of an earlier call."""
        return _short(call_id) if self._form == "short" else self._made.get(call_id, call_id)


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def plain_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write tools into the system message, and calls and results as text, for templates without tool support.

    Consecutive results become one user message.
    """
    made: list[dict[str, Any]] = []
    for message in template_messages(messages):
        calls = message.pop("tool_calls", None)
        if calls:
            texts = [str(message.get("content") or ""), *map(_call_text, calls)]
            message["content"] = "\n".join(text for text in texts if text)
        elif message.get("role") in ("tool", "function"):
            message = {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
            if made and made[-1]["role"] == "user" and str(made[-1]["content"]).endswith("</tool_response>"):
                made[-1]["content"] += "\n" + message["content"]
                continue
        made.append(message)
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in template_tools(tools))
        said = _INSTRUCTIONS.format(tools=lines)
        if made and made[0].get("role") == "system":
            made[0]["content"] = f"{made[0].get('content') or ''}\n\n{said}"
        else:
            made.insert(0, {"role": "system", "content": said})
    return made


def _call_text(call: Any) -> str:
    function = tool_function(call) if isinstance(call, Mapping) else {}
    body = {"name": function.get("name"), "arguments": function.get("arguments") or {}}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
