"""Adapts a JSON schema for llguidance: rewrites or leaves out what llguidance does not support or gets wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

FORMATS = frozenset(
    ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)  # enforced formats; any other is only an annotation, as JSON Schema allows
NARROWED = 2.0**-40  # an excluded bound moves inward by this share of the range, or of 1 if that is less
ROUND = 1000  # above this, llguidance rounds a bound shifted by so little
LARGEST = 2**63  # the largest bound llguidance supports
_BOUNDS = ("exclusiveMinimum", "minimum", "exclusiveMaximum", "maximum")
_COMBINING = frozenset(
    ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$recursiveRef")
)
_OPENING_KEYWORDS = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))
_BESIDE = frozenset(("anyOf", "oneOf", "$ref"))
_DEFINITIONS = frozenset(("$defs", "definitions"))
_BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "dependencies")) | _DEFINITIONS
_LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems", "items"))
_SCHEMAS = frozenset(
    ("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
     "propertyNames", "not", "if", "then", "else")
)  # fmt: skip
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")


class LeavesOut(IntEnum):
    """The parts of a schema that may be left out."""

    NOTHING = 0
    KEYWORDS = 1  # keywords that llguidance does not support
    VALUES = 2  # also keywords whose values it cannot handle: overlapping patternProperties, ...


class Unenforceable(Exception):
    """A schema whose grammar would allow answers that violate the schema once parsed."""


def adapted(schema: Mapping[str, Any], leaves_out: LeavesOut) -> dict[str, Any]:
    """Return a copy that allows the same values as the schema, or fewer.

    Objects that do not mention additional properties are closed, which makes models keep to the declared ones and
    stop; the result still validates, because a closed schema allows less. In combined schemas a closed part could
    contradict the others, so a schema that combines anywhere stays open. So do the branches of `oneOf`, and the
    definitions, which may be such branches: closing them makes overlapping branches look disjoint.
    Raises Unenforceable.
    """
    closes = not any(map(_combines, _parts(schema)))
    may_be_both = leaves_out is LeavesOut.NOTHING and any("oneOf" in part for part in _parts(schema))
    made = _adapted(schema, leaves_out, closes, may_be_both)
    assert isinstance(made, dict)
    return made


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object in a schema, including those in constant values."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield value
            value = list(value.values())
        if isinstance(value, list | tuple):
            waiting += value


def _combines(part: Mapping[str, Any]) -> bool:
    return not _COMBINING.isdisjoint(part) or ("properties" in part and not _BESIDE.isdisjoint(part))


def _adapted(schema: Any, leaves_out: LeavesOut, closes: bool, may_be_both: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        inside = closes and not (may_be_both and (key == "oneOf" or key in _DEFINITIONS))
        if key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: _adapted(part, leaves_out, inside, may_be_both) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list | tuple):
            made[key] = [_adapted(part, leaves_out, inside, may_be_both) for part in value]
        else:
            made[key] = _adapted(value, leaves_out, inside, may_be_both) if key in _SCHEMAS else value
    if made.get("format") not in FORMATS:
        made.pop("format", None)
    if leaves_out is LeavesOut.VALUES:
        _drop_unsupported(made)
    _narrow(made)
    needed = made.get("required")
    names = needed if isinstance(needed, list) else []
    declared = made.get("properties")
    if (
        closes
        and isinstance(declared, Mapping)
        and _OPENING_KEYWORDS.isdisjoint(made)
        and all(n in declared for n in names)
    ):
        made["additionalProperties"] = False
    _check_count(made, len(names), leaves_out)
    return made


def _drop_unsupported(made: dict[str, Any]) -> None:
    """Remove keywords whose values llguidance may reject; patternProperties are merged into additionalProperties."""
    for key in ("multipleOf", "minProperties", "maxProperties"):
        made.pop(key, None)
    for key in _BOUNDS:
        if isinstance(made.get(key), int | float) and abs(made[key]) >= LARGEST:
            del made[key]
    if isinstance(made.get("pattern"), str) and _LOOKS_AROUND.search(made["pattern"]):
        del made["pattern"]
    patterns = made.get("patternProperties")
    if isinstance(patterns, Mapping) and len(patterns) > 1:
        del made["patternProperties"]
        if "additionalProperties" in made:
            made["additionalProperties"] = {"anyOf": [*patterns.values(), made["additionalProperties"]]}


def _narrow(made: dict[str, Any]) -> None:
    """Replace whole excluded bounds by inclusive ones: llguidance would allow 0 for a number above 0 and up to 0.5."""
    bounds = [made.get(name) for name in _BOUNDS]
    if made.get("type") == "integer" or any(
        value is not None and (type(value) not in (int, float) or abs(value) > ROUND) for value in bounds
    ):
        return
    low = max((value for value in bounds[:2] if value is not None), default=-math.inf)
    high = min((value for value in bounds[2:] if value is not None), default=math.inf)
    step = min(1.0, high - low) * NARROWED
    if bounds[0] is not None and bounds[0] == low and float(low).is_integer() and step > 0:
        made["minimum"] = math.nextafter(low + step, math.inf)
        del made["exclusiveMinimum"]
    if bounds[2] is not None and bounds[2] == high and float(high).is_integer() and step > 0:
        made["maximum"] = math.nextafter(high - step, -math.inf)
        del made["exclusiveMaximum"]


def _check_count(made: dict[str, Any], needed: int, leaves_out: LeavesOut) -> None:
    """Check minProperties: undeclared keys can repeat, because a grammar cannot count distinct ones."""
    least = made.get("minProperties")
    has_free = made.get("additionalProperties") is not False or bool(made.get("patternProperties"))
    if not isinstance(least, int) or not has_free or least <= needed + 1:
        return
    if leaves_out is LeavesOut.NOTHING:
        raise Unenforceable(f"minProperties {least}: names that are not in `required` could be repeated")
    made["minProperties"] = needed + 1
