"""F1: the keys and commands that exist, as they are bound."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Static

from localllm.conversation.slash import SLASHES
from localllm.tui.keymap import KEYS, Keymap

from .dialogs import Modal

FIXED = (
    ("^P", "palette: everything by name, themes too"),
    ("↑  ↓", "messages sent before"),
    ("PgUp  PgDn  wheel", "scroll; End follows the answer again"),
    ("Tab", "complete a command or a file"),
)


class HelpScreen(Modal[None]):
    """Closes on any of the keys one would try."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,enter,f1", "leave", "Close")]

    def __init__(self, keymap: Keymap) -> None:
        super().__init__()
        self._keymap = keymap

    def compose(self) -> ComposeResult:
        commands = [(f"/{s.name} {s.argument}".rstrip(), s.meaning) for s in SLASHES]
        tables = {
            "Keys": [*self._keys("prompt"), *self._keys("chat"), *FIXED],
            "Browse: Esc, then": self._keys("browse"),
            "Commands": [*commands, ("//text", "send a message that begins with /")],
        }
        with VerticalScroll(id="help"):
            for title, rows in tables.items():
                yield Static(title, classes="head" if title == "Keys" else "head second", markup=False)
                for key, meaning in rows:
                    with Horizontal():
                        yield Static(key, classes="key", markup=False)
                        yield Static(meaning, classes="meaning", markup=False)
            note = "Esc closes this. Keys are changed under [keys] in the settings."
            yield Static(note, classes="note", markup=False)

    def _keys(self, where: str) -> list[tuple[str, str]]:
        return [(self._keymap.labels(name), key.meaning) for name, key in KEYS.items() if key.where == where]
