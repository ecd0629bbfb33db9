"""Parser for gpt-oss's harmony format: an answer is a sequence of messages, each with a header for its channel.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{...}<|call|>`: analysis is reasoning, commentary to a function is a call, everything else is content. A
message to a tool that was not offered is reasoning: the model was trained with `python`, `browser.search` and
`container.exec`. The prompt ends with `<|start|>assistant`, so the first header has no start.
Muse Glimmer uses the same format with recipients instead of channels: ` to=self`, ` to=user`, a function.
"""

from __future__ import annotations

import re
from typing import Any

from .answers import MAX_FAILURES, AnswerParser, HeldSpace
from .call_reader import CallReader
from .cursor import Malformed, Reading
from .formats import BY_NAME, ToolFormat

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|eom|>", "<|eot|>", START)
MAX_HEADER_CHARS = 512
_RECIPIENT = re.compile(r"to=(functions\.)?([\w.-]+)")
_NO_TOOLS = frozenset(["user", "assistant", "all"])  # recipients of text


class HarmonyParser(AnswerParser):
    """Splits one streamed answer into ("reasoning" | "content", text) and ("tool_call", JSON of a delta)."""

    def __init__(self, tool_format: ToolFormat, *options: Any) -> None:
        super().__init__(*options)
        self._reads = BY_NAME[tool_format.reads_as] if tool_format.reads_as else None
        self._reader = CallReader(self._reads or tool_format, self._cursor, self._calls)

    def _answer(self) -> Reading[None]:
        header = yield from self._cursor.literal(CHANNEL, START, " to=", "to=")
        while True:
            if header is None:  # outside a message: plain text up to the next header
                begins = (START, CHANNEL) if self._failures < MAX_FAILURES else ()
                header = yield from self._cursor.rest(*begins, into=self._emit_content)
                if header is None:
                    return
            self._cursor.mark()
            header = yield from self._message(header)
            if header is None and self._cursor.is_at_end:
                return

    def _message(self, begun: str) -> Reading[str | None]:
        """Read the rest of a header and the message's body. Returns the start of the next header, or None."""
        try:
            header, _ = yield from self._cursor.until(MESSAGE, most=MAX_HEADER_CHARS)
        except Malformed:
            self._failures += 1
            self._emit_content(begun)
            self._cursor.give_back(0)
            return None
        header = begun + header
        prefix, name = found.groups() if (found := _RECIPIENT.search(header)) else (None, "")
        if not prefix and name in _NO_TOOLS:
            name = ""
        if name and not self._is_full and (prefix or self._calls.knows(name)):
            yield from self._call(name)
            return (yield from self._next())
        is_thought = not prefix if name else f"{CHANNEL}analysis" in header
        self._cursor.mark()
        ended = yield from self._cursor.rest(*ENDS, into=self._emit_reasoning if is_thought else self._emit_content)
        return START if ended == START else (yield from self._next())

    def _next(self) -> Reading[str | None]:
        """Read the start of the next header after the end of a message."""
        self._cursor.mark()
        return (yield from self._cursor.literal(START, CHANNEL))

    def _call(self, name: str) -> Reading[None]:
        self._cursor.mark()
        before = self._calls.count
        try:
            yield from self._cursor.space()
            if self._reads is not None:
                yield from self._reader.read((yield from self._cursor.expect(*self._reads.triggers)))
            else:
                self._calls.begin(name)
                yield from self._cursor.json_value(into=self._calls.piece)
                self._calls.end()
        except Malformed:
            self._calls.drop()
            if self._calls.count == before:
                self._emit_content(self._cursor.read_since_mark())
        self._cursor.mark()
        yield from self._cursor.rest(*ENDS, into=HeldSpace(self._emit_content, after_call=True).push)

    def _emit_reasoning(self, text: str) -> None:
        self._parts.append(("reasoning", text))
