"""Readers of calls whose arguments stand between tags, one by one, as plain text: Qwen-Coder, GLM, DeepSeek V3.2."""

from __future__ import annotations

from dataclasses import dataclass

from .calls import MAX_NAME_CHARS, Calls, quoted
from .cursor import Cursor, Malformed, Reading

MAX_BRACES = 64  # objects and lists inside each other


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """`begin NAME name_end (key KEY key_end VALUE value_end)* end close`, white space between the parts."""

    begin: str  # before the name; "" where the trigger is
    name_end: tuple[str, ...]
    key: str
    # ends the key and begins the value; an attribute that says what the value is may stand in it
    key_end: tuple[str, ...]
    value_end: tuple[str, ...]  # the first form that is found
    end: str
    close: str = ""
    on_lines: bool = False  # values stand on lines of their own
    many: bool = False  # several calls stand in one section
    bare_triggers: tuple[str, ...] = ()  # triggers that are the beginning of the call itself
    text_mark: str = ""  # a key_end that says that the value is text whatever it looks like
    json_mark: str = ""

    def read(self, cursor: Cursor, calls: Calls, trigger: str) -> Reading[None]:
        first = trigger not in self.bare_triggers
        while True:
            if first and self.begin:
                yield from cursor.space()
                yield from cursor.expect(self.begin)
            yield from self._call(cursor, calls)
            cursor.mark()
            yield from cursor.space()
            if not self.many or (self.close and (yield from cursor.literal(self.close)) is not None):
                break
            if cursor.is_at_end:
                return
            first = True
        if self.close and not self.many:
            yield from cursor.literal(self.close)

    def _call(self, cursor: Cursor, calls: Calls) -> Reading[None]:
        name, ended = yield from cursor.until(*self.name_end, most=MAX_NAME_CHARS)
        calls.begin(name)
        calls.piece("{")
        number = 0
        opened = ended == self.key
        while ended != self.end:
            yield from cursor.space()
            if not opened and (yield from cursor.expect(self.key, self.end)) == self.end:
                break
            opened = False
            yield from self._argument(cursor, calls, first=number == 0)
            number += 1
        calls.piece("}")
        calls.end()

    def _argument(self, cursor: Cursor, calls: Calls, *, first: bool) -> Reading[None]:
        key, mark = yield from cursor.until(*self.key_end, most=MAX_NAME_CHARS)
        key = key.strip()
        if self.on_lines:
            yield from cursor.literal("\n")
        calls.piece(("" if first else ", ") + quoted(key) + ": ")
        is_text = mark == self.text_mark if mark in (self.text_mark, self.json_mark) and mark else calls.takes_text(key)
        if is_text:
            calls.piece('"')
            yield from cursor.until(*self.value_end, into=lambda text: calls.piece(quoted(text)[1:-1]))
            calls.piece('"')
        else:
            value, _ = yield from cursor.until(*self.value_end)
            calls.piece(calls.value_text(key, value))


@dataclass(frozen=True, slots=True)
class BracedCalls:
    """Gemma: `call:NAME{key:value,...}`; strings stand between `quote`s, lists and objects as in JSON, keys bare."""

    quote: str
    close: str

    def read(self, cursor: Cursor, calls: Calls, trigger: str) -> Reading[None]:
        """The call after a trigger."""
        yield from cursor.space()
        yield from cursor.expect("call:")
        name, _ = yield from cursor.until("{", most=MAX_NAME_CHARS)
        calls.begin(name)
        yield from self._row(cursor, calls, 1, "{}")
        calls.end()
        yield from cursor.space()
        yield from cursor.literal(self.close)

    def _row(self, cursor: Cursor, calls: Calls, depth: int, brackets: str) -> Reading[None]:
        """An object or a list, after its opening bracket."""
        if depth > MAX_BRACES:
            raise Malformed
        opening, closing = brackets[0], brackets[1]
        calls.piece(opening)
        separator = ""
        while True:
            yield from cursor.space()
            if (yield from cursor.literal(closing)) is not None:
                break
            if separator:
                yield from cursor.expect(",")
                yield from cursor.space()
            key = quoted((yield from self._key(cursor)).strip()) + ": " if opening == "{" else ""
            calls.piece(separator + key)
            yield from self._value(cursor, calls, depth)
            separator = ", "
        calls.piece(closing)

    def _key(self, cursor: Cursor) -> Reading[str]:
        if (yield from cursor.literal(self.quote)) is not None:
            key, _ = yield from cursor.until(self.quote, most=MAX_NAME_CHARS)
            yield from cursor.space()
            yield from cursor.expect(":")
        else:
            key, _ = yield from cursor.until(":", most=MAX_NAME_CHARS)
        return key

    def _value(self, cursor: Cursor, calls: Calls, depth: int) -> Reading[None]:
        yield from cursor.space()
        begun = yield from cursor.literal(self.quote, "{", "[")
        if begun == self.quote:
            calls.piece('"')
            yield from cursor.until(self.quote, into=lambda text: calls.piece(quoted(text)[1:-1]))
            calls.piece('"')
        elif begun == "{":
            yield from self._row(cursor, calls, depth + 1, "{}")
        elif begun == "[":
            yield from self._row(cursor, calls, depth + 1, "[]")
        else:
            value = yield from cursor.json_value()
            calls.piece(calls.value_text("", value))
