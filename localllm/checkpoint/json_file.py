"""Reads small untrusted JSON files: limits bytes and values before parsing, then depth; rejects NaN."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from .mapped_file import bad, read_small, shown

MAX_CONFIG_BYTES = 4 << 20
MAX_DEPTH = 64


def read_json_object(
    path: Path,
    max_bytes: int = MAX_CONFIG_BYTES,
    max_values: int = 1 << 19,
    unique: bool = False,
    infinite: bool = False,
) -> dict[str, Any]:
    """Read the JSON object in `path` with `parse_json_object`. Also raises ModelNotFound."""
    value = parse_json_object(path, read_small(path, max_bytes), max_values, unique, infinite=infinite)
    if _depth(value) > MAX_DEPTH:
        raise bad(path, f"is nested deeper than {MAX_DEPTH} levels")
    return value


def parse_json_object(
    path: Path, data: bytes, max_values: int, unique: bool = False, offset: int | None = None, infinite: bool = False
) -> dict[str, Any]:
    """Parse the JSON object in `data`. Raises BadModelFile; uses at most about 100 bytes of memory per value.

    unique   reject duplicate names; otherwise the last one counts, as in other JSON parsers
    offset   start of the data in the file, if it is not at the start
    infinite accept Infinity, which is not JSON but appears in configurations as "no limit"
    """
    # every value but the first follows one of these bytes: an upper bound, before any object is created
    bound = sum(map(data.count, (b",", b":", b"[", b"{")))
    if bound > max_values:
        raise bad(path, f"holds up to {bound:,} JSON values; the limit is {max_values:,}", offset=offset)
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            parse_constant=_infinity if infinite else _no_constant,
            parse_float=_finite,
            object_pairs_hook=_unique_names if unique else None,
        )
    except UnicodeDecodeError as error:
        raise bad(path, "is not UTF-8 text", offset=(offset or 0) + error.start) from error
    except json.JSONDecodeError as error:
        raise bad(path, f"is not valid JSON: {error.msg}", offset=(offset or 0) + error.pos) from error
    except ValueError as error:
        raise bad(path, f"is not valid: {error}", offset=offset) from error
    except RecursionError as error:
        raise bad(path, f"is nested deeper than {MAX_DEPTH} levels", offset=offset) from error
    if not isinstance(value, dict):
        raise bad(path, f"holds a JSON {type(value).__name__}, expected an object", offset=offset)
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _infinity(text: str) -> float:
    return math.inf if text == "Infinity" else _no_constant(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text, 40)} is out of range")
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name '{shown(name)}' appears twice")
    return values


def _depth(value: Any) -> int:
    """Nesting depth, without recursion; stops once past the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        inner = chain.from_iterable(item.values() if isinstance(item, dict) else item for item in level)
        level = [item for item in inner if isinstance(item, dict | list)]
    return depth
