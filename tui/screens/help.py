"""F1: all keys and commands, with their current bindings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from localllm.conversation.slash import SLASHES
from localllm.tui.keymap import KEYS, Keymap

from .dialogs import Modal

FIXED = (
    ("^P", "command palette, including themes"),
    ("↑  ↓", "previously sent messages"),
    ("PgUp  PgDn  wheel", "scroll; End follows the answer again"),
    ("Tab", "complete a command or a file"),
)


class Rows(Widget):
    """Keys and what they do. A single widget: with three per row the screen took most of a second to open."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--meaning"}

    def __init__(self, rows: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._rows = rows

    def render(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(width=30 if self.app.size.width >= 100 else min(18, self.app.size.width // 3))
        table.add_column(style=self.get_visual_style("rows--meaning").rich_style, ratio=1)
        for row in self._rows:
            table.add_row(*map(Text, row))
        return table


class HelpScreen(Modal[None]):
    """Closes on any key that one would try."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,enter,f1", "leave", "Close")]

    def __init__(self, keymap: Keymap) -> None:
        super().__init__()
        self._keymap = keymap

    def compose(self) -> ComposeResult:
        commands = [(f"/{s.name} {s.argument}".rstrip(), s.meaning) for s in SLASHES]
        tables = {
            "Keys": [*self._keys("prompt"), *self._keys("chat"), *FIXED],
            "Browse: Esc, then": self._keys("browse"),
            "Commands": [*commands, ("//text", "send a message that starts with /")],
        }
        with VerticalScroll(id="help"):
            for title, rows in tables.items():
                yield Static(title, classes="head" if title == "Keys" else "head second", markup=False)
                yield Rows(rows)
            note = "Esc closes this help. To change keys, use [keys] in the settings."
            yield Static(note, classes="note", markup=False)

    def _keys(self, where: str) -> list[tuple[str, str]]:
        return [(self._keymap.labels(name), key.meaning) for name, key in KEYS.items() if key.where == where]
