"""Output constraints and tools, read from the fields of any API and validated in one place.

No constraint is ignored: unsupported ones are rejected by name, with status 400. Whether a schema can be enforced is
known only when it is compiled (`OutputRules.spec`, off the event loop).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm.request import Constraint, ToolUse
from localllm.server.errors import invalid, unsupported
from localllm.server.generation import Conversation, Generation
from localllm.server.openai.schemas import Constraints

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FUNCTION = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # the length limit of hosted /v1/messages and /v1/responses
_BACKENDS = ("auto", "guidance", "llguidance")
_SCHEMA_CODE = "invalid_json_schema"
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_SINGLE = {f"guided_{kind}": kind for kind in _KINDS} | {"json_schema": "json", "grammar": "grammar"}


def with_constraints(asked: Generation, body: Constraints) -> Generation:
    """Add the constraint and tools of a body to a request. Raises ApiError 400 with the field as `param`."""
    constraint, tool_use = read_constraint(body), read_tool_use(body)
    prompts = asked.prompts
    if isinstance(prompts, Conversation):
        prompts = with_tools(prompts, tool_use)
    return replace(asked, prompts=prompts, constraint=constraint, tool_use=tool_use)


def with_tools(conversation: Conversation, tool_use: ToolUse | None) -> Conversation:
    """Pass the callable tools to the conversation's chat template."""
    tools = None if tool_use is None or tool_use.choice == "none" else list(tool_use.tools)
    return replace(conversation, tools=tools)


def read_constraint(body: Constraints) -> Constraint | None:
    """Read the output constraint of a body. Raises ApiError 400 with the field as `param`."""
    _check_backend(body.guided_decoding_backend, "guided_decoding_backend")
    if body.guided_whitespace_pattern is not None:
        raise unsupported("guided_whitespace_pattern is not supported.", "guided_whitespace_pattern")
    given = [_response_format(body.response_format), _structured_outputs(body.structured_outputs)]
    given += [_read(kind, getattr(body, name), name) for name, kind in _SINGLE.items()]
    found = [one for one in given if one is not None]
    if len(found) > 1:
        names = " and ".join(one.param for one in found[:2])
        raise invalid(f"{names} cannot be combined: a request takes one constraint.", found[1].param)
    return found[0] if found else None


def _check_backend(backend: Any, where: str) -> None:
    if backend is not None and backend not in _BACKENDS:
        raise unsupported(f"The backend {str(backend)[:40]!r} is not available.", where)


def _response_format(given: Mapping[str, Any] | None) -> Constraint | None:
    if given is None or given.get("type") == "text":
        return None
    kind, where = given.get("type"), "response_format"
    if kind == "json_object":
        schema = given.get("schema")  # an extension of llama.cpp and Fireworks
        return Constraint("json_object", param=where) if schema is None else _schema(schema, where, lenient=True)
    if kind != "json_schema":
        raise invalid("response_format.type must be one of text, json_object, json_schema.", where, "invalid_value")
    form = given.get("json_schema")
    if not isinstance(form, Mapping):
        raise invalid("response_format.json_schema is missing.", where, "missing_required_parameter")
    name, strict = form.get("name"), form.get("strict")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        message = "response_format.json_schema.name must be 1 to 64 letters, digits, _ or -."
        raise invalid(message, where, "invalid_value")
    if strict is not None and not isinstance(strict, bool):
        raise invalid("response_format.json_schema.strict must be true or false.", where, "invalid_type")
    if "schema" not in form:
        raise invalid("response_format.json_schema.schema is missing.", where, "missing_required_parameter")
    return _schema(form["schema"], where, lenient=not strict)  # as in OpenAI's API, strict defaults to false


def _schema(value: Any, where: str, *, lenient: bool = False) -> Constraint:
    if value is not True and not isinstance(value, Mapping):
        raise invalid("The JSON schema must be an object.", where, _SCHEMA_CODE)
    return Constraint("json_schema", value, lenient=lenient, param=where)


def _structured_outputs(given: Any) -> Constraint | None:
    where = "structured_outputs"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise invalid("structured_outputs must be an object.", where, "invalid_type")
    for name in ("backend", "_backend"):
        _check_backend(given.get(name), where)
    for name in ("structural_tag", "whitespace_pattern"):
        if given.get(name) is not None:
            raise unsupported(f"{name} is not supported.", where)
    kinds = [name for name in _KINDS if given.get(name) is not None]
    if len(kinds) != 1:
        raise invalid(f"structured_outputs must have exactly one of {', '.join(_KINDS)}.", where, "invalid_value")
    made = _read(kinds[0], given[kinds[0]], where)
    if made is None:
        raise invalid("structured_outputs.json_object must be true or left out.", where, "invalid_value")
    return made


def _read(kind: str, value: Any, where: str) -> Constraint | None:
    """Read a constraint of this kind from a field's value."""
    if value is None:
        return None
    if kind == "json":
        try:
            return _schema(json.loads(value) if isinstance(value, str) else value, where)
        except (ValueError, RecursionError):
            raise invalid(f"{where} is not valid JSON.", where, _SCHEMA_CODE) from None
    if kind == "json_object":
        if not isinstance(value, bool):
            raise invalid(f"{where}: json_object must be true or false.", where, "invalid_type")
        return Constraint("json_object", param=where) if value else None
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise invalid(f"{where}: a choice must be a list of non-empty strings.", where, "invalid_value")
        return Constraint("choice", tuple(value), param=where)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where} must be a non-empty string.", where, "invalid_value")
    return Constraint(kind, value, param=where)  # type: ignore[arg-type]


def read_tool_use(body: Constraints) -> ToolUse | None:
    """Read which tools may be called. Raises ApiError 400 with the field as `param`."""
    tools, choice, field = body.tools, body.tool_choice, "tools"
    if tools is None and body.functions is not None:
        given, choice, field = body.functions, body.function_call, "functions"
        if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
            raise invalid("functions must be a list of objects.", "functions", "invalid_type")
        tools = [{"type": "function", "function": dict(one)} for one in given]
        choice = {"type": "function", "function": choice} if isinstance(choice, Mapping) else choice
    elif body.function_call not in (None, "none", "auto") and not tools:
        raise invalid("function_call needs functions.", "function_call")
    if not tools:
        empty = (None, "none", "auto") if tools is not None else (None,)  # agents send these with an empty list
        if choice not in empty:
            raise invalid("tool_choice needs tools.", "tool_choice", "invalid_value")
        return None
    if len(tools) > MAX_TOOLS:
        message = f"The request has {len(tools)} tools; the limit is {MAX_TOOLS}."
        raise invalid(message, field, "array_above_max_length")
    names = [_check_tool(tool, f"{field}[{number}]") for number, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise invalid("Two tools have the same name.", field, "invalid_value")
    kind, only = _tool_choice(choice, names)
    # by default, a forced call is a single one: small models would repeat it as often as allowed
    parallel = body.parallel_tool_calls if body.parallel_tool_calls is not None else kind != "required"
    parallel = parallel and field == "tools"  # `function_call` allows only one
    return ToolUse(tuple(tools), kind, only, parallel)


def _check_tool(tool: Mapping[str, Any], where: str) -> str:
    """The name of a tool."""
    if tool.get("type") != "function":
        raise unsupported(f"A tool of type {str(tool.get('type'))[:40]!r}: only functions can be called.", where)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise invalid("function is missing.", f"{where}.function", "missing_required_parameter")
    name = function.get("name")
    if not isinstance(name, str) or not _FUNCTION.fullmatch(name):
        message = "A function's name must be 1 to 128 letters, digits, _ or -."
        raise invalid(message, f"{where}.function.name", "invalid_value")
    for key, kinds in (("description", str), ("parameters", Mapping), ("strict", bool)):
        if function.get(key) is not None and not isinstance(function[key], kinds):
            code = _SCHEMA_CODE if key == "parameters" else "invalid_type"
            raise invalid(f"{key} has the wrong type.", f"{where}.function.{key}", code)
    return name


def _tool_choice(choice: Any, names: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return (auto | none | required, the callable names, or () for all)."""
    where = "tool_choice"
    if choice in (None, "auto", "none", "required"):
        return choice or "auto", ()
    if not isinstance(choice, Mapping):
        raise invalid("tool_choice must be none, auto or required, or name a function.", where, "invalid_value")
    if choice.get("type") == "function":
        return "required", (_known(choice, names),)
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise invalid("allowed_tools must have a mode, auto or required, and tools.", where, "invalid_value")
        return str(mode), tuple(dict.fromkeys(_known(one, names) for one in listed))
    raise unsupported(f"A tool_choice of type {str(choice.get('type'))[:40]!r} is not supported.", where)


def _known(choice: Any, names: list[str]) -> str:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        message = f"tool_choice names {str(name)[:64]!r}, which is not among the tools."
        raise invalid(message, "tool_choice", "invalid_value")
    return str(name)
