"""Grammars of arguments between braces, Gemma's way: `{key:value,...}`, keys bare and sorted, strings quoted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.chat.tools.calls import fixed_values

from .spelling import Spelling, text_before, text_pattern

MAX_NESTING = 8  # of schemas; deeper values may be anything
MAX_RULES = 500
_SCALARS = ("integer", "number", "boolean", "null")


class BracedValues:
    """The rules of one tool's arguments; `rules` fills as values are written."""

    def __init__(self, quote: str, spelling: Spelling, lenient: bool, prefix: str) -> None:
        self._quote = quote
        self._spelling = spelling
        self._lenient = lenient
        self._prefix = prefix
        self._root: Mapping[str, Any] = {}
        self.rules: list[str] = []
        self._any = ""

    def arguments(self, parameters: Mapping[str, Any]) -> str:
        """The braces and what is in them."""
        self._root = parameters
        return self._object(parameters, 0)

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return '"{" "}"' if depth == 0 and schema.get("additionalProperties") is False else self._anything("object")
        required = schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        # templates write the keys sorted, whatever their case
        keys = sorted(map(str, properties), key=lambda key: (key.lower(), key))
        first, more = '""', '""'
        for key in reversed(keys):
            value = self._rule(f"{self._spelling.literal(key + ':')} {self._value(properties[key], depth + 1)}")
            with_it, after_one = f"{value} {more}", f'"," {value} {more}'
            if key not in needed:
                with_it, after_one = f"({with_it} | {first})", f"({after_one} | {more})"
            first, more = self._rule(with_it), self._rule(after_one)
        return f'"{{" {first} "}}"'

    def _value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > MAX_NESTING or len(self.rules) > MAX_RULES:
            return self._anything("value")
        schema = self._resolved(schema)
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
            return self._rule(self._spelling.schema(schema, self._lenient))
        if kind == "array":
            item = self._rule(self._value(schema.get("items"), depth + 1))
            rest = f'({item} ("," {item})*)'
            return f'"[" {rest}{"" if schema.get("minItems") else "?"} "]"'
        return self._object(schema, depth) if kind == "object" else self._anything("value")

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a reference inside the same schema leads to; a few steps at most."""
        for _ in range(4):
            path = schema.get("$ref")
            if not isinstance(path, str):
                return schema
            found: Any = self._root
            for name in path.removeprefix("#/").split("/"):
                found = found.get(name) if isinstance(found, Mapping) else None
            if not isinstance(found, Mapping):
                return {}
            schema = found
        return {}

    def _string(self, schema: Mapping[str, Any]) -> str:
        return f"{self._spelling.literal(self._quote)} " + text_before(
            self._quote, text_pattern(schema), self._spelling, self._rule
        )

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._spelling.literal(f"{self._quote}{value}{self._quote}")
        return self._spelling.schema({"const": value}, False)

    def _anything(self, kind: str) -> str:
        """A value of any shape."""
        if not self._any:
            self._any = f"{self._prefix}_any"
            string = self._string({})
            scalar = self._rule(self._spelling.schema({"type": list(_SCALARS)}, False))
            key = self._rule("/[A-Za-z_][A-Za-z0-9_-]*/")
            value = f"{self._any}_value"
            self.rules += [
                f"{value}: {string} | {scalar} | {self._any}_list | {self._any}_object",
                f'{self._any}_list: "[" ({value} ("," {value})*)? "]"',
                f'{self._any}_object: "{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"',
            ]
        return f"{self._any}_{kind}"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"{self._prefix}_b{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name
