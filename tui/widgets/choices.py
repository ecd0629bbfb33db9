"""A question above the prompt that must be answered before the chat continues.

It appears on its own, so it never takes the focus: Tab moves to it, and typing goes to the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from textual import events, on
from textual.message import Message
from textual.widgets import OptionList


class Choice(NamedTuple):
    """One option: its letter, its text, and its action."""

    key: str
    text: str
    take: Callable[[], Awaitable[None]]


class Choices(OptionList):
    """Hidden until `offer`; answers with `Chosen`. With the focus, letters choose directly."""

    @dataclass
    class Chosen(Message):
        """An option was chosen."""

        choice: Choice

    def __init__(self) -> None:
        super().__init__(id="choices", markup=False)
        self.display = False
        self._choices: Sequence[Choice] = ()
        self._title, self._asked_at = "", 0.0

    def offer(self, title: str, choices: Sequence[Choice]) -> None:
        """Ask a question. Esc takes the last choice."""
        if self.has_focus:  # still focused from the previous question
            self.blur()
        self._choices, self._title, self._asked_at = choices, title, time.monotonic()
        self.set_options(f"[{choice.key}] {choice.text}" for choice in choices)
        self.display = True
        self.highlighted = 0
        self._update_title(self.has_focus)

    def _update_title(self, focused: bool) -> None:
        self.border_title = self._title if focused else f"{self._title} · Tab to choose"

    def on_focus(self) -> None:
        self._update_title(True)

    def on_blur(self) -> None:
        self._update_title(False)

    def cancel(self) -> None:
        if self._choices:
            self._answer(self._choices[-1])

    def _answer(self, choice: Choice) -> None:
        self.display = False
        self.post_message(self.Chosen(choice))

    def on_key(self, event: events.Key) -> None:
        for choice in self._choices:
            if choice.key == event.key and event.time >= self._asked_at:
                event.stop()
                self._answer(choice)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._answer(self._choices[event.option_index])
