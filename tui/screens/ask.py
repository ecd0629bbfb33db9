"""A line to type into: a path, something to search for. Answers with the text, or None."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input


class AskScreen(ModalScreen[str | None]):
    """Enter answers, Esc does not."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "leave", "Close")]

    def __init__(self, title: str, placeholder: str = "", value: str = "") -> None:
        super().__init__()
        self._title = title
        self._input = Input(value, placeholder=placeholder, compact=True)

    def compose(self) -> ComposeResult:
        """A frame with the line in it."""
        with Vertical(classes="box") as box:
            box.border_title = self._title
            box.border_subtitle = "⏎ ok · esc"
            yield self._input

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)

    def action_leave(self) -> None:
        """No answer."""
        self.dismiss(None)
