"""The list of saved chats, newest first, grouped by day and narrowed by the filter above."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from localllm.history.records import SavedChat, day_of
from localllm.terminal import clean_line, fit

SHOWN = 200


class Sidebar(Vertical):
    """Chats and their filter. Knows no database: the screen fills it and handles typing and choosing."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "screen.leave_chats"), ("down", "list")]

    def __init__(self) -> None:
        super().__init__(id="sidebar")
        self._now = ""

    def compose(self) -> ComposeResult:
        self.border_title = "Chats"
        yield Input(placeholder="search", compact=True, id="chat-filter")
        yield OptionList(markup=False, compact=True, id="chat-list")

    def show(self, chats: Sequence[SavedChat], now: str) -> None:
        """Fill the list; `now` is the id of the current chat."""
        self._now = now
        listing = self.query_one(OptionList)
        listing.set_options(self._options(chats[:SHOWN]))
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
            yield Option("no matches" if self.query_one(Input).value else "no chats yet", disabled=True)

    def focus_filter(self) -> None:
        box = self.query_one(Input)
        box.focus()
        box.select_all()

    @property
    def first(self) -> str | None:
        return next((option.id for option in self.query_one(OptionList).options if option.id), None)

    def action_list(self) -> None:
        self.query_one(OptionList).focus()
