"""Parses arguments that are not JSON: text up to a mark, Gemma's and Python's notations, nested tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .calls import MAX_NAME_CHARS, Calls, is_text, quoted, value_text
from .cursor import Cursor, Malformed, Reading
from .formats import ToolFormat

MAX_BRACES = 64  # objects and lists inside each other
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {char: char for char in "\"'\\/"}
_HEX = re.compile("[0-9A-Fa-f]{4}")


class ValueReader:
    """Reads the argument values of one answer and adds them to the current call as JSON."""

    def __init__(self, tool_format: ToolFormat, cursor: Cursor, calls: Calls) -> None:
        self._cursor = cursor
        self._calls = calls
        self._nested = tool_format.nested
        self._quotes = ('"', "'") if tool_format.is_python else (tool_format.quote,)
        self._escapes = tool_format.is_python
        self._wraps = tool_format.wraps

    def argument(self, schema: Mapping[str, Any], plain: bool, *ends: str) -> Reading[None]:
        """Read an argument up to its end: as `plain` text, or converted by its schema."""
        if self._wraps and (yield from self._cursor.literal(self._wraps[0])) is not None:
            ends = tuple(self._wraps[1] + end for end in ends)
        if plain:
            yield from self.text(*ends)
        else:
            value, _ = yield from self._cursor.until(*ends)
            self._calls.value(schema, value)

    def text(self, *ends: str) -> Reading[None]:
        """Read plain text up to its end, as a JSON string."""
        self._calls.piece('"')
        yield from self._cursor.until(*ends, into=self._piece)
        self._calls.piece('"')

    def _piece(self, text: str) -> None:
        self._calls.piece(quoted(text)[1:-1])

    # --- `{key:value}`: Gemma's, with bare keys and its own quotes, or Python's --------------------------------------

    def value(self, depth: int = 0) -> Reading[None]:
        """Read one value."""
        yield from self._cursor.space()
        begun = yield from self._cursor.literal(*self._quotes, "{", "[")
        if begun in ("{", "["):
            yield from self.members(depth + 1, "{}" if begun == "{" else "[]")
        elif begun is not None:
            yield from (self._escaped(begun) if self._escapes else self.text(begun))
        elif self._escapes:
            self._calls.piece(value_text({}, (yield from self._cursor.scalar(",", ")", "]", "}"))))
        else:
            self._calls.piece(value_text({}, (yield from self._cursor.json_value())))

    def members(self, depth: int, brackets: str, equals: str = ":") -> Reading[None]:
        """Read an object or a list, after its opening bracket."""
        if depth > MAX_BRACES:
            raise Malformed
        cursor, closing, separator = self._cursor, brackets[1], ""
        is_list = closing == "]"
        self._calls.piece("[" if is_list else "{")
        while True:
            yield from cursor.space()
            if (yield from cursor.literal(closing)) is not None:
                break
            if separator:
                yield from cursor.expect(",")
                yield from cursor.space()
            key = "" if is_list else quoted((yield from self._key(equals)).strip()) + ": "
            self._calls.piece(separator + key)
            yield from self.value(depth)
            separator = ", "
        self._calls.piece("]" if is_list else "}")

    def _key(self, equals: str) -> Reading[str]:
        cursor = self._cursor
        quote = yield from cursor.literal(*self._quotes)
        if quote is not None:
            key, _ = yield from cursor.until(quote, most=MAX_NAME_CHARS)
            yield from cursor.space()
            yield from cursor.expect(equals)
        else:
            key, _ = yield from cursor.until(equals, most=MAX_NAME_CHARS)
        return key

    def _escaped(self, quote: str) -> Reading[None]:
        """Read the rest of a Python or JSON string."""
        self._calls.piece('"')
        while (yield from self._cursor.until(quote, "\\", into=self._piece))[1] != quote:
            char = yield from self._cursor.take(1)
            if char == "u":
                code = yield from self._cursor.take(4)
                if not _HEX.fullmatch(code):
                    raise Malformed
                self._calls.piece("\\u" + code)
            else:
                self._piece(_ESCAPED.get(char, "\\" + char))
        self._calls.piece('"')

    # --- `<key>value</key>`, with nested objects and lists, and a mark before every tag -------------------------------

    def tree(self, schema: Mapping[str, Any], key: str, depth: int = 0) -> Reading[None]:
        """Read the value of a key, after its opening tag, up to and including its closing one."""
        cursor = self._cursor
        if is_text(schema):
            yield from self.text(f"{self._nested}</{key}>")
            return
        value, _ = yield from cursor.until(self._nested)
        if (yield from cursor.expect(f"</{key}>", "<")) != "<":
            empty = {"array": "[]", "object": "{}"}.get(str(schema.get("type")), "") if not value.strip() else ""
            if empty:
                self._calls.piece(empty)
            else:
                self._calls.value(schema, value)
            return
        if value.strip() or depth > MAX_BRACES:
            raise Malformed
        name, _ = yield from cursor.until(">", most=MAX_NAME_CHARS)
        is_list = name == "item" and not self._calls.part(schema, "item")
        self._calls.piece("[" if is_list else "{")
        separator = ""
        while name:
            self._calls.piece(separator + ("" if is_list else quoted(name) + ": "))
            yield from self.tree(self._calls.part(schema, None if is_list else name), name, depth + 1)
            separator, name = ", ", ""
            yield from cursor.space()
            yield from cursor.expect(self._nested)
            if (yield from cursor.expect(f"</{key}>", "<")) == "<":
                name, _ = yield from cursor.until(">", most=MAX_NAME_CHARS)
        self._calls.piece("]" if is_list else "}")
