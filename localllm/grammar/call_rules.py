"""Grammars for tool calls, in llguidance's Lark dialect: a model constrained by one can only write valid calls.

The grammar of a format writes calls exactly as its chat template renders them, in JSON or tags, which keeps the next
prompt in the prefix cache. `Words` spells text, control tokens and JSON schemas for the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.chat.tools.calls import PYTHON_WORDS, fixed_values, is_text, properties_of, resolved, tool_function
from localllm.chat.tools.formats import TYPES, ToolFormat

from .compiler import Words
from .schema import LeavesOut
from .source import quoted

MAX_CALLS = 8  # per answer: small models would continue indefinitely
MAX_NESTING = 8  # of schemas in Gemma's notation; deeper values are unconstrained
MAX_RULES = 500
_SCALARS = ("integer", "number", "boolean", "null")
_SIZES = frozenset(["minItems", "maxItems"])
_PLACEHOLDER = "\0"  # placeholder for what the model chooses: the index of a call, the type of a value


def call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    words: Words,
    *,
    parallel: bool = True,
    after_trigger: bool = False,
    leaves_out: Sequence[LeavesOut] = (),
    opening: str = "",
) -> str:
    """Return the grammar of an answer that is one or more calls of these tools.

    parallel       allow up to MAX_CALLS calls, else one
    after_trigger  start after the format's trigger, and end with the call or section of calls that it opens
    leaves_out     what to leave out of each tool's schema
    opening        the part of the format's `open` that already ends the prompt
    """
    rules = []
    for number, tool in enumerate(tools):
        one = _CallRules(tool_format, words, leaves_out[number] if leaves_out else LeavesOut.NOTHING, f"c{number}")
        rules += [f"call_{number}: {one.call(tool_function(tool))}", *one.rules]
    rules.append("any: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    opens = tool_format.open.removeprefix(opening)
    if after_trigger:
        opens = tool_format.open.split(tool_format.trigger, 1)[1]
    more = MAX_CALLS - 1 if parallel and not tool_format.one_call else 0
    begin, end, sep = map(words.literal, (opens, tool_format.close, tool_format.separator))
    if tool_format.spaced:
        begin += f' " "? {words.literal(tool_format.spaced)}'
    again = f"({sep} any){{0,{more}}}" if more else ""
    if tool_format.shares:
        start = f"{begin} any {again} {end}"
    elif after_trigger:
        start = f"{begin} any {end}"
    else:
        rules.append(f"one: {words.literal(tool_format.open) if opening else begin} any {end}")
        start = f"{begin} any {end} ({sep} one){{0,{more}}}" if more else f"{begin} any {end}"
    if tool_format.thought and not after_trigger and words.first_control(tool_format.thought[1]) == ("", True):
        begin, end = map(words.literal, tool_format.thought)
        rules += [f"thought: {begin} TEXT", "TEXT: /(?s:.*)/"]
        start = f"(thought {end})? {start}"
    return "\n".join([f"start: {start}", *rules]) + "\n"


class _CallRules:
    """Builds the rules for calls of one tool; collects them in `rules`."""

    def __init__(self, tool_format: ToolFormat, words: Words, leaves_out: LeavesOut, prefix: str) -> None:
        self._format = tool_format
        self._words = words
        self._leaves_out = leaves_out
        self._prefix = prefix
        self._root: Mapping[str, Any] = {}
        self._any = ""
        self.rules: list[str] = []

    def call(self, function: Mapping[str, Any]) -> str:
        """The rule body of one call, from its name to the end of its arguments."""
        self._root = parameters_of(function)
        before, after = self._format.around_call(str(function["name"]), _PLACEHOLDER)
        if self._format.is_python:
            body = self._python()
        elif self._format.nested:
            body = self._tree_parts(self._root, 0)
        elif self._format.argument:
            body = self._tagged()
        elif self._format.quote:
            body = self._object(self._root, 0)
        else:
            body = self._json(self._root)
        return f"{self._open_literal(before, '/[0-9]{1,3}/')} {body} {self._words.literal(after)}"

    def _open_literal(self, text: str, rule: str) -> str:
        """A literal with `rule` in place of the placeholder."""
        return f" {rule} ".join(map(self._words.literal, text.split(_PLACEHOLDER)))

    def _rule(self, body: str, options: str = "") -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._rule(self._words.schema(schema, self._leaves_out))

    def _text_before(self, after: str, schema: Mapping[str, Any]) -> str:
        """Any text within the schema's length limits, up to and including the first `after`."""
        low, high = _lengths(schema)
        pattern = "(?s:.*)" if low is None and high is None else f"(?s:.{{{low or 0},{'' if high is None else high}}})"
        return self._pattern_before(pattern, after)

    def _pattern_before(self, pattern: str, after: str) -> str:
        """Text that matches a pattern, up to and including the first `after`."""
        begin, control = self._words.first_control(after)
        ending = re.sub(r"[.^$*+?()\[\]{}|\\/]", r"\\\g<0>", begin).replace("\n", r"\n")
        if control:  # text never contains a control token
            return f"/{pattern}{ending}/ {self._words.literal(after[len(begin) :])}"
        return self._rule(f"/{pattern}{ending}/", "[lazy]")

    # --- arguments between tags --------------------------------------------------------------------------------------

    def _tagged(self) -> str:
        required = self._root.get("required")
        parts = []
        for key, schema in properties_of(self._root).items():
            before, after = self._format.around_value(key, self._kind(schema))
            if not is_text(schema):
                value = f"{self._json(self._standalone(schema))} {self._words.literal(after)}"
            elif values := fixed_values(schema):
                value = f"({' | '.join(quoted(str(value)) for value in values)}) {self._words.literal(after)}"
            else:
                value = self._wrapped(after, schema) if self._format.wraps else self._text_before(after, schema)
            types = f"({' | '.join(map(quoted, TYPES))})"
            rule = self._rule(f"{self._open_literal(before, types)} {value}")
            parts.append(rule if isinstance(required, list) and key in required else f"{rule}?")
        return " ".join(parts)

    def _kind(self, schema: Any) -> str:
        """The type of an argument's value, or the placeholder if the schema leaves it open."""
        kind = resolved(schema, self._root).get("type")
        return "string" if is_text(schema) else str(kind) if kind in (*TYPES, "integer") else _PLACEHOLDER

    def _wrapped(self, after: str, schema: Mapping[str, Any]) -> str:
        """A text between the format's marks, or one that does not start with the opening mark's first character."""
        low, high = _lengths(schema)
        first = self._format.wraps[0][0]
        rest = f"(?s:.{{{max((low or 0) - 1, 0)},{'' if high is None else max(high - 1, 0)}}})"
        bare = f"[^{first}]{rest}" if low else f"([^{first}]{rest})?"
        begin, end = self._format.wraps
        marked = f"{self._words.literal(begin)} {self._text_before(end + after, schema)}"
        return f"({marked} | {self._pattern_before(bare, after)})"

    def _standalone(self, schema: Any) -> Mapping[str, Any]:
        """A part of the schema as a standalone schema, with the definitions that it may reference."""
        part: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {}
        return {name: self._root[name] for name in ("$defs", "definitions") if name in self._root} | part

    # --- Python's `key=value, ...` -----------------------------------------------------------------------------------

    def _python(self) -> str:
        values = {
            str(key): f"{self._words.literal(key + '=')} {self._python_value(schema)}"
            for key, schema in properties_of(self._root).items()
        }
        return self._members(values, self._root, ", ")

    def _python_value(self, schema: Any) -> str:
        if is_text(schema) and (values := fixed_values(schema)):
            return "(" + " | ".join(quoted(form) for one in values for form in (json.dumps(one), repr(one))) + ")"
        if is_text(schema) and not {"pattern", "format"} & set(schema):
            low, high = _lengths(schema)
            size = f"{{{low or 0},{'' if high is None else high}}}"
            char = r"""([^'\\\x00-\x1f]|\\['"\\nt])"""
            return f"({self._json(self._standalone(schema))} | /'{char}{size}'/)"
        kind = resolved(schema, self._root).get("type")
        words = {"boolean": ("True", "False"), "null": ("None",)}.get(kind if isinstance(kind, str) else "", ())
        if words and not fixed_values(schema):
            return "(" + " | ".join(quoted(form) for word in words for form in (word, PYTHON_WORDS[word])) + ")"
        return self._json(self._standalone(schema))

    # --- nested tags -------------------------------------------------------------------------------------------------

    def _tree_parts(self, schema: Mapping[str, Any], depth: int) -> str:
        required = schema.get("required")
        parts = []
        for key, part in properties_of(schema).items():
            rule = self._rule(self._tree(str(key), part, depth))
            parts.append(rule if isinstance(required, list) and key in required else f"{rule}?")
        return " ".join(parts)

    def _tree(self, key: str, schema: Any, depth: int) -> str:
        """The rule body of a value between its tags."""
        before, after = self._format.tags(key)
        schema = resolved(schema, self._root)
        kind = schema.get("type") if depth < MAX_NESTING and len(self.rules) < MAX_RULES else ""
        end = self._words.literal(after)
        if is_text(schema):
            values = fixed_values(schema)
            fixed = f"({' | '.join(quoted(str(value)) for value in values or ())}) {end}"
            value = fixed if values else self._text_before(after, schema)
        elif kind == "object" and properties_of(schema):
            value = f"{self._tree_parts(schema, depth + 1)} {end}"
        elif kind == "array" and isinstance(schema.get("items"), Mapping) and _SIZES.isdisjoint(schema):
            value = f"{self._rule(self._tree('item', schema['items'], depth + 1))}* {end}"
        else:
            value = f"{self._json(self._standalone(schema))} {end}"
        return f"{self._words.literal(before)} {value}"

    # --- Gemma's `{key:value,...}`: keys bare and sorted, strings quoted ---------------------------------------------

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return '"{" "}"' if depth == 0 and schema.get("additionalProperties") is False else self._anything("object")
        # templates write the keys sorted, ignoring case
        keys = sorted(map(str, properties), key=lambda key: (key.lower(), key))
        values = {key: f"{self._words.literal(key + ':')} {self._value(properties[key], depth + 1)}" for key in keys}
        return f'"{{" {self._members(values, schema, ",")} "}}"'

    def _members(self, values: dict[str, str], schema: Mapping[str, Any], separator: str) -> str:
        """Rules for the members in order, with those that are not required optional."""
        required = schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        first, more = '""', '""'
        for key in reversed(values):
            value = self._rule(values[key])
            with_it, after_one = f"{value} {more}", f"{quoted(separator)} {value} {more}"
            if key not in needed:
                with_it, after_one = f"({with_it} | {first})", f"({after_one} | {more})"
            first, more = self._rule(with_it), self._rule(after_one)
        return first

    def _value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > MAX_NESTING or len(self.rules) > MAX_RULES:
            return self._anything("value")
        schema = resolved(schema, self._root)
        for name in ("anyOf", "oneOf"):
            branches = schema.get(name)
            if isinstance(branches, list) and branches:
                return "(" + " | ".join(self._value(branch, depth + 1) for branch in branches) + ")"
        values = fixed_values(schema)
        if isinstance(values, list):
            return "(" + " | ".join(self._constant(value) for value in values) + ")"
        kind = schema.get("type")
        if isinstance(kind, Sequence) and not isinstance(kind, str):
            return "(" + " | ".join(self._value({**schema, "type": one}, depth + 1) for one in kind) + ")"
        if kind == "string":
            return self._string(schema)
        if kind in _SCALARS:
            return self._json(schema)
        if kind == "array":
            item = self._rule(self._value(schema.get("items"), depth + 1))
            rest = f'({item} ("," {item})*)'
            return f'"[" {rest}{"" if schema.get("minItems") else "?"} "]"'
        return self._object(schema, depth) if kind == "object" else self._anything("value")

    def _string(self, schema: Mapping[str, Any]) -> str:
        return f"{self._words.literal(self._format.quote)} {self._text_before(self._format.quote, schema)}"

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._words.literal(f"{self._format.quote}{value}{self._format.quote}")
        return self._words.schema({"const": value})

    def _anything(self, kind: str) -> str:
        """A value of any type."""
        if not self._any:
            self._any = f"{self._prefix}_any"
            string = self._string({})
            scalar = self._rule(self._words.schema({"type": list(_SCALARS)}))
            key = self._rule("/[A-Za-z_][A-Za-z0-9_-]*/")
            value = f"{self._any}_value"
            self.rules += [
                f"{value}: {string} | {scalar} | {self._any}_list | {self._any}_object",
                f'{self._any}_list: "[" ({value} ("," {value})*)? "]"',
                f'{self._any}_object: "{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"',
            ]
        return f"{self._any}_{kind}"


def _lengths(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    low, high = (schema.get(name) for name in ("minLength", "maxLength"))
    return low if isinstance(low, int) else None, high if isinstance(high, int) else None


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments; a function without a schema takes no arguments."""
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return parameters
