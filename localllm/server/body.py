"""A request's body as a checked model: bad JSON, wrong types and missing fields become 400s that name the field."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from .errors import ApiError

Body = TypeVar("Body", bound=BaseModel)

INLINE_BYTES = 64 << 10
"""larger bodies are parsed in a thread"""
MAX_DEPTH = 128
MAX_KEYS = 400_000
"""of all objects together"""

CODES = {
    "missing": "missing_required_parameter",
    "greater_than_equal": "integer_below_min_value",
    "too_long": "array_above_max_length",
    "string_too_long": "string_above_max_length",
    "literal_error": "invalid_value",
}


async def read_body(request: Request, model: type[Body]) -> Body:
    """Parse and check. Raises ApiError 400, 413 or 415."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, "The body must be JSON with the header content-type: application/json.", code="unsupported_media_type"
        )
    data = await request.body()
    if len(data) <= INLINE_BYTES:
        return parse(data, model)
    return await asyncio.to_thread(parse, data, model)


def parse(data: bytes, model: type[Body]) -> Body:
    """The checked model of JSON text. Raises ApiError 400."""
    return checked(parse_json(data), model)


def checked(value: Any, model: type[Body]) -> Body:
    """The checked model of parsed JSON. Raises ApiError 400."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = dotted(first["loc"])
        code = CODES.get(first["type"], "invalid_type" if first["type"].endswith("_type") else "invalid_value")
        raise ApiError(400, f"{path or 'body'}: {first['msg']}.", code=code, param=path or None) from None


def parse_json(data: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8 without a mark, no NaN, no key twice, bounded depth, no half surrogates; an object.

    Raises ApiError 400.
    """
    keys = 0
    if data.count(b'":') - data.count(b'\\":') > MAX_KEYS:  # before the parser holds the interpreter for a second
        raise ApiError(400, f"The body has more than {MAX_KEYS} keys.", code="invalid_json")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal keys
        keys += len(items)
        if keys > MAX_KEYS:
            raise ValueError(f"more than {MAX_KEYS} keys")
        made = dict(items)
        if len(made) < len(items):
            raise ValueError("a key stands twice in one object")
        return made

    try:
        value = json.loads(data.decode(), parse_constant=_no_constant, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        detail = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ApiError(400, f"The body is not valid JSON: {detail}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_type")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise ApiError(400, f"The body is nested more than {MAX_DEPTH} deep.", code="invalid_json")
    if b"\\u" in data and has_lone_surrogate(value):
        raise ApiError(400, "The body holds a lone surrogate, which is no text.", code="invalid_value")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than MAX_DEPTH deep; level by level, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def has_lone_surrogate(value: Any) -> bool:
    """Whether any string holds half of a surrogate pair, which UTF-8 cannot; iterative, so depth does not matter."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            try:
                item.isascii() or item.encode()
            except UnicodeEncodeError:
                return True
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            stack += item
    return False


def dotted(location: tuple[int | str, ...]) -> str:
    """messages[0].content from ("messages", 0, "content"); the tags pydantic adds for unions are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not part[0].isupper() and part not in ("str", "int", "list", "bool", "dict"):
            path += f".{part}" if path else part
    return path
