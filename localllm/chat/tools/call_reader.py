"""Reads the calls of an answer in any format of formats.toml: one JSON object each, or arguments between tags."""

from __future__ import annotations

import re

from .calls import MAX_NAME_CHARS, Calls, json_loads, object_text, quoted
from .cursor import Cursor, Malformed, Reading
from .formats import ToolFormat

NAME_KEYS = ("name", "function", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "call_id", "tool_call_id")
MAX_KEY_CHARS = 64
MAX_BRACES = 64  # objects and lists inside each other


class CallReader:
    """The reader of one answer's calls."""

    def __init__(self, tool_format: ToolFormat, cursor: Cursor, calls: Calls) -> None:
        self._format = tool_format
        self._cursor = cursor
        self._calls = calls
        before, after = tool_format.call.split("ARGUMENTS")
        self._begin, self._name_end = (part.strip() for part in before.split("NAME"))
        self._end = after.strip()
        self._reads_objects = self._begin.startswith("{")
        if self._reads_objects:
            self._begin = ""
        close = tool_format.close.strip().removeprefix("]")  # of a list: it is read with the last call
        if tool_format.argument and not self._end:
            self._end, close = close, ""
        self._closes = [text for text in (close, *tool_format.ends) if text]
        # of the object that is being read
        self._name: str | None = None
        self._arguments: str | None = None
        self._is_streamed = False

    def read(self, trigger: str) -> Reading[None]:
        """The calls after a trigger. Raises Malformed when there are none.

        A trigger that is the beginning of JSON, at the start of an answer, was not read yet.
        """
        cursor, separator = self._cursor, self._begin if self._format.shares else self._format.separator.strip()
        yield from cursor.space()
        if self._begin and trigger != self._begin:
            yield from cursor.expect(self._begin)
        in_list = self._reads_objects and (yield from cursor.literal("[")) is not None
        while True:
            yield from cursor.space()
            yield from self._call()
            cursor.mark()
            yield from cursor.space()
            if in_list:
                if (yield from cursor.expect(",", "]")) == "]":
                    break
            elif not separator or (yield from cursor.literal(separator)) is None:
                break
        yield from cursor.space()
        yield from cursor.literal(*self._closes)

    def _call(self) -> Reading[None]:
        if self._reads_objects:
            self._name, self._arguments, self._is_streamed = None, None, False
            yield from self._object()
        elif self._format.argument:
            yield from self._tagged()
        elif self._format.quote:
            name, _ = yield from self._cursor.until("{", most=MAX_NAME_CHARS)
            self._calls.begin(name)
            yield from self._braced(1, "{}")
            self._calls.end()
        else:
            yield from self._named()

    # --- one JSON object, the name in it -----------------------------------------------------------------------------

    def _object(self) -> Reading[None]:
        """The members may come in any order; the first must be one that calls have."""
        yield from self._cursor.expect("{")
        yield from self._members()
        if self._name is None:
            raise Malformed
        if not self._is_streamed:
            self._calls.begin(self._name)
            self._calls.piece(object_text(self._arguments or "{}"))
        self._calls.end()

    def _members(self) -> Reading[None]:
        cursor = self._cursor
        yield from cursor.space()
        if (yield from cursor.literal("}")) is not None:
            return
        while True:
            yield from cursor.expect('"')
            key, _ = yield from cursor.until('"', most=MAX_KEY_CHARS)
            yield from cursor.space()
            yield from cursor.expect(":")
            yield from cursor.space()
            if key not in (*NAME_KEYS, *ARGUMENT_KEYS, *_OTHER_KEYS) and self._name is None and self._arguments is None:
                raise Malformed  # some other JSON
            yield from self._member(key)
            yield from cursor.space()
            if (yield from cursor.expect(",", "}")) == "}":
                return
            yield from cursor.space()

    def _member(self, key: str) -> Reading[None]:
        first = yield from self._cursor.peek()
        is_arguments = key in ARGUMENT_KEYS and self._arguments is None and not self._is_streamed
        if key == "function" and first == "{":
            yield from self._cursor.expect("{")
            yield from self._members()
        elif is_arguments and first == "{" and self._name and self._calls.streams:
            self._calls.begin(self._name)
            self._is_streamed = True
            yield from self._cursor.json_value(into=self._calls.piece)
        else:
            value = yield from self._cursor.json_value()
            if key in NAME_KEYS and first == '"' and self._name is None:
                self._name = _text_of(value)
            elif is_arguments:
                self._arguments = value

    # --- a name, then one JSON object --------------------------------------------------------------------------------

    def _named(self) -> Reading[None]:
        cursor, is_fenced = self._cursor, False
        name, _ = yield from cursor.until(self._name_end, most=MAX_NAME_CHARS)
        if self._format.fenced and (yield from cursor.peek()) != "{":
            name, _ = yield from cursor.until("\n", most=MAX_NAME_CHARS)
            yield from cursor.space()
            is_fenced = (yield from cursor.literal("```json")) is not None
        yield from cursor.space()
        if (yield from cursor.peek()) != "{":
            raise Malformed
        self._calls.begin(name.split("[CALL_ID]")[0])
        yield from cursor.json_value(into=self._calls.piece)
        self._calls.end()
        yield from cursor.space()
        if is_fenced:
            yield from cursor.literal("```")
            yield from cursor.space()
        yield from cursor.literal(self._end)

    # --- a name, then arguments between tags -------------------------------------------------------------------------

    def _tagged(self) -> Reading[None]:
        cursor, calls = self._cursor, self._calls
        opens = self._format.argument.split("KEY")[0].strip()
        ends_name = [self._name_end] if self._name_end else [opens, self._end]
        name, ended = yield from cursor.until(*ends_name, most=MAX_NAME_CHARS)
        calls.begin(name)
        calls.piece("{")
        separator = ""
        while ended != self._end:
            yield from cursor.space()
            if ended != opens and (yield from cursor.expect(opens, self._end)) == self._end:
                break
            yield from self._argument(separator)
            ended, separator = "", ", "
        calls.piece("}")
        calls.end()

    def _argument(self, separator: str) -> Reading[None]:
        cursor, calls, tool_format = self._cursor, self._calls, self._format
        _, text_mark, after = re.split("KEY|VALUE", tool_format.argument)
        _, json_mark, _ = re.split("KEY|VALUE", tool_format.json_argument or tool_format.argument)
        marks = [form for mark in (text_mark, json_mark) for form in (mark.rstrip("\n"), mark.replace("\n", ""))]
        key, mark = yield from cursor.until(*marks, *tool_format.key_ends, most=MAX_NAME_CHARS)
        key = key.strip()
        if text_mark.endswith("\n"):
            yield from cursor.literal("\n")
        calls.piece(separator + quoted(key) + ": ")
        says_kind = tool_format.json_argument and mark in (text_mark, json_mark)
        ends = after.rstrip("\n"), after.strip("\n")
        if mark == text_mark if says_kind else calls.takes_text(key):
            yield from self._text(*ends)
        else:
            value, _ = yield from cursor.until(*ends)
            calls.piece(calls.value_text(key, value))

    def _text(self, *ends: str) -> Reading[None]:
        """Plain text up to its end, as a JSON string."""
        self._calls.piece('"')
        yield from self._cursor.until(*ends, into=lambda text: self._calls.piece(quoted(text)[1:-1]))
        self._calls.piece('"')

    # --- Gemma's `{key:value,...}`, keys bare, strings between quotes of its own --------------------------------------

    def _braced(self, depth: int, brackets: str) -> Reading[None]:
        """An object or a list, after its opening bracket."""
        if depth > MAX_BRACES:
            raise Malformed
        cursor, opening, closing = self._cursor, brackets[0], brackets[1]
        self._calls.piece(opening)
        separator = ""
        while True:
            yield from cursor.space()
            if (yield from cursor.literal(closing)) is not None:
                break
            if separator:
                yield from cursor.expect(",")
                yield from cursor.space()
            key = quoted((yield from self._key()).strip()) + ": " if opening == "{" else ""
            self._calls.piece(separator + key)
            yield from self._value(depth)
            separator = ", "
        self._calls.piece(closing)

    def _key(self) -> Reading[str]:
        cursor, quote = self._cursor, self._format.quote
        if (yield from cursor.literal(quote)) is not None:
            key, _ = yield from cursor.until(quote, most=MAX_NAME_CHARS)
            yield from cursor.space()
            yield from cursor.expect(":")
        else:
            key, _ = yield from cursor.until(":", most=MAX_NAME_CHARS)
        return key

    def _value(self, depth: int) -> Reading[None]:
        yield from self._cursor.space()
        begun = yield from self._cursor.literal(self._format.quote, "{", "[")
        if begun == self._format.quote:
            yield from self._text(self._format.quote)
        elif begun is not None:
            yield from self._braced(depth + 1, "{}" if begun == "{" else "[]")
        else:
            value = yield from self._cursor.json_value()
            self._calls.piece(self._calls.value_text("", value))


def _text_of(literal: str) -> str:
    try:
        value = json_loads(literal)
    except ValueError as error:
        raise Malformed from error
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise Malformed
    return value
