"""A JSON schema as llguidance is given it: what it knows less well, or would get wrong, is said in another way."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

FORMATS = frozenset(
    ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)  # that are enforced; any other is an annotation, as JSON Schema has it
NARROWED = 2.0**-40  # beside an excluded bound, of a range or of 1: so much less is allowed
ROUND = 1000  # beyond, llguidance rounds the sum of a bound and so little
LARGEST = 2**63  # llguidance writes bounds up to here
_BOUNDS = ("exclusiveMinimum", "minimum", "exclusiveMaximum", "maximum")
_COMBINING = frozenset(
    ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$recursiveRef")
)
_SAYS_MORE = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))
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
    """What may be left out of a schema."""

    NOTHING = 0
    KEYWORDS = 1  # those that llguidance does not know
    VALUES = 2  # and what it knows but cannot do with these values: patterns of properties that overlap, ...


class Unenforceable(Exception):
    """A schema that answers could satisfy to the letter and not when they are read."""


def adapted(schema: Mapping[str, Any], leaves_out: LeavesOut) -> dict[str, Any]:
    """A copy that allows what the schema does, or less.

    Objects that say nothing of further properties get none: models hold to what is declared, and end. What is closed
    still validates: a closed schema allows less. Where schemas are combined a closed part could contradict the others,
    so a schema that combines anywhere is left open. So are the branches of `oneOf`, and definitions, which may be such
    branches: closed ones look disjoint that are not. Raises Unenforceable.
    """
    closes = not any(map(_combines, _parts(schema)))
    may_be_both = leaves_out is LeavesOut.NOTHING and any("oneOf" in part for part in _parts(schema))
    made = _adapted(schema, leaves_out, closes, may_be_both)
    assert isinstance(made, dict)
    return made


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every object inside, values of constants included."""
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
        _leave_out(made)
    _narrow(made)
    needed = made.get("required")
    names = needed if isinstance(needed, list) else []
    declared = made.get("properties")
    if closes and isinstance(declared, Mapping) and _SAYS_MORE.isdisjoint(made) and all(n in declared for n in names):
        made["additionalProperties"] = False
    _check_count(made, len(names), leaves_out)
    return made


def _leave_out(made: dict[str, Any]) -> None:
    """Keywords whose values llguidance may have refused; properties of any name then have one of their types."""
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
    """Without whole numbers as excluded bounds: llguidance lets 0 through where a number is above 0 and at most 0.5."""
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
    """Keys that are not declared can come twice: a grammar cannot count different ones."""
    least = made.get("minProperties")
    has_free = made.get("additionalProperties") is not False or bool(made.get("patternProperties"))
    if not isinstance(least, int) or not has_free or least <= needed + 1:
        return
    if leaves_out is LeavesOut.NOTHING:
        raise Unenforceable(f"minProperties {least}: names that are not in `required` could repeat")
    made["minProperties"] = needed + 1
