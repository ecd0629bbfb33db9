"""A question above the prompt that must be answered before the chat goes on: nothing is done without being asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from textual import events, on
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option


class Choice(NamedTuple):
    """One way on: the letter that takes it, its name, what it does."""

    key: str
    name: str
    text: str


class Choices(OptionList):
    """Hidden until `offer`; answers with `Chosen`. Letters choose at once."""

    @dataclass
    class Chosen(Message):
        """`name` is that of the choice; `topic` what it was about."""

        topic: str
        name: str

    def __init__(self) -> None:
        super().__init__(id="choices", markup=False)
        self.display = False
        self.topic = ""
        self._choices: Sequence[Choice] = ()

    def offer(self, topic: str, title: str, choices: Sequence[Choice]) -> None:
        """Ask. The last choice is what Esc means."""
        self.topic, self._choices = topic, choices
        self.border_title = title
        self.clear_options()
        self.add_options([Option(f"[{choice.key}] {choice.text}", id=choice.name) for choice in choices])
        self.display = True
        self.focus()
        self.highlighted = 0

    def close(self) -> None:
        self.topic = ""
        self.display = False

    def cancel(self) -> None:
        if self._choices:
            self._answer(self._choices[-1].name)

    def _answer(self, name: str) -> None:
        topic = self.topic
        self.close()
        self.post_message(self.Chosen(topic, name))

    def on_key(self, event: events.Key) -> None:
        found = [choice for choice in self._choices if choice.key == event.key]
        if found:
            event.stop()
            self._answer(found[0].name)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._answer(str(event.option_id))
