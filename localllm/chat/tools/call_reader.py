"""Parses the tool calls of an answer in any format of formats.toml: JSON objects, or arguments between tags."""

from __future__ import annotations

import re

from .calls import MAX_NAME_CHARS, Calls, is_text, json_loads, object_text, quoted
from .cursor import Cursor, Malformed, Reading
from .formats import TYPES, ToolFormat
from .value_reader import ValueReader

NAME_KEYS = ("name", "function", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "call_id", "tool_call_id")
MAX_KEY_CHARS = 64
MAX_INDEX_CHARS = 16


class CallReader:
    """The reader of one answer's calls."""

    def __init__(self, tool_format: ToolFormat, cursor: Cursor, calls: Calls) -> None:
        self._format = tool_format
        self._cursor = cursor
        self._calls = calls
        self._values = ValueReader(tool_format, cursor, calls)
        before, after = tool_format.call.split("ARGUMENTS")
        self._begin, self._name_end = (part.strip() for part in before.rsplit("NAME", 1))
        self._begin = self._begin.removesuffix("functions.")  # `Calls` removes this prefix
        self._end = after.strip()
        self._reads_objects = self._begin.startswith("{")
        self._reads_lists = self._reads_objects or tool_format.is_python
        self._is_keyed = self._begin == '{"'
        if self._reads_objects:
            self._begin = ""
        close = tool_format.close.strip()
        if self._reads_lists:
            close = close.removeprefix("]").strip()  # read with the last call
        if tool_format.argument and not self._end:
            self._end, close = close, ""
        self._closes = [text for text in (close, *tool_format.ends) if text]
        # state of the object being read
        self._name: str | None = None
        self._arguments: str | None = None
        self._is_streamed = False

    def read(self, trigger: str) -> Reading[None]:
        """Read the calls after a trigger. Raises Malformed when there are none.

        An empty trigger means that the calls start the answer and nothing has been read yet.
        """
        cursor, separator = self._cursor, self._begin if self._format.shares else self._format.separator.strip()
        yield from cursor.space()
        if not trigger or not self._begin.startswith(trigger):
            yield from cursor.expect(self._begin)
        in_list = self._reads_lists and (trigger.endswith("[") or (yield from cursor.literal("[")) is not None)
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
        if self._is_keyed:
            yield from self._keyed()
        elif self._reads_objects:
            self._name, self._arguments, self._is_streamed = None, None, False
            yield from self._object()
        elif self._format.nested:
            yield from self._tree()
        elif self._format.is_python or self._format.quote:
            opening, closing, equals = "()=" if self._format.is_python else "{}:"
            name, _ = yield from self._cursor.until(opening, most=MAX_NAME_CHARS)
            self._calls.begin(name)
            yield from self._values.members(1, opening + closing, equals)
            self._calls.end()
        elif self._format.argument:
            yield from self._tagged()
        else:
            yield from self._named()

    # --- one JSON object, the name in it -----------------------------------------------------------------------------

    def _object(self) -> Reading[None]:
        """Read a call with its members in any order; the first must be a member that calls have."""
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

    def _keyed(self) -> Reading[None]:
        """Read an object that maps function names to arguments."""
        cursor = self._cursor
        yield from cursor.expect("{")
        while True:
            yield from cursor.space()
            yield from cursor.expect('"')
            name, _ = yield from cursor.until('"', most=MAX_NAME_CHARS)
            self._calls.begin(name)
            yield from cursor.space()
            yield from cursor.expect(":")
            yield from cursor.space()
            yield from cursor.json_value(into=self._calls.piece)
            self._calls.end()
            yield from cursor.space()
            if (yield from cursor.expect(",", "}")) == "}":
                return

    # --- a name, then one JSON object --------------------------------------------------------------------------------

    def _named(self) -> Reading[None]:
        cursor, is_fenced = self._cursor, False
        name = yield from self._called(self._name_end or "\n")
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

    def _called(self, end: str) -> Reading[str]:
        """Read a name and the text after it, which may contain the index of the call."""
        before, _, after = end.partition("INDEX")
        name, _ = yield from self._cursor.until(before, most=MAX_NAME_CHARS)
        if after:
            yield from self._cursor.until(after, most=MAX_INDEX_CHARS)
        return name

    # --- a name, then arguments between tags -------------------------------------------------------------------------

    def _tagged(self) -> Reading[None]:
        cursor, calls = self._cursor, self._calls
        opens = self._format.argument.split("KEY")[0].strip()
        ended = ""
        if self._name_end:
            name = yield from self._called(self._name_end)
        else:
            name, ended = yield from cursor.until(opens, self._end, most=MAX_NAME_CHARS)
        calls.begin(name.strip().removesuffix(r"\n"))  # Ling 3 sometimes spells the line end
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
        json_marks = {json_mark.replace("TYPE", kind) for kind in TYPES}
        marks = [form for mark in (text_mark, *json_marks) for form in (mark.rstrip("\n"), mark.replace("\n", ""))]
        key, mark = yield from cursor.until(*marks, *tool_format.key_ends, most=MAX_NAME_CHARS)
        key = key.strip()
        if text_mark.endswith("\n"):
            yield from cursor.literal("\n")
        calls.piece(separator + quoted(key) + ": ")
        says_kind = tool_format.json_argument and mark in (text_mark, *json_marks)
        schema = calls.schema_of(key)
        plain = mark == text_mark if says_kind else is_text(schema)
        yield from self._values.argument(schema, plain, after.rstrip("\n"), after.strip("\n"))

    def _tree(self) -> Reading[None]:
        """Read arguments in tags named after them, each with a mark before it."""
        cursor, calls, mark = self._cursor, self._calls, self._format.nested
        calls.begin((yield from self._called(self._name_end)))
        calls.piece("{")
        separator = ""
        while True:
            yield from cursor.space()
            yield from cursor.expect(mark)
            if (yield from cursor.expect(self._end.removeprefix(mark), "<")) != "<":
                break
            key, _ = yield from cursor.until(">", most=MAX_NAME_CHARS)
            calls.piece(separator + quoted(key) + ": ")
            yield from self._values.tree(calls.schema_of(key), key)
            separator = ", "
        calls.piece("}")
        calls.end()


def _text_of(literal: str) -> str:
    try:
        value = json_loads(literal)
    except ValueError as error:
        raise Malformed from error
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise Malformed
    return value
