"""Grammars of tool calls, in Lark as llguidance reads it: a model held to one can only write calls that are valid.

Each format writes calls its own way, JSON or tags, and the way its chat template would write the same call back: so a
conversation that goes on finds its pages in the prefix cache. How text, control tokens and JSON schemas are spelled is
the `Spelling`'s business, which knows the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.chat.tools.calls import fixed_values, is_text, quoted, tool_function
from localllm.chat.tools.formats import HARMONY, Braces, Json, Tags, ToolFormat

from .braces import BracedValues
from .spelling import Spelling, text_before, text_pattern

MAX_CALLS = 8  # in one answer: small models would go on indefinitely


def trigger_of(tool_format: ToolFormat) -> str:
    """The text after which `call_grammar(after_trigger=True)` goes on; "" for a format that has none."""
    if not tool_format.writes.open:
        return ""
    return tool_format.triggers[0] if tool_format.triggers else tool_format.writes.open


def call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    spelling: Spelling,
    *,
    parallel: bool = True,
    after_trigger: bool = False,
    lenient: Sequence[bool] = (),
) -> str:
    """An answer that is one or more calls of these tools.

    parallel       up to MAX_CALLS calls, else one
    after_trigger  the text goes on after `trigger_of`, and ends with the call, or section of calls, begun there
    lenient        for each tool: keywords of its schema that cannot be enforced are left out
    """
    way, is_harmony = tool_format.writes, tool_format is HARMONY
    rules = []
    for number, tool in enumerate(tools):
        writer = _Writer(way.body, spelling, bool(lenient and lenient[number]), f"c{number}")
        body = writer.call(tool_function(tool))
        rules += [f"call_{number}: {body}", *writer.rules]
    rules.append("any: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    opens = way.open.split(trigger_of(tool_format), 1)[1] if after_trigger else way.open
    more = MAX_CALLS - 1 if parallel and not tool_format.one_call and not is_harmony else 0
    begin, end, sep = (spelling.literal(text) if text else "" for text in (opens, way.close, way.sep))
    if way.spaced:
        begin += f' " "? {spelling.literal(way.spaced)}'
    again = f"({sep} any){{0,{more}}}" if more else ""
    if way.shares:
        start = f"{begin} any {again} {end}"
    elif after_trigger:
        start = f"{begin} any {end}"
    else:
        rules.append(f"one: {begin} any {end}")
        start = f"one ({sep} one){{0,{more}}}" if more else "one"
    if is_harmony and not after_trigger and spelling.is_control("<|end|>"):
        rules.append(f"thought: {spelling.literal('<|channel|>analysis<|message|>')} TEXT")
        rules.append(f"TEXT: {_ANY_TEXT}")
        start = f"(thought {spelling.literal('<|end|><|start|>assistant')})? {start}"
    return "\n".join([f"start: {start}", *rules]) + "\n"


_ANY_TEXT = "/(?s:.*)/"


class _Writer:
    """The rules of one tool's calls."""

    def __init__(self, form: Json | Tags | Braces, spelling: Spelling, lenient: bool, prefix: str) -> None:
        self._form = form
        self._spelling = spelling
        self._lenient = lenient
        self._prefix = prefix
        self.rules: list[str] = []

    def call(self, function: Mapping[str, Any]) -> str:
        """One call, from its name to the end of its arguments."""
        name, parameters = str(function["name"]), parameters_of(function)
        form = self._form
        if isinstance(form, Tags):
            return self._tagged(name, parameters, form)
        if isinstance(form, Braces):
            values = BracedValues(form.quote, self._spelling, self._lenient, self._prefix)
            body = f"{self._spelling.literal('call:' + name)} {values.arguments(parameters)}"
            self.rules += values.rules
            return body
        ends = f" {self._spelling.literal(form.after)}" if form.after else ""
        schema = self._spelling.schema(parameters, self._lenient)
        return f"{self._spelling.literal(form.before.replace('NAME', name))} {self._rule(schema)}{ends}"

    def _tagged(self, name: str, parameters: Mapping[str, Any], tags: Tags) -> str:
        required = parameters.get("required")
        parts = [self._spelling.literal(tags.begin.replace("NAME", name))]
        for key, schema in properties_of(parameters).items():
            before, after = tags.text if is_text(schema) else tags.json or tags.text
            value = self._text(schema, after) if is_text(schema) else self._json(schema, parameters, after)
            rule = self._rule(f"{self._spelling.literal(before.replace('KEY', key))} {value}")
            parts.append(rule if isinstance(required, list) and key in required else f"{rule}?")
        if tags.end:
            parts.append(self._spelling.literal(tags.end))
        return " ".join(parts)

    def _json(self, schema: Any, root: Mapping[str, Any], after: str) -> str:
        return (
            f"{self._rule(self._spelling.schema(rooted(schema, root), self._lenient))} {self._spelling.literal(after)}"
        )

    def _text(self, schema: Mapping[str, Any], after: str) -> str:
        """Plain text and the tag that ends it."""
        values = fixed_values(schema)
        if values:
            end = self._spelling.literal(after)
            return "(" + " | ".join(quoted(str(value)) for value in values) + f") {end}"
        return text_before(after, text_pattern(schema), self._spelling, self._rule)

    def _rule(self, body: str, options: str = "") -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments; a function without one takes none."""
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return parameters


def properties_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments by name."""
    found = parameters.get("properties")
    return found if isinstance(found, Mapping) else {}


def rooted(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema as a schema of its own, with the definitions that it may refer to."""
    part: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {}
    return part | {name: root[name] for name in ("$defs", "definitions") if name in root and name not in part}
