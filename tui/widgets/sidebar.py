"""The list of saved chats: newest first under the days, narrowed by what is typed above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from localllm.history.records import SavedChat, day_of
from localllm.terminal import clean_line, fit

SHOWN = 200


class Sidebar(Vertical):
    """Chats and their filter. Knows no database: the screen fills it, and is asked for more with `Wanted`."""

    @dataclass
    class Wanted(Message):
        """The filter has changed."""

        query: str

    @dataclass
    class Opened(Message):
        """A chat was chosen."""

        chat_id: str

    class Left(Message):
        """Esc."""

    def __init__(self) -> None:
        super().__init__(id="sidebar")
        self._now = ""

    def compose(self) -> ComposeResult:
        self.border_title = "Chats"
        yield Input(placeholder="search", compact=True, id="chat-filter")
        yield OptionList(markup=False, compact=True, id="chat-list")

    def show(self, chats: Sequence[SavedChat], now: str) -> None:
        """Fill the list; `now` is the id of the chat on the screen."""
        self._now = now
        listing = self.query_one(OptionList)
        listing.clear_options()
        listing.add_options(list(self._options(chats[:SHOWN])))
        ids = [option.id for option in listing.options]
        if now in ids:
            listing.highlighted = ids.index(now)

    def _options(self, chats: Sequence[SavedChat]) -> Iterator[Option]:
        day = ""
        for chat in chats:
            if day_of(chat.updated) != day:
                day = day_of(chat.updated)
                yield Option(day, disabled=True)
            mark = "▌" if chat.id == self._now else " "
            yield Option(mark + fit(clean_line(chat.title) or "untitled", 60), id=chat.id)
        if not chats:
            yield Option("nothing found" if self.query_one(Input).value else "no chats yet", disabled=True)

    def focus_filter(self) -> None:
        box = self.query_one(Input)
        box.focus()
        box.select_all()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Wanted(event.value))

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        listing = self.query_one(OptionList)
        first = next((option.id for option in listing.options if option.id), None)
        if first is not None:
            self.post_message(self.Opened(first))

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_id:
            self.post_message(self.Opened(event.option_id))

    def on_key(self, event: events.Key) -> None:
        if event.key == "escape":
            event.stop()
            self.post_message(self.Left())
        elif event.key == "down" and self.query_one(Input).has_focus:
            event.stop()
            self.query_one(OptionList).focus()
