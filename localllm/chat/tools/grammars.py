"""Grammars of tool calls, in Lark as llguidance reads it: a model held to one can only write calls that are valid.

Each format writes calls its own way, JSON or tags, and the way its chat template would write the same call back: so a
conversation that goes on finds its pages in the prefix cache. How text, control tokens and JSON schemas are spelled is
the `Spelling`'s business, which knows the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .braces import BracedValues
from .calls import fixed_values, is_text, quoted, tool_function
from .formats import ToolFormat
from .spelling import Spelling, text_before, text_pattern

MAX_CALLS = 8  # in one answer: small models would go on indefinitely


@dataclass(frozen=True, slots=True)
class _Way:
    """`open call (sep call)* close` when calls share a section, else `open call close (sep open call close)*`."""

    open: str
    close: str
    sep: str = ""
    shares: bool = False
    spaced: str = ""  # after `open`, perhaps with a space before it


_WAYS: dict[str, _Way] = {
    "hermes": _Way("<tool_call>\n", "\n</tool_call>", "\n"),
    "llama3": _Way("", ""),
    "mistral": _Way("[TOOL_CALLS]", "]", ", ", shares=True, spaced="["),
    "mistral-named": _Way("[TOOL_CALLS]", ""),
    "phi": _Way("<|tool_call|>[", "]<|/tool_call|>", ", ", shares=True),
    "deepseek": _Way("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", shares=True),
    "deepseek-fenced": _Way("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "\n", shares=True),
    "deepseek-tags": _Way("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>", shares=True),
    "qwen-coder": _Way("<tool_call>\n", "</tool_call>", "\n"),
    "glm": _Way("<tool_call>", "</tool_call>", "\n"),
    "gemma": _Way("<|tool_call>", "<tool_call|>"),
    "function-gemma": _Way("<start_function_call>", "<end_function_call>"),
    "harmony": _Way("<|channel|>commentary to=functions.", ""),
}

# around the JSON of the arguments; NAME stands for the name
_JSON: dict[str, tuple[str, str]] = {
    "hermes": ('{"name": "NAME", "arguments": ', "}"),
    "llama3": ('{"name": "NAME", "parameters": ', "}"),
    "mistral": ('{"name": "NAME", "arguments": ', "}"),
    "phi": ('{"name": "NAME", "arguments": ', "}"),
    "mistral-named": ("NAME[ARGS]", ""),
    "deepseek": ("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "deepseek-fenced": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
    ),
    "harmony": ("NAME <|constrain|>json<|message|>", ""),
}


@dataclass(frozen=True, slots=True)
class _Tags:
    """Around the name, and around each argument; KEY stands for its name."""

    begin: str
    end: str
    text: tuple[str, str]  # around an argument that is text
    json: tuple[str, str]


_TAGS: dict[str, _Tags] = {
    "qwen-coder": _Tags(
        "<function=NAME>\n", "</function>\n",
        ("<parameter=KEY>\n", "\n</parameter>\n"), ("<parameter=KEY>\n", "\n</parameter>\n"),
    ),
    "glm": _Tags(
        "NAME\n", "",
        ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
        ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "deepseek-tags": _Tags(
        '<｜DSML｜invoke name="NAME">\n', "</｜DSML｜invoke>\n",
        ('<｜DSML｜parameter name="KEY" string="true">', "</｜DSML｜parameter>\n"),
        ('<｜DSML｜parameter name="KEY" string="false">', "</｜DSML｜parameter>\n"),
    ),
}  # fmt: skip
_QUOTES = {"gemma": '<|"|>', "function-gemma": "<escape>"}


def trigger_of(tool_format: ToolFormat) -> str:
    """The text after which `call_grammar(after_trigger=True)` goes on; "" for a format that has none."""
    if tool_format.writes == "harmony":
        return "<|channel|>commentary to=functions."
    return tool_format.triggers[0] if tool_format.writes != "llama3" else ""


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
    way = _WAYS[tool_format.writes]
    rules = []
    for number, tool in enumerate(tools):
        writer = _Writer(tool_format.writes, spelling, bool(lenient and lenient[number]), f"c{number}")
        body = writer.call(tool_function(tool))
        rules += [f"call_{number}: {body}", *writer.rules]
    rules.append("any: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    opens = way.open.split(trigger_of(tool_format), 1)[1] if after_trigger else way.open
    more = MAX_CALLS - 1 if parallel and not tool_format.one_call and tool_format.writes != "harmony" else 0
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
    if tool_format.writes == "harmony" and not after_trigger and spelling.is_control("<|end|>"):
        rules.append(f"thought: {spelling.literal('<|channel|>analysis<|message|>')} TEXT")
        rules.append(f"TEXT: {_ANY_TEXT}")
        start = f"(thought {spelling.literal('<|end|><|start|>assistant')})? {start}"
    return "\n".join([f"start: {start}", *rules]) + "\n"


_ANY_TEXT = "/(?s:.*)/"


def write_call(tool_format: ToolFormat, name: str, arguments: Mapping[str, Any]) -> str:
    """One call as the grammar has a model write it; values are texts and plain JSON values."""
    writes, way = tool_format.writes, _WAYS[tool_format.writes]
    if writes in _TAGS:
        tags = _TAGS[writes]
        body = tags.begin.replace("NAME", name)
        for key, value in arguments.items():
            before, after = tags.text if isinstance(value, str) else tags.json
            body += before.replace("KEY", key) + (value if isinstance(value, str) else json.dumps(value)) + after
        body += tags.end
    elif writes in _QUOTES:
        quote = _QUOTES[writes]
        written = {k: f"{quote}{v}{quote}" if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        body = f"call:{name}{{{','.join(f'{key}:{written[key]}' for key in sorted(written))}}}"
    else:
        before, after = _JSON[writes]
        body = before.replace("NAME", name) + json.dumps(arguments, ensure_ascii=False) + after
    return way.open + way.spaced + body + way.close


class _Writer:
    """The rules of one tool's calls."""

    def __init__(self, writes: str, spelling: Spelling, lenient: bool, prefix: str) -> None:
        self._writes = writes
        self._spelling = spelling
        self._lenient = lenient
        self._prefix = prefix
        self.rules: list[str] = []

    def call(self, function: Mapping[str, Any]) -> str:
        """One call, from its name to the end of its arguments."""
        name, parameters = str(function["name"]), parameters_of(function)
        if self._writes in _TAGS:
            return self._tagged(name, parameters, _TAGS[self._writes])
        if self._writes in _QUOTES:
            values = BracedValues(_QUOTES[self._writes], self._spelling, self._lenient, self._prefix)
            body = f"{self._spelling.literal('call:' + name)} {values.arguments(parameters)}"
            self.rules += values.rules
            return body
        before, after = _JSON[self._writes]
        ends = f" {self._spelling.literal(after)}" if after else ""
        schema = self._spelling.schema(parameters, self._lenient)
        return f"{self._spelling.literal(before.replace('NAME', name))} {self._rule(schema)}{ends}"

    def _tagged(self, name: str, parameters: Mapping[str, Any], tags: _Tags) -> str:
        required = parameters.get("required")
        parts = [self._spelling.literal(tags.begin.replace("NAME", name))]
        for key, schema in properties_of(parameters).items():
            before, after = tags.text if is_text(schema) else tags.json
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
