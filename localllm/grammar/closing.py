"""Objects of a schema that say nothing of further properties get none: models hold to what is declared, and end.

What is closed still validates: a closed schema allows less. Where schemas are combined a closed part could contradict
the others, so a schema that combines anywhere is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMBINING = frozenset(
    ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$recursiveRef")
)
_SAYS_MORE = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))
_BESIDE = frozenset(("anyOf", "oneOf", "$ref"))
_SCHEMAS_BY_NAME = frozenset(("properties", "$defs", "definitions", "patternProperties"))
_SCHEMA_LISTS = frozenset(("anyOf", "oneOf", "prefixItems"))
_SCHEMAS = frozenset(("items", "additionalProperties", "contains"))


def closed(schema: Any) -> Any:
    """A copy whose objects with declared properties allow no others, unless they say so themselves."""
    return schema if _combines(schema) else _close(schema)


def _combines(schema: Any) -> bool:
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if not _COMBINING.isdisjoint(value) or ("properties" in value and not _BESIDE.isdisjoint(value)):
                return True
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return False


def _close(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            made[key] = {name: _close(part) for name, part in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list | tuple):
            made[key] = [_close(part) for part in value]
        else:
            made[key] = _close(value) if key in _SCHEMAS else value
    if isinstance(made.get("properties"), Mapping) and _SAYS_MORE.isdisjoint(made):
        needed = made.get("required")
        names = needed if isinstance(needed, list) else []
        if all(name in made["properties"] for name in names):
            made["additionalProperties"] = False
    return made
