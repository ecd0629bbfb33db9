"""The ways in which models write tool calls, and which of them a chat template speaks of. The rows of formats.toml."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How one family writes calls. formats.toml explains the fields."""

    name: str
    call: str
    marks: tuple[str, ...] = ()
    open: str = ""
    close: str = ""
    separator: str = ""
    shares: bool = False
    spaced: str = ""
    argument: str = ""
    json_argument: str = ""
    key_ends: tuple[str, ...] = ()
    quote: str = ""
    fenced: bool = False
    reads_as: str = ""
    ends: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    short_ids: bool = False
    one_call: bool = False

    @property
    def trigger(self) -> str:
        """The text after which a grammar can go on with a call; "" for a format that has none."""
        return (self.triggers or (self.open,))[0] if self.open else ""

    def around_call(self, name: str) -> tuple[str, str]:
        """What stands before and after the arguments of a call."""
        before, after = self.call.split("ARGUMENTS")
        return before.replace("NAME", name), after

    def around_value(self, key: str, *, is_text: bool) -> tuple[str, str]:
        """What stands before and after the value of an argument."""
        form = self.argument if is_text else self.json_argument or self.argument
        before, after = form.split("VALUE")
        return before.replace("KEY", key), after

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call as a grammar has a model write it; values are texts and plain JSON values."""
        before, after = self.around_call(name)
        texts = {
            key: f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)
            for key, value in arguments.items()
        }
        if self.argument:
            around = {key: self.around_value(key, is_text=isinstance(arguments[key], str)) for key in texts}
            body = "".join(text.join(around[key]) for key, text in texts.items())
        elif self.quote:
            body = "{" + ",".join(f"{key}:{texts[key]}" for key in sorted(texts)) + "}"
        else:
            body = json.dumps(arguments, ensure_ascii=False)
        return self.open + self.spaced + before + body + after + self.close


_KINDS = {"str": str, "bool": bool}


def read_format(row: Mapping[str, Any]) -> ToolFormat:
    """A row of formats.toml, checked. Raises ValueError or TypeError."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    made = ToolFormat(**values)
    kinds = {field.name: _KINDS.get(str(field.type), tuple) for field in fields(made)}
    wrong = [name for name, kind in kinds.items() if not isinstance(getattr(made, name), kind)]
    parts = {made.call: ("NAME", "ARGUMENTS"), made.argument: ("KEY", "VALUE"), made.json_argument: ("KEY", "VALUE")}
    wrong += [form for form in parts if form and any(form.count(part) != 1 for part in parts[form])]
    if wrong:
        raise ValueError(f"tool format {made.name!r}: wrong type or form of {', '.join(wrong)}")
    return made


FORMATS = tuple(map(read_format, tomllib.loads(Path(__file__).with_name("formats.toml").read_text("utf-8"))["format"]))
BY_NAME = {one.name: one for one in FORMATS}
GENERIC, HARMONY = BY_NAME["generic"], BY_NAME["harmony"]


def find_format(template: str) -> ToolFormat:
    """The first format whose marks all stand in a chat template; GENERIC has none."""
    return next(found for found in FORMATS if all(mark in template for mark in found.marks))
