"""What binds an answer, from the fields of any API: constraint and tools, checked in one place.

A constraint is never ignored: what cannot be had is refused by name, with status 400. Whether a schema can be enforced
is known only when it is compiled (`LLM.output_spec`, off the event loop).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from localllm.request import Constraint, ToolUse
from localllm.server.errors import ApiError, unsupported
from localllm.server.openai.schemas import Constraints

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_BACKENDS = ("auto", "guidance", "llguidance")
_SCHEMA_CODE = "invalid_json_schema"


def read_constraints(body: Constraints) -> tuple[Constraint | None, ToolUse | None]:
    """What binds the answer to a request. Raises ApiError 400, its `param` the field."""
    return _constraint(body), _tool_use(body)


# --- constraints -----------------------------------------------------------------------------------------------------


def _constraint(body: Constraints) -> Constraint | None:
    backend = body.guided_decoding_backend
    if backend is not None and backend not in _BACKENDS:
        raise unsupported(f"The backend {str(backend)[:40]!r} does not exist here.", "guided_decoding_backend")
    if body.guided_whitespace_pattern is not None:
        raise unsupported("guided_whitespace_pattern is not supported.", "guided_whitespace_pattern")
    found: list[Constraint] = []
    if body.response_format is not None and (one := _response_format(body.response_format)) is not None:
        found.append(one)
    if body.structured_outputs is not None:
        found.append(_structured_outputs(body.structured_outputs))
    for name, read in _SINGLE.items():
        if (value := getattr(body, name)) is not None and (one := read(value, name)) is not None:
            found.append(one)
    if len(found) > 1:
        names = " and ".join(one.param for one in found[:2])
        raise ApiError(400, f"{names} exclude each other: an answer has one constraint.", param=found[1].param)
    return found[0] if found else None


def _response_format(given: Mapping[str, Any]) -> Constraint | None:
    kind, where = given.get("type"), "response_format"
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_object", param=where)
    if kind != "json_schema":
        raise ApiError(
            400, "response_format.type is one of text, json_object, json_schema.", code="invalid_value", param=where
        )
    form = given.get("json_schema")
    if not isinstance(form, Mapping):
        raise ApiError(400, "response_format.json_schema is missing.", code="missing_required_parameter", param=where)
    name, strict = form.get("name"), form.get("strict")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ApiError(
            400,
            "response_format.json_schema.name is 1 to 64 letters, digits, _ or -.",
            code="invalid_value",
            param=where,
        )
    if strict is not None and not isinstance(strict, bool):
        raise ApiError(400, "response_format.json_schema.strict is true or false.", code="invalid_type", param=where)
    if "schema" not in form:
        raise ApiError(
            400, "response_format.json_schema.schema is missing.", code="missing_required_parameter", param=where
        )
    return _schema(form["schema"], where, lenient=strict is False)


def _schema(value: Any, where: str, *, lenient: bool = False) -> Constraint:
    if value is not True and not isinstance(value, Mapping):
        raise ApiError(400, "The JSON schema is not an object.", code=_SCHEMA_CODE, param=where)
    return Constraint("json_schema", value, lenient=lenient, param=where)


def _structured_outputs(given: Any) -> Constraint:
    where = "structured_outputs"
    if not isinstance(given, Mapping):
        raise ApiError(400, "structured_outputs is not an object.", code="invalid_type", param=where)
    for name in ("backend", "_backend"):
        if given.get(name) is not None and given[name] not in _BACKENDS:
            raise unsupported(f"The backend {str(given[name])[:40]!r} does not exist here.", where)
    if given.get("structural_tag") is not None:
        raise unsupported("structural_tag is not supported; use tools.", where)
    if given.get("whitespace_pattern") is not None:
        raise unsupported("whitespace_pattern is not supported.", where)
    kinds = [name for name in ("json", "regex", "choice", "grammar", "json_object") if given.get(name) is not None]
    if len(kinds) != 1:
        raise ApiError(
            400, "structured_outputs has exactly one of json, regex, choice, grammar, json_object.",
            code="invalid_value", param=where,
        )  # fmt: skip
    made = _READERS[kinds[0]](given[kinds[0]], where)
    if made is None:
        raise ApiError(400, "structured_outputs.json_object is true or left out.", code="invalid_value", param=where)
    return made


def _json(value: Any, where: str) -> Constraint:
    """A schema as an object or as its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{where} is text that is no JSON.", code=_SCHEMA_CODE, param=where) from None
    return _schema(value, where)


def _regex(value: Any, where: str) -> Constraint:
    return Constraint("regex", _text(value, where), param=where)


def _grammar(value: Any, where: str) -> Constraint:
    return Constraint("grammar", _text(value, where), param=where)


def _choice(value: Any, where: str) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise ApiError(400, f"{where}: a choice is a list of non-empty texts.", code="invalid_value", param=where)
    return Constraint("choice", tuple(value), param=where)


def _json_object(value: Any, where: str) -> Constraint | None:
    if not isinstance(value, bool):
        raise ApiError(400, f"{where}: json_object is true or false.", code="invalid_type", param=where)
    return Constraint("json_object", param=where) if value else None


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{where} is not a text, or empty.", code="invalid_value", param=where)
    return value


_Reader = Callable[[Any, str], Constraint | None]
_READERS: dict[str, _Reader] = {
    "json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar, "json_object": _json_object,
}  # fmt: skip
_SINGLE: dict[str, _Reader] = {
    "guided_json": _json, "guided_regex": _regex, "guided_choice": _choice, "guided_grammar": _grammar,
    "guided_json_object": _json_object, "json_schema": _json, "grammar": _grammar,
}  # fmt: skip


# --- tools -----------------------------------------------------------------------------------------------------------


def _tool_use(body: Constraints) -> ToolUse | None:
    tools, choice, field = body.tools, body.tool_choice, "tools"
    if tools is None and body.functions is not None:
        tools, choice, field = _functions(body.functions), _function_call(body.function_call), "functions"
    elif body.function_call not in (None, "none", "auto") and not tools:
        raise ApiError(400, "function_call needs functions.", param="function_call")
    if not tools:
        empty = (None, "none", "auto") if tools is not None else (None,)  # agents send both with an empty list
        if choice not in empty:
            raise ApiError(400, "tool_choice needs tools.", code="invalid_value", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise ApiError(
            400, f"{len(tools)} tools; at most {MAX_TOOLS} are taken.", code="array_above_max_length", param=field
        )
    names = [_check_tool(tool, f"{field}[{number}]") for number, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise ApiError(400, "Two tools have the same name.", code="invalid_value", param=field)
    kind, only = _tool_choice(choice, names)
    # a forced call is one call: small models would repeat it as often as they may
    parallel = body.parallel_tool_calls if body.parallel_tool_calls is not None else kind != "required"
    return ToolUse(tuple(tools), kind, only, parallel)


def _check_tool(tool: Mapping[str, Any], where: str) -> str:
    """The name of a tool."""
    if tool.get("type") != "function":
        raise unsupported(f"A tool of type {str(tool.get('type'))[:40]!r}: only functions can be called.", where)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ApiError(400, "function is missing.", code="missing_required_parameter", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(
            400, "A function's name is 1 to 64 letters, digits, _ or -.",
            code="invalid_value", param=f"{where}.function.name",
        )  # fmt: skip
    for key, kinds in (("description", str), ("parameters", Mapping), ("strict", bool)):
        if function.get(key) is not None and not isinstance(function[key], kinds):
            code = _SCHEMA_CODE if key == "parameters" else "invalid_type"
            raise ApiError(400, f"{key} has the wrong type.", code=code, param=f"{where}.function.{key}")
    return name


def _tool_choice(choice: Any, names: list[str]) -> tuple[str, tuple[str, ...]]:
    """(auto | none | required, the names that may be called; () for all)"""
    where = "tool_choice"
    if choice is None or choice == "auto":
        return "auto", ()
    if choice in ("none", "required"):
        return str(choice), ()
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return "required", (_known(choice, names),)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise ApiError(
                400, "allowed_tools has a mode, auto or required, and tools.", code="invalid_value", param=where
            )
        return str(mode), tuple(dict.fromkeys(_known(one, names) for one in listed))
    if isinstance(choice, Mapping):
        raise unsupported(f"A tool_choice of type {str(choice.get('type'))[:40]!r} is not supported.", where)
    raise ApiError(400, "tool_choice is none, auto, required, or names a function.", code="invalid_value", param=where)


def _known(choice: Any, names: list[str]) -> str:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise ApiError(
            400, f"tool_choice names {str(name)[:64]!r}, which is not among the tools.",
            code="invalid_value", param="tool_choice",
        )  # fmt: skip
    return str(name)


def _functions(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise ApiError(400, "functions is a list of objects.", code="invalid_type", param="functions")
    return [{"type": "function", "function": dict(one)} for one in given]


def _function_call(given: Any) -> Any:
    return {"type": "function", "function": dict(given)} if isinstance(given, Mapping) else given
