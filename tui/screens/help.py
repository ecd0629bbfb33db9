"""F1: the keys and commands that exist."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from localllm.tui.conversation import SLASHES

KEYS = (
    ("Enter", "send; while an answer runs, the message waits its turn"),
    ("Shift+Enter  Alt+Enter  Ctrl+J", "new line (so does a \\ before Enter)"),
    ("Esc", "stop the answer"),
    ("Ctrl+C", "copy the selection, stop, clear the prompt; twice to quit"),
    ("Ctrl+D  Ctrl+Q", "quit (Ctrl+D when the prompt is empty)"),
    ("Ctrl+N", "new chat"),
    ("Ctrl+T", "open and close thinking"),
    ("↑  ↓", "messages sent before"),
    ("PageUp  PageDown  wheel", "scroll; End follows the answer again"),
    ("Tab", "complete a command"),
    ("Ctrl+P", "palette: themes and more"),
)


class HelpScreen(ModalScreen[None]):
    """Closes on any of the keys one would try."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,f1", "dismiss_help", "Close"),
    ]

    def compose(self) -> ComposeResult:
        """Two lists."""
        commands = [(f"/{s.name} {s.argument}".rstrip(), s.meaning) for s in SLASHES]
        commands.append(("//text", "send a message that begins with /"))
        with VerticalScroll(id="help"):
            for title, rows in (("Keys", KEYS), ("Commands", commands)):
                yield Static(title, classes="head" if title == "Keys" else "head second", markup=False)
                for key, meaning in rows:
                    with Horizontal():
                        yield Static(key, classes="key", markup=False)
                        yield Static(meaning, classes="meaning", markup=False)
            yield Static("Esc closes this.", classes="note", markup=False)

    def action_dismiss_help(self) -> None:
        """Go back to the chat."""
        self.dismiss(None)
