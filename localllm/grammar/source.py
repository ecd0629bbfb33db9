"""Turns a `Constraint` into a `Source`: the grammar's kind and text, with type and size checked before compiling."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import InvalidConstraint
from localllm.request import Constraint

from . import limits
from .schema import LeavesOut, Unenforceable, adapted

# the format of Python's json.dumps and of `tojson` in chat templates: an answer keeps its tokens when it returns in a
# later prompt, and most of it is forced, so it costs no forward pass
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# one line end with indentation, or one space: allows pretty-printed JSON but no endless white space
_FREE = {"whitespace_pattern": r"(\n {0,16}| )"}
# lenient -> what to leave out, in the order tried
LEAVES_OUT = {False: (LeavesOut.NOTHING,), True: (LeavesOut.KEYWORDS, LeavesOut.VALUES)}


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar as text. `kind` is json_schema, regex, grammar (Lark or GBNF from a user) or lark (our own)."""

    kind: str
    text: str
    options: tuple[tuple[str, Any], ...] = ()  # options of llguidance's JSON compiler, for json_schema
    # for lark: the text with control tokens by id, which only the model's own vocabulary has
    run_text: str | None = None
    param: str = "response_format"
    looser: Source | None = None  # compiled instead if this source cannot be

    @property
    def key(self) -> bytes:
        parts = (self.kind, self.text, self.options, self.run_text)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).digest()


def source_of(constraint: Constraint) -> Source:
    """Make the source of a constraint. Raises InvalidConstraint for values of the wrong type or over the `limits`."""
    value, param = constraint.value, constraint.param
    if constraint.kind == "json_schema":
        options = tuple({**_COMPACT, "lenient": constraint.lenient}.items())
        texts = [schema_text(value, param, leaves_out) for leaves_out in LEAVES_OUT[constraint.lenient]]
        looser = Source("json_schema", texts[-1], options, param=param) if len(texts) > 1 else None
        return Source("json_schema", texts[0], options, param=param, looser=looser)
    if constraint.kind == "json_object":
        return Source("json_schema", '{"type": "object"}', tuple(_FREE.items()), param=param)
    if constraint.kind == "regex":
        return Source("regex", _pattern(value, param), param=param)
    if constraint.kind == "grammar":
        return Source("grammar", _text(value, "grammar", limits.MAX_GRAMMAR_CHARS, param), param=param)
    if constraint.kind == "choice":
        return Source("lark", _choice(value, param), param=param)
    raise _rejection(f"the constraint kind {constraint.kind!r:.40} is unknown", param)


def schema_text(schema: Any, param: str, leaves_out: LeavesOut = LeavesOut.NOTHING) -> str:
    """Check the size and depth of a JSON schema and return its `adapted` form as text.

    Removes `x-guidance`, which would set llguidance's options. Raises InvalidConstraint.
    """
    if schema is not True and not isinstance(schema, Mapping):
        raise _rejection(f"a JSON schema must be an object; this one is {_kind(schema)}", param)
    _check_nesting(schema, param)
    try:
        made = {} if schema is True else adapted(schema, leaves_out)
        text = json.dumps({key: value for key, value in made.items() if key != "x-guidance"})
    except Unenforceable as error:
        raise _rejection(f"the JSON schema cannot be enforced: {error}", param) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise _rejection("the JSON schema is not plain JSON", param) from error
    if len(text) > limits.MAX_SCHEMA_BYTES:
        raise _rejection(f"the JSON schema has {len(text):,} bytes; the limit is {limits.MAX_SCHEMA_BYTES:,}", param)
    return text


def inline_schema(schema: Any, leaves_out: LeavesOut, param: str) -> str:
    """Return a JSON schema for use inside a Lark rule. Raises InvalidConstraint."""
    made = json.loads(schema_text(schema, param, leaves_out))
    return "%json " + json.dumps({**made, "x-guidance": {**_COMPACT, "lenient": leaves_out > LeavesOut.NOTHING}})


def _check_nesting(schema: Any, param: str) -> None:
    """Check nesting depth and patterns, without recursion."""
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > limits.MAX_SCHEMA_DEPTH:
            raise _rejection(f"the JSON schema is nested deeper than {limits.MAX_SCHEMA_DEPTH} levels", param)
        if isinstance(value, Mapping):
            if isinstance(value.get("pattern"), str):
                _pattern(value["pattern"], param)
            value = value.values()
        elif not isinstance(value, list | tuple):
            continue
        waiting += [(item, depth + 1) for item in value if isinstance(item, Mapping | list | tuple)]


def _pattern(value: Any, param: str) -> str:
    return _text(value, "regular expression", limits.MAX_PATTERN_CHARS, param)


def _choice(value: Any, param: str) -> str:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one for one in value):
        raise _rejection("choice is not a list of non-empty strings", param)
    if not 1 <= len(value) <= limits.MAX_CHOICES:
        raise _rejection(f"choice has {len(value):,} strings; 1 to {limits.MAX_CHOICES:,} are allowed", param)
    _text("".join(value), "choice", limits.MAX_CHOICE_CHARS, param)
    return "start: " + " | ".join(quoted(one) for one in dict.fromkeys(value)) + "\n"


def quoted(text: str) -> str:
    """A text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(value: Any, what: str, most: int, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise _rejection(f"the {what} is not a string or is empty", param)
    if len(value) > most:
        raise _rejection(f"the {what} has {len(value):,} characters; the limit is {most:,}", param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _rejection(f"the {what} is not valid Unicode", param) from error
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"{str(value).lower()}" if isinstance(value, bool) else type(value).__name__


def _rejection(message: str, param: str) -> InvalidConstraint:
    return InvalidConstraint(message, "send a smaller or simpler constraint", param=param)
