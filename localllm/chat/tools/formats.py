"""Tool call formats (the rows of formats.toml), and detection of the format that a chat template uses."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

TYPES = ("number", "boolean", "null", "object", "array")  # JSON types except string


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The tool call format of a model family. formats.toml documents the fields."""

    name: str
    call: str
    marks: tuple[str, ...] = ()
    other_marks: tuple[str, ...] = ()
    open: str = ""
    close: str = ""
    separator: str = ""
    shares: bool = False
    spaced: str = ""
    argument: str = ""
    json_argument: str = ""
    key_ends: tuple[str, ...] = ()
    nested: str = ""
    is_python: bool = False
    wraps: tuple[str, ...] = ()
    quote: str = ""
    fenced: bool = False
    reads_as: str = ""
    ends: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    in_prompt: str = ""
    text_arguments: bool = False
    ids: str = ""
    first_index: int = 0
    one_call: bool = False
    thought: tuple[str, ...] = ()
    final: str = ""

    @property
    def trigger(self) -> str:
        """The text after which a grammar can take over for a call; "" if the format has none."""
        found = (self.triggers or (self.open,))[0] if self.open else ""
        return "" if any(text.startswith(found) for text in self.hidden) else found

    def opening(self, prompt: str) -> str:
        """The part of `open` that already ends the prompt."""
        return self.in_prompt if self.in_prompt and prompt.endswith(self.in_prompt) else ""

    def around_call(self, name: str, index: str = "") -> tuple[str, str]:
        """The text before and after the arguments of a call."""
        before, after = self.call.split("ARGUMENTS")
        number = index or str(self.first_index)
        return name.join(part.replace("INDEX", number) for part in before.split("NAME")), after

    def around_value(self, key: str, kind: str) -> tuple[str, str]:
        """The text before and after the value of an argument. `kind` is the value's JSON type."""
        form = self.argument if kind == "string" else self.json_argument or self.argument
        before, after = form.split("VALUE")
        head, tail = before.split("KEY")
        return head + key + tail.replace("TYPE", "number" if kind == "integer" else kind), after

    def tags(self, key: str) -> tuple[str, str]:
        """The tags before and after the value of a key, in a `nested` format."""
        return f"{self.nested}<{key}>", f"{self.nested}</{key}>"

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write one call as a grammar would make a model write it; values are plain JSON values."""
        return "".join(text for text, _ in self.pieces([(name, arguments)]))

    def pieces(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, bool]]:
        """Write consecutive calls as pieces of (text, True if it belongs to the format, not to a call's content)."""
        made = []
        for number, (name, arguments) in enumerate(calls):
            before, after = self.around_call(name, str(number + self.first_index))
            opens = number == 0 or not self.shares
            closes = number == len(calls) - 1 or not self.shares
            made += [
                ((self.separator if number else "") + (self.open + self.spaced if opens else "") + before, True),
                (self._body(arguments), False),
                (after + (self.close if closes else ""), True),
            ]
        return made

    def _body(self, arguments: Mapping[str, Any]) -> str:
        texts = {
            key: f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)
            for key, value in arguments.items()
        }
        if self.is_python:
            return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        if self.nested:
            return "".join(self._tree(key, value) for key, value in arguments.items())
        if self.argument:
            return "".join(text.join(self.around_value(key, kind_of(arguments[key]))) for key, text in texts.items())
        if self.quote:
            return "{" + ",".join(f"{key}:{texts[key]}" for key in sorted(texts)) + "}"
        return json.dumps(arguments, ensure_ascii=False)

    def _tree(self, key: str, value: Any) -> str:
        if isinstance(value, Mapping):
            text = "".join(self._tree(name, part) for name, part in value.items())
        elif isinstance(value, list):
            text = "".join(self._tree("item", part) for part in value)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
        return text.join(self.tags(key))


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str):
        return "string"
    return "number" if isinstance(value, int | float) else "object" if isinstance(value, Mapping) else "array"


_KINDS = {"str": str, "bool": bool, "int": int}


def read_format(row: Mapping[str, Any]) -> ToolFormat:
    """Parse and check a row of formats.toml. Raises ValueError or TypeError."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    made = ToolFormat(**values)
    kinds = {field.name: _KINDS.get(str(field.type), tuple) for field in fields(made)}
    wrong = [name for name, kind in kinds.items() if not isinstance(getattr(made, name), kind)]
    parts = {made.call: ("NAME", "ARGUMENTS"), made.argument: ("KEY", "VALUE"), made.json_argument: ("KEY", "VALUE")}
    wrong += [
        form
        for form in parts
        if form and any(form.count(part) != 1 for part in parts[form] if part != "NAME" or part not in form)
    ]
    if wrong:
        raise ValueError(f"tool format {made.name!r}: wrong type or form of {', '.join(wrong)}")
    return made


FORMATS = tuple(map(read_format, tomllib.loads(Path(__file__).with_name("formats.toml").read_text("utf-8"))["format"]))
BY_NAME = {one.name: one for one in FORMATS}
GENERIC = BY_NAME["generic"]


def find_format(template: str) -> ToolFormat:
    """Return the first format whose marks are all in a chat template; GENERIC has no marks and always matches."""
    return next(
        found
        for found in FORMATS
        if all(mark in template for mark in found.marks) or any(mark in template for mark in found.other_marks)
    )
