"""Reads small JSON files that may be hostile: bounded in bytes and values before parsing, then in depth; no NaN."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from .mapped_file import bad, read_small, shown

MAX_CONFIG_BYTES = 4 << 20
MAX_DEPTH = 64


def read_json_object(
    path: Path, max_bytes: int = MAX_CONFIG_BYTES, max_values: int = 1 << 19, unique: bool = False
) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelNotFound or BadModelFile; at most about 100 bytes of memory per value.

    unique   refuse an object with one name twice; otherwise the last one counts, as with every JSON reader
    """
    data = read_small(path, max_bytes)
    # Every value but the first follows one of these bytes: an upper bound, before any object is made.
    bound = data.count(b",") + data.count(b":") + data.count(b"[") + data.count(b"{")
    if bound > max_values:
        raise bad(path, f"holds up to {bound:,} JSON values, the limit is {max_values:,}")
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_unique_names if unique else None,
        )
    except UnicodeDecodeError as error:
        raise bad(path, "is not UTF-8 text", offset=error.start) from error
    except json.JSONDecodeError as error:
        raise bad(path, f"is not valid JSON: {error.msg}", offset=error.pos) from error
    except (_BadValue, ValueError) as error:
        raise bad(path, f"is not valid: {error}") from error
    except RecursionError as error:
        raise bad(path, f"is nested deeper than {MAX_DEPTH} levels") from error
    if not isinstance(value, dict):
        raise bad(path, f"holds a JSON {type(value).__name__}, an object is expected")
    if _depth(value) > MAX_DEPTH:
        raise bad(path, f"is nested deeper than {MAX_DEPTH} levels")
    return value


class _BadValue(Exception):
    pass


def _no_constant(text: str) -> Any:
    raise _BadValue(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _BadValue(f"the number {shown(text, 40)} is out of range")
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _BadValue(f"the name '{shown(name)}' appears twice")
        seen.add(name)
    return values


def _depth(value: Any) -> int:
    """Levels of nesting, without recursion; stops once past the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(v for v in item.values() if isinstance(v, dict | list))
            elif isinstance(item, list):
                inner.extend(v for v in item if isinstance(v, dict | list))
        level = inner
    return depth
