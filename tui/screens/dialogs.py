"""Screens over the chat that ask for one thing: a text, or a row of a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen, ScreenResultType
from textual.widgets import Input, OptionList

from localllm.terminal import fit
from localllm.tui.frame import Frame

SHOWN = 200


class Modal(ModalScreen[ScreenResultType]):
    """Base of every screen over the chat: access to the frame, and keys that close it without an answer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "leave", "Close")]

    @property
    def frame(self) -> Frame:
        return cast(Frame, self.app)

    def action_leave(self) -> None:
        self.dismiss(None)


class AskScreen(Modal[str | None]):
    """A line to type into: a path, or a search text. Enter returns it."""

    def __init__(self, title: str, placeholder: str = "", value: str = "") -> None:
        super().__init__()
        self._title = title
        self._input = Input(value, placeholder=placeholder, compact=True)

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = self._title
            box.border_subtitle = "⏎ ok · esc"
            yield self._input

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class PickScreen(Modal[str | None]):
    """A list narrowed by typing. `rows` are (value, display text); returns the chosen value."""

    BINDINGS: ClassVar[list[BindingType]] = [("up", "move('up')"), ("down", "move('down')")]

    def __init__(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title = title
        self._rows = rows
        self._found: list[tuple[str, str]] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="box -tall") as box:
            box.border_title = self._title
            yield Input(placeholder="search", compact=True)
            yield OptionList(markup=False, compact=True)

    def on_mount(self) -> None:
        self._narrow()

    @on(Input.Changed)
    def _narrow(self) -> None:
        words = self.query_one(Input).value.casefold().split()
        self._found = [row for row in self._rows if all(word in row[1].casefold() for word in words)][:SHOWN]
        listing = self.query_one(OptionList)
        listing.set_options(fit(shown, 200) for _, shown in self._found)
        listing.highlighted = 0 if self._found else None

    async def action_move(self, where: str) -> None:
        await self.query_one(OptionList).run_action(f"cursor_{where}")

    @on(Input.Submitted)
    def _entered(self) -> None:
        at = self.query_one(OptionList).highlighted
        self.dismiss(None if at is None else self._found[at][0])

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._found[event.option_index][0])
