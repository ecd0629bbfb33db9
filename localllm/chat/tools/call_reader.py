"""Readers of calls whose arguments are JSON: objects with a name in them, and names followed by an object."""

from __future__ import annotations

from dataclasses import dataclass, field

from .calls import MAX_NAME_CHARS, Calls, json_loads, object_text
from .cursor import Cursor, Malformed, Reading

NAME_KEYS = ("name", "function", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "call_id", "tool_call_id")
MAX_KEY_CHARS = 64


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`{"name": "f", "arguments": {...}}`, alone or in a list, after the trigger and before `end`."""

    end: tuple[str, ...] = ()  # the first of them that follows is read; a missing one is forgiven
    many: str = ""  # what parts several calls without a list

    def read(self, cursor: Cursor, calls: Calls, trigger: str) -> Reading[None]:
        """The calls after a trigger. A trigger that is the beginning of JSON itself was not read yet."""
        yield from cursor.space()
        in_list = (yield from cursor.literal("[")) is not None
        while True:
            yield from cursor.space()
            yield from read_call(cursor, calls)
            yield from cursor.space()
            if in_list:
                if (yield from cursor.expect(",", "]")) == "]":
                    break
            elif not self.many or (yield from cursor.literal(self.many)) is None:
                break
        yield from cursor.space()
        if self.end:
            yield from cursor.literal(*self.end)


def read_call(cursor: Cursor, calls: Calls) -> Reading[None]:
    """One object. Its members may come in any order; the first must be one that calls have."""
    call = _Call(calls)
    yield from cursor.expect("{")
    yield from _members(cursor, call)
    call.finish()


@dataclass(slots=True)
class _Call:
    """What is known of the call that is being read."""

    calls: Calls
    name: str | None = None
    arguments: str | None = None
    streamed: bool = field(default=False)

    def finish(self) -> None:
        if self.name is None:
            raise Malformed
        if not self.streamed:
            self.calls.begin(self.name)
            self.calls.piece(object_text(self.arguments or "{}"))
        self.calls.end()


def _members(cursor: Cursor, call: _Call) -> Reading[None]:
    yield from cursor.space()
    if (yield from cursor.literal("}")) is not None:
        return
    while True:
        key = yield from _key(cursor)
        if key not in (*NAME_KEYS, *ARGUMENT_KEYS, *_OTHER_KEYS) and call.name is None and call.arguments is None:
            raise Malformed  # some other JSON
        yield from _member(cursor, call, key)
        yield from cursor.space()
        if (yield from cursor.expect(",", "}")) == "}":
            return
        yield from cursor.space()


def _key(cursor: Cursor) -> Reading[str]:
    yield from cursor.expect('"')
    key, _ = yield from cursor.until('"', most=MAX_KEY_CHARS)
    yield from cursor.space()
    yield from cursor.expect(":")
    yield from cursor.space()
    return key


def _member(cursor: Cursor, call: _Call, key: str) -> Reading[None]:
    first = yield from cursor.peek()
    if key in NAME_KEYS and first == '"' and call.name is None:
        call.name = _text_of((yield from cursor.json_value()))
    elif key == "function" and first == "{":
        yield from cursor.expect("{")
        yield from _members(cursor, call)
    elif key in ARGUMENT_KEYS and call.arguments is None and not call.streamed:
        if call.name is not None and call.calls.streams and first == "{":
            call.calls.begin(call.name)
            call.streamed = True
            yield from cursor.json_value(into=call.calls.piece)
        else:
            call.arguments = yield from cursor.json_value()
    else:
        yield from cursor.json_value()


def _text_of(literal: str) -> str:
    try:
        value = json_loads(literal)
    except ValueError as error:
        raise Malformed from error
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise Malformed
    return value


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """`NAME between {...} end`, repeated with `again`, in a section that ends with `close`."""

    between: tuple[str, ...]  # what parts the name from its arguments
    begin: str = ""  # before every name
    end: str = ""
    again: str = ""  # begins another call; "" for `begin`
    close: str = ""
    # DeepSeek before V3.1: `function<sep>NAME`, a line end, and the arguments in a Markdown block of JSON
    fenced: bool = False

    def read(self, cursor: Cursor, calls: Calls, trigger: str) -> Reading[None]:
        if self.begin:
            yield from cursor.space()
            yield from cursor.expect(self.begin)
        while True:
            yield from self._call(cursor, calls)
            cursor.mark()
            yield from cursor.space()
            again = self.again or self.begin
            if not again or (yield from cursor.literal(again)) is None:
                break
        if self.close:
            yield from cursor.literal(self.close)

    def _call(self, cursor: Cursor, calls: Calls) -> Reading[None]:
        name, _ = yield from cursor.until(*self.between, most=MAX_NAME_CHARS)
        fence = False
        if self.fenced and (yield from cursor.peek()) != "{":
            name, _ = yield from cursor.until("\n", most=MAX_NAME_CHARS)
            yield from cursor.space()
            fence = (yield from cursor.literal("```json")) is not None
        yield from cursor.space()
        yield from read_arguments(cursor, calls, name.split("[CALL_ID]")[0])
        yield from cursor.space()
        if fence:
            yield from cursor.literal("```")
            yield from cursor.space()
        if self.end:
            yield from cursor.literal(self.end)


def read_arguments(cursor: Cursor, calls: Calls, name: str) -> Reading[None]:
    """An object of arguments after its name."""
    if (yield from cursor.peek()) != "{":
        raise Malformed
    calls.begin(name)
    yield from cursor.json_value(into=calls.piece)
    calls.end()
