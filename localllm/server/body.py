"""Request bodies as validated models: bad JSON, wrong types and missing fields become 400s that name the field."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from .errors import ApiError, invalid, is_ollama

Body = TypeVar("Body", bound=BaseModel)

INLINE_BYTES = 64 << 10  # larger bodies are parsed in a thread
MAX_DEPTH = 128
MAX_KEYS = 400_000  # in all objects together; also the limit of lists and objects
# in all lists and objects together, enough for the token ids of seven windows of 131,072; also the limit of strings
MAX_VALUES = 1_000_000
SLICE_BYTES = 256 << 10  # bytes scanned before other threads get the GIL

CODES = {
    "missing": "missing_required_parameter",
    "greater_than_equal": "integer_below_min_value",
    "too_long": "array_above_max_length",
    "string_too_long": "string_above_max_length",
    "literal_error": "invalid_value",
}
MAX_SHOWN = 40  # longer wrong values are not repeated in the error
# messages per error type; other types keep pydantic's message
SAYINGS = {
    "missing": "is missing",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be finite",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} items",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
}


async def read_body(request: Request, model: type[Body]) -> Body:
    """Parse and validate a body. Raises ApiError 400, 413 or 415."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (is_ollama(request.scope["path"]) and not _is_browser(request)):
        raise ApiError(
            415, "The body must be JSON with the header content-type: application/json.", code="unsupported_media_type"
        )
    data = await request.body()
    if len(data) <= INLINE_BYTES:
        return checked(parse_json(data), model)
    return await asyncio.to_thread(lambda: checked(parse_json(data), model))


def _is_browser(request: Request) -> bool:
    """Whether a web page may have sent this. Without a preflight, a foreign page can send any type except JSON."""
    return "origin" in request.headers or "sec-fetch-site" in request.headers


def checked(value: Any, model: type[Body]) -> Body:
    """Validate parsed JSON. Raises ApiError 400."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # a union reports one error per member: prefer one that got past the type check
        first = min(found, key=_is_of_type)
        if _is_of_type(first) and isinstance(first["input"], list):  # the member for lists says which item is wrong
            field = first["loc"][:-1]
            first = next((one for one in found if one["loc"][: len(field)] == field and one is not first), first)
        path = dotted(first["loc"])
        code = CODES.get(first["type"], "invalid_type" if first["type"].endswith("_type") else "invalid_value")
        others = [one for one in found if _is_of_type(first) and _is_of_type(one) and dotted(one["loc"]) == path]
        raise invalid(f"{path or 'body'}: {_description(first, others)}.", path or None, code) from None


def _is_of_type(error: ErrorDetails) -> bool:
    return error["type"].endswith("_type")


def _description(error: ErrorDetails, others: Sequence[ErrorDetails]) -> str:
    """Describe what is wrong with a field, with the value if it is short.

    others   the errors about its type: one per member of a union
    """
    kind, given = error["type"], error["input"]
    said = _said(error)
    said += "".join(
        f" or {more.removeprefix('must be ')}" for more in dict.fromkeys(map(_said, others)) if more != said
    )
    is_plain = given is None or isinstance(given, str | float | int)
    if kind == "missing" or not is_plain or len(str(given)) > MAX_SHOWN:
        return said
    return f"{said}, not {json.dumps(given, ensure_ascii=False)}"


def _said(error: ErrorDetails) -> str:
    kind, member = error["type"], error["loc"][-1:]
    if kind == "list_type" and member == ("list[str]",):
        return "must be a list of strings"
    return SAYINGS[kind].format_map(error.get("ctx", {})) if kind in SAYINGS else error["msg"]


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a strict JSON object: UTF-8 without BOM, no NaN, no duplicate keys, bounded depth, no lone surrogates.

    Raises ApiError 400.
    """
    _check_counts(data)
    try:
        value = json.loads(
            data.decode(), parse_constant=_finite, parse_float=_finite, object_pairs_hook=_without_duplicates
        )
    except (ValueError, RecursionError) as error:
        detail = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ApiError(400, f"The body is not valid JSON: {detail}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_type")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise ApiError(400, f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    if b"\\u" in data and not _is_encodable(value):
        raise ApiError(400, "The body contains a lone surrogate, which is not valid text.", code="invalid_value")
    return value


def _check_counts(data: bytes) -> None:
    """Reject, before parsing, a body that would block the interpreter or fill memory. Raises ApiError."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") <= MAX_KEYS:  # also counts in strings; enough for most
        return
    counts = structure_counts(data)
    for kind, most in (("strings", MAX_VALUES), ("values", MAX_VALUES), ("keys", MAX_KEYS), ("lists", MAX_KEYS)):
        if counts[kind] > most:
            name = "lists and objects" if kind == "lists" else kind
            raise ApiError(400, f"The body has more than {most} {name}.", code="invalid_json")


def structure_counts(data: bytes) -> dict[str, int]:
    """Count the strings of JSON text, and outside them commas ("values"), colons ("keys"), brackets and braces."""
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")  # every remaining quote begins or ends a string
    counts = {"strings": plain.count(b'"') // 2, "values": 0, "keys": 0, "lists": 0}
    if counts["strings"] > MAX_VALUES:
        return counts
    inside = 0
    for start in range(0, len(plain), SLICE_BYTES):
        parts = plain[start : start + SLICE_BYTES].split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1
        counts["values"] += outside.count(b",")
        counts["keys"] += outside.count(b":")
        counts["lists"] += outside.count(b"[") + outside.count(b"{")
    return counts


def _without_duplicates(items: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(items)
    if len(made) < len(items):
        raise ValueError("an object has a duplicate key")
    return made


def _finite(text: str) -> float:
    """Parse a number; raises ValueError for NaN and for literals that overflow to infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _is_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than MAX_DEPTH levels deep. Works level by level, without recursion."""
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


def _is_encodable(value: Any) -> bool:
    """Whether every string can be encoded as UTF-8; a lone surrogate cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def dotted(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> messages[0].content, without the tags that pydantic adds for unions."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not part[0].isupper() and part not in ("str", "int", "list", "bool", "dict"):
            path += f".{part}" if path else part
    return path
