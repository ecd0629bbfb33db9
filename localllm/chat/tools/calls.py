"""Tool calls as they are read: their names checked, their arguments made JSON, their deltas written.

A call is written when it is known to be one: as a whole at its end, or, where the model is held to valid calls, piece
by piece. What a model invents is never evaluated.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localllm.request import ToolUse

from ..parser import Part
from .cursor import Malformed
from .formats import kind_of

MAX_NAME_CHARS = 256
Tools = Sequence[Mapping[str, Any]]
_ALPHABET = string.ascii_letters + string.digits


def new_call_id() -> str:
    """call_ and 24 characters."""
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """Nine letters and digits: what Mistral's templates insist on."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def tool_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool in the OpenAI shape, with or without its wrapping."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def called_tools(tools: ToolUse) -> list[tuple[int, Mapping[str, Any]]]:
    """The tools that may be called, with their places in the request."""
    numbered = enumerate(tools.tools)
    return [(i, tool) for i, tool in numbered if not tools.only or tool_function(tool).get("name") in tools.only]


class Calls:
    """The calls of one answer.

    out      takes ("tool_call", JSON of a delta)
    tools    what may be called, in the OpenAI shape
    streams  arguments are written as they come: only where a grammar keeps them valid
    """

    def __init__(self, out: Callable[[Part], None], tools: Tools, streams: bool, new_id: Callable[[], str]) -> None:
        self._out = out
        self._parameters = {
            str(function["name"]): function.get("parameters")
            for function in map(tool_function, tools)
            if "name" in function
        }
        self.streams = streams
        self._new_id = new_id
        self._name: str | None = None
        self._pieces: list[str] = []
        self.count = 0

    def knows(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return name in self._parameters

    def begin(self, name: str) -> None:
        """A call of this name. Raises Malformed for a name that no tool has."""
        name = name.strip()
        if name not in self._parameters and name.removeprefix("functions.") in self._parameters:
            name = name.removeprefix("functions.")
        if self._name is not None or name not in self._parameters:
            raise Malformed
        self._name = name
        self._pieces = []
        if self.streams:
            self._write({"id": self._new_id(), "name": name, "arguments": ""})

    def piece(self, text: str) -> None:
        """A piece of its arguments' JSON text."""
        if not self.streams:
            self._pieces.append(text)
        elif text:
            self._write({"arguments": text})

    def end(self) -> None:
        """The call is whole. Raises Malformed when its arguments are no JSON object."""
        if self._name is None:
            raise Malformed
        if not self.streams:
            arguments = object_text("".join(self._pieces))
            self._write({"id": self._new_id(), "name": self._name, "arguments": ""})
            self._write({"arguments": arguments})
        self._name = None
        self.count += 1

    def drop(self) -> bool:
        """The call that was begun came to nothing. True when part of it was written already."""
        written = self._name is not None and self.streams
        self.count += written
        self._name = None
        return written

    def schema_of(self, key: str) -> Mapping[str, Any]:
        """The schema of an argument of the present call; empty where it is not known."""
        return self.part(self._parameters.get(self._name or ""), key)

    def part(self, schema: Any, key: str | None) -> Mapping[str, Any]:
        """The schema of a member of an object, or, without a key, of an item of a list."""
        root = self._parameters.get(self._name or "")
        for one in branches(resolved(schema, root), root):
            found = one.get("items") if key is None else properties_of(one).get(key)
            if isinstance(found, Mapping):
                return resolved(found, root)
        return {}

    def value(self, schema: Mapping[str, Any], text: str) -> None:
        """A value of an argument of the present call that was written as plain text."""
        self.piece(value_text(schema, text, self._parameters.get(self._name or "")))

    def _write(self, delta: dict[str, str]) -> None:
        body = {"index": self.count, **delta}
        self._out(("tool_call", json.dumps(body, ensure_ascii=False)))


def value_text(schema: Mapping[str, Any], text: str, root: Any = None) -> str:
    """An argument that was written as plain text, as JSON: what its schema says, else what it looks like.

    root   what references in the schema lead into
    """
    stripped = text.strip()
    found = _PYTHON_WORDS.get(stripped, stripped)
    try:
        value = json_loads(found)
    except ValueError:
        return quoted(text)
    kinds = _kinds(schema, root)
    kind = "integer" if type(value) is int and "number" not in kinds else kind_of(value)
    return quoted(text) if "string" in kinds and kind not in kinds else found


def _kinds(schema: Mapping[str, Any], root: Any) -> set[str]:
    """The types that a schema names; none where it may be anything."""
    kinds: set[str] = set()
    for one in branches(schema, root):
        kind, values = one.get("type"), fixed_values(one)
        if kind is None and isinstance(values, list):
            kind = [kind_of(value) for value in values]
        if kind is not None:
            kinds |= set(map(str, kind)) if isinstance(kind, list) else {str(kind)}
        elif one is not schema or not {"anyOf", "oneOf"} & set(schema):
            return set()
    return kinds


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def json_loads(text: str) -> Any:
    """JSON and nothing more: no NaN, no endless digits, no endless depth. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def object_text(text: str) -> str:
    """The text of a JSON object: itself, or what a string holds that was written in its place."""
    try:
        value = json_loads(text)
        if isinstance(value, str):
            text = value
            value = json_loads(value)
    except ValueError as error:
        raise Malformed from error
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    return text


def properties_of(parameters: Any) -> Mapping[str, Any]:
    """The schemas of a function's arguments by name."""
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """What a reference inside the same schema leads to; a few steps at most."""
    for _ in range(4):
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(path, str):
            break
        schema = root
        for name in path.removeprefix("#/").split("/"):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else {}


def branches(schema: Mapping[str, Any], root: Any) -> list[Mapping[str, Any]]:
    """A schema and what it is any one of."""
    found = [schema]
    for name in ("anyOf", "oneOf"):
        several = schema.get(name)
        found += [resolved(one, root) for one in several] if isinstance(several, list | tuple) else []
    return found


def is_text(schema: Any) -> bool:
    """Whether a schema allows strings and nothing else."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if kind is not None:
        return kind in ("string", ["string"])
    values = fixed_values(schema)
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def fixed_values(schema: Mapping[str, Any]) -> Any:
    """The values that a schema names one by one; None where it names none."""
    return schema.get("enum") or ([schema["const"]] if "const" in schema else None)
