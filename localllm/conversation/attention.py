"""Alerts a user who looks at another window: bell, notification (OSC 9), window title (`ui.notify`).

Foreign text is cleaned and comes after our own words: some terminals take an OSC 9 payload that starts with a number
as a command.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from localllm.terminal import clean_line, fit

BELL = "\x07"
SAVE_TITLE, RESTORE_TITLE = "\x1b[22;2t", "\x1b[23;2t"
TITLE_CELLS = 60


def osc(number: int, text: str) -> str:
    """An operating system command with cleaned text."""
    return f"\x1b]{number};{clean_line(text)}{BELL}"


def through_tmux(sequence: str) -> str:
    """Wrap a sequence so that tmux passes it on to the terminal; unchanged outside tmux."""
    if not os.environ.get("TMUX"):
        return sequence
    return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"


class Attention:
    """Tracks whether the terminal's window is in front, and alerts the user when it is not.

    when    never | unfocused | always
    write   writes to the terminal, bypassing the screen
    """

    def __init__(self, when: str, write: Callable[[str], None]) -> None:
        self._when, self._write = when, write
        self._in_front = True
        self._titled = False

    def call(self, title: str, what: str) -> None:
        if self._when == "never" or (self._when == "unfocused" and self._in_front):
            return
        text = f"localllm: {what}" + (f" · {fit(clean_line(title), TITLE_CELLS)}" if clean_line(title) else "")
        self._write(BELL + through_tmux(osc(9, text)))
        if not self._in_front:
            self._write(("" if self._titled else SAVE_TITLE) + osc(2, text))
            self._titled = True

    def look(self, in_front: bool) -> None:
        """Report that the window came to the front, or left it."""
        self._in_front = in_front
        if in_front:
            self.end()

    def end(self) -> None:
        """Restore the window title."""
        if self._titled:
            self._titled = False
            self._write(RESTORE_TITLE)
