"""F1: the keys and commands that exist."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
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
        with VerticalScroll(id="help"):
            yield Static(self._text(), markup=False)

    def _text(self) -> Content:
        commands = [(f"/{s.name} {s.argument}".rstrip(), s.meaning) for s in SLASHES]
        width = max(len(key) for key, _ in (*KEYS, *commands)) + 3
        lines = [Content.styled("Keys", "bold $primary")]
        lines += [Content(key.ljust(width) + meaning) for key, meaning in KEYS]
        lines += [Content(""), Content.styled("Commands", "bold $primary")]
        lines += [Content(key.ljust(width) + meaning) for key, meaning in commands]
        lines += [Content("//text".ljust(width) + "send a message that begins with /"), Content("")]
        lines.append(Content.styled("Esc closes this.", "dim"))
        return Content("\n").join(lines)

    def action_dismiss_help(self) -> None:
        """Go back to the chat."""
        self.dismiss(None)
