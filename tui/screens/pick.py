"""A list narrowed by typing. Answers with the chosen row's value, or None."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from localllm.terminal import fit

from .modal import Modal

SHOWN = 200


class PickScreen(Modal[str | None]):
    """`rows` are (value, what is shown)."""

    def __init__(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title = title
        self._rows = rows
        self._found = list(rows[:SHOWN])

    def compose(self) -> ComposeResult:
        with Vertical(classes="box -tall") as box:
            box.border_title = self._title
            yield Input(placeholder="search", compact=True)
            yield OptionList(markup=False, compact=True)

    def on_mount(self) -> None:
        self._show("")

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._show(event.value)

    def _show(self, text: str) -> None:
        words = text.casefold().split()
        self._found = [row for row in self._rows if all(word in row[1].casefold() for word in words)][:SHOWN]
        listing = self.query_one(OptionList)
        listing.clear_options()
        listing.add_options([Option(fit(shown, 200)) for _, shown in self._found])
        listing.highlighted = 0 if self._found else None

    def on_key(self, event: events.Key) -> None:
        if event.key in ("up", "down"):
            event.stop()
            listing = self.query_one(OptionList)
            listing.action_cursor_up() if event.key == "up" else listing.action_cursor_down()

    @on(Input.Submitted)
    def _entered(self) -> None:
        at = self.query_one(OptionList).highlighted
        self.dismiss(self._found[at][0] if at is not None and self._found else None)

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._found[event.option_index][0])
