"""Tool calls as they are parsed: checks their names, converts their arguments to JSON, and emits their deltas.

A call is emitted as a whole at its end, or piece by piece if a grammar guarantees valid calls. Text from a model is
never evaluated.
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
    """A new id: call_ and 24 hex digits."""
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """A new id of nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def tool_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool in the OpenAI format, with or without the outer object."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def called_tools(tools: ToolUse) -> list[tuple[int, Mapping[str, Any]]]:
    """The tools that may be called, with their positions in the request."""
    numbered = enumerate(tools.tools)
    return [(i, tool) for i, tool in numbered if not tools.only or tool_function(tool).get("name") in tools.only]


class Calls:
    """The calls of one answer.

    out      receives ("tool_call", JSON of a delta)
    tools    the tools that may be called, in the OpenAI format
    streams  emit arguments piece by piece; only valid if a grammar constrains them
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
        """True if there is a tool of this name."""
        return name in self._parameters

    def begin(self, name: str) -> None:
        """Begin a call. Raises Malformed for a name that no tool has."""
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
        """Add a piece of the arguments' JSON text."""
        if not self.streams:
            self._pieces.append(text)
        elif text:
            self._write({"arguments": text})

    def end(self) -> None:
        """End the call. Raises Malformed when its arguments are not a JSON object."""
        if self._name is None:
            raise Malformed
        if not self.streams:
            arguments = object_text("".join(self._pieces))
            self._write({"id": self._new_id(), "name": self._name, "arguments": ""})
            self._write({"arguments": arguments})
        self._name = None
        self.count += 1

    def drop(self) -> bool:
        """Abandon the current call. Returns True if part of it was already emitted."""
        written = self._name is not None and self.streams
        self.count += written
        self._name = None
        return written

    def schema_of(self, key: str) -> Mapping[str, Any]:
        """The schema of an argument of the current call; empty if unknown."""
        return self.part(self._parameters.get(self._name or ""), key)

    def part(self, schema: Any, key: str | None) -> Mapping[str, Any]:
        """The schema of an object's member or, for None, of a list's items."""
        root = self._parameters.get(self._name or "")
        for one in branches(resolved(schema, root), root):
            found = one.get("items") if key is None else properties_of(one).get(key)
            if isinstance(found, Mapping):
                return resolved(found, root)
        return {}

    def value(self, schema: Mapping[str, Any], text: str) -> None:
        """Add an argument value of the current call that was written as plain text."""
        self.piece(value_text(schema, text, self._parameters.get(self._name or "")))

    def _write(self, delta: dict[str, str]) -> None:
        body = {"index": self.count, **delta}
        self._out(("tool_call", json.dumps(body, ensure_ascii=False)))


def value_text(schema: Mapping[str, Any], text: str, root: Any = None) -> str:
    """Convert an argument written as plain text to JSON, by its schema or else by its form.

    root   the schema that references are resolved in
    """
    stripped = text.strip()
    found = PYTHON_WORDS.get(stripped, stripped)
    try:
        value = json_loads(found)
    except ValueError:
        return quoted(text)
    kinds = _kinds(schema, root)
    kind = "integer" if type(value) is int and "number" not in kinds else kind_of(value)
    return quoted(text) if "string" in kinds and kind not in kinds else found


def _kinds(schema: Mapping[str, Any], root: Any) -> set[str]:
    """The types that a schema allows; empty if it allows any."""
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


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def quoted(text: str) -> str:
    """The text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def json_loads(text: str) -> Any:
    """Parse strict JSON: no NaN, and limited digits and depth. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def object_text(text: str) -> str:
    """Return the text of a JSON object, unwrapping one that was written as a JSON string. Raises Malformed."""
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
    """Follow references inside the same schema, at most four steps."""
    for _ in range(4):
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(path, str):
            break
        schema = root
        for name in path.removeprefix("#/").split("/"):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else {}


def branches(schema: Mapping[str, Any], root: Any) -> list[Mapping[str, Any]]:
    """A schema and the alternatives in its anyOf and oneOf."""
    found = [schema]
    for name in ("anyOf", "oneOf"):
        several = schema.get(name)
        found += [resolved(one, root) for one in several] if isinstance(several, list | tuple) else []
    return found


def is_text(schema: Any) -> bool:
    """True if a schema allows only strings."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if kind is not None:
        return kind in ("string", ["string"])
    values = fixed_values(schema)
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def fixed_values(schema: Mapping[str, Any]) -> Any:
    """The values in a schema's enum or const; None without either."""
    return schema.get("enum") or ([schema["const"]] if "const" in schema else None)
