"""Corrects Textual's parsing of terminal input: Alt+Enter, and Esc in pasted text."""

from __future__ import annotations

from collections.abc import Iterable

from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.events import Key
from textual.message import Message

ESC = "\x1b"
ALT_ENTER = (f"{ESC}\r", f"{ESC}\n")  # sent for Alt+Enter by terminals without the Kitty protocol


class InputParser(XTermParser):
    """Textual's parser turns Alt+Enter into Enter, and text after a pasted Esc into keys, including Enter."""

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._pasted: str | None = None  # pasted text so far; None outside a paste
        self._seen = ""  # the end of the input, which may be half of a paste's start mark

    def feed(self, data: str) -> Iterable[Message]:
        """Pass a pasted text on in one piece and without Esc."""
        if not data:
            yield from super().feed(data)
        while data:
            if self._pasted is None:
                before, mark, after = (self._seen + data).partition(BRACKETED_PASTE_START)
                head, data = data[: len(data) - len(after)], after
                self._pasted = "" if mark else None
                self._seen = "" if mark else before[1 - len(BRACKETED_PASTE_START) :]
                yield from super().feed(head)
            else:
                text, mark, data = (self._pasted + data).partition(BRACKETED_PASTE_END)
                self._pasted = None if mark else text
                if mark:
                    yield from super().feed(text.replace(ESC, "") + mark)

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[Key]:
        return (Key("alt+enter", None),) if sequence in ALT_ENTER else super()._sequence_to_key_events(sequence, alt)
