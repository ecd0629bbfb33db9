"""A line to type into: a path, something to search for. Answers with the text, or None."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input

from .modal import Modal


class AskScreen(Modal[str | None]):
    """Enter answers."""

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
