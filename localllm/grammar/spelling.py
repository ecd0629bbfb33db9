"""What a grammar of calls needs of a vocabulary, and how plain text stands in its rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Spelling(Protocol):
    """How the parts of a rule are written for one vocabulary."""

    def literal(self, text: str) -> str:
        """A text, the control tokens in it by id"""
        ...

    def is_control(self, text: str) -> bool:
        """Whether it is the text of one control token"""
        ...

    def schema(self, schema: Mapping[str, Any], lenient: bool) -> str:
        """A JSON value of this schema"""
        ...


def text_before(after: str, pattern: str, spelling: Spelling, rule: Callable[[str, str], str]) -> str:
    """Any text up to where `after` first stands, and that."""
    mark = after.strip("\n")
    if spelling.is_control(mark):  # which text never holds
        return f"/{pattern}/ {spelling.literal(after)}"
    return rule(f"/{pattern}{_escaped(after)}/", "[lazy]")


def _escaped(text: str) -> str:
    """As part of a regular expression between slashes."""
    return re.sub(r"[.^$*+?()\[\]{}|\\/]", r"\\\g<0>", text).replace("\n", r"\n")


def text_pattern(schema: Mapping[str, Any]) -> str:
    """A regular expression for plain text, its lengths kept."""
    low, high = (schema.get(name) for name in ("minLength", "maxLength"))
    if not isinstance(low, int) and not isinstance(high, int):
        return "(?s:.*)"
    return f"(?s:.{{{low if isinstance(low, int) else 0},{high if isinstance(high, int) else ''}}})"
