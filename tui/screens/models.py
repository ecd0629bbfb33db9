"""Ctrl+O: local models and downloads, with their memory use and expected speed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import DataTable, Input, Static

from localllm.interface import ModelChoice
from localllm.terminal import clean_line, fit, gib, params_short, tokens_short
from localllm.tui.downloads import fetch
from localllm.tui.widgets.engine import MEMORY_MARKS, memory_bar
from localllm.tui.widgets.home import pace

from .dialogs import Modal
from .viewer import show_command

WINDOWS = (None, 4096, 8192, 16384, 32768, 65536, 131072)  # context lengths; None leaves it to the plan
SCOPES = ("all", "on disk", "fits")
COLUMNS = (  # (minimum width of the terminal, columns shown)
    (100, ("MODEL", "QUANT", "SIZE", "MEMORY", "MAX CTX", "SPEED", "STATUS")),
    (80, ("MODEL", "QUANT", "SIZE", "SPEED", "STATUS")),
    (56, ("MODEL", "SIZE", "STATUS")),
    (0, ("MODEL", "STATUS")),
)


class Table(DataTable[Text]):
    """Keeps the row under the cursor in view, even when the details below take room from the table."""

    def on_resize(self) -> None:
        self.call_after_refresh(lambda: self.move_cursor(row=self.cursor_row))


class ModelsScreen(Modal[tuple[str, int | None] | None]):
    """Returns (name, requested context), or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+o", "leave", "Close"),
        Binding("slash", "filter", "Filter"),
        Binding("down", "table", "Table"),
        Binding("tab", "scope", "Scope", priority=True),
        Binding("left", "window(-1)", "Less context"),
        Binding("right", "window(1)", "More context"),
        Binding("q", "quant", "Quant"),
        Binding("d", "download", "Download only"),
        Binding("i", "info", "Information"),
        Binding("x", "remove", "Remove"),
    ]

    def __init__(self, now: str, tell: Callable[[str], None]) -> None:
        """`now` is the running model; `tell` reports the progress of a download, even after this screen is closed."""
        super().__init__()
        self._now, self._tell = now, tell
        self._rows: list[ModelChoice] | None = None  # None until they have been looked up
        self._shown: list[ModelChoice] = []
        self._window = 0
        self._scope = 0
        self._armed = ""
        self._columns: tuple[str, ...] = ()
        self._quants: dict[str, str] = {}  # name of a row -> name of the format shown in its place

    def compose(self) -> ComposeResult:
        with Vertical(id="models") as box:
            box.border_title = "Models"
            yield Input(placeholder="/ filter", compact=True, id="model-filter")
            yield Table(cursor_type="row", id="model-table")
            yield Static(id="model-detail", markup=False)

    def on_mount(self) -> None:
        self._set_columns()
        self.query_one(DataTable).focus()
        self._subtitle()
        self._look()

    def on_resize(self) -> None:
        at = self.row.name if self.row else ""
        if self._set_columns():
            self._fill(at)
        else:
            self._detail()

    def _set_columns(self) -> bool:
        """Choose columns for the terminal's width. Returns whether they have changed."""
        width = self.app.size.width
        names = next(names for least, names in COLUMNS if width >= least)
        if names == self._columns:
            return False
        table, self._columns = self.query_one(DataTable), names
        table.clear(columns=True)
        for name in names:
            table.add_column(name, key=name)
        return True

    @work(exclusive=True, group="models", exit_on_error=False)
    async def _look(self) -> None:
        choices = self.frame.session.backend.choices
        self._rows = await asyncio.to_thread(choices, WINDOWS[self._window])
        self._fill()

    def _subtitle(self) -> None:
        window = WINDOWS[self._window]
        box = self.query_one("#models")
        box.border_title = f"Models · {SCOPES[self._scope]} · ctx ◂ {tokens_short(window) if window else 'auto'} ▸"
        box.border_subtitle = "⏎ use · q quant · d download · i info · x remove · / filter · Tab scope · ←→ context"

    def _fill(self, before: str = "") -> None:
        """Fill the table. `before` names the row to keep under the cursor when its name has changed."""
        before = before or (self.row.name if self.row else "")
        words = self.query_one(Input).value.casefold().split()
        scope = SCOPES[self._scope]
        self._shown = [
            row for row in (self._chosen(row) for row in self._rows or ())
            if all(word in f"{row.name} {row.format} {row.note}".casefold() for word in words)
            and (scope == "all" or (row.local if scope == "on disk" else row.fits))
        ]  # fmt: skip
        table = self.query_one(DataTable)
        table.clear()
        for row in self._shown:
            cells = _cells(row, self._columns, self._now)
            table.add_row(*[Text(cells[name]) for name in self._columns])  # a str would be read as markup
        if self._shown:
            names = [row.name for row in self._shown]  # the cursor follows its row
            table.move_cursor(row=names.index(before) if before in names else 0)
        self._detail()

    def _chosen(self, row: ModelChoice) -> ModelChoice:
        """The row, or the format chosen in its place, with the same formats to choose from."""
        name = self._quants.get(row.name)
        other = next((one for one in row.quants if one.name == name), None)
        if other is None:
            return row
        return replace(other, quants=tuple(one for one in _formats(row) if one.name != other.name))

    @property
    def row(self) -> ModelChoice | None:
        at = self.query_one(DataTable).cursor_row
        return self._shown[at] if 0 <= at < len(self._shown) else None

    def _say(self, text: str | Content) -> None:
        self.query_one("#model-detail", Static).update(text)

    def _detail(self) -> None:
        if row := self.row:
            self._say(Content("\n").join(detail_lines(row, max(30, self.query_one("#model-detail").size.width))))
        else:
            none = "looking …" if self._rows is None else "no models"
            self._say("no model matches this filter" if self._rows else none)

    # --- keys --------------------------------------------------------------------------------------------------------

    @on(DataTable.RowHighlighted)
    def _moved(self) -> None:
        self._armed = ""
        self._detail()

    @on(DataTable.RowSelected)
    def _selected(self) -> None:
        if not (row := self.row):
            return
        if not row.supported:
            self._say(f"✗ {clean_line(row.reason)}")
        elif not row.local and self.frame.options.offline:
            self._say("✗ offline: only models on this disk can be used")
        else:
            window = WINDOWS[self._window]  # a model with a smaller limit was planned with that limit
            self.dismiss((row.name, window and min(window, row.ctx or window)))

    @on(Input.Changed)
    def _typed(self) -> None:
        self._fill()

    @on(Input.Submitted)
    def action_table(self) -> None:
        self.query_one(DataTable).focus()

    def action_filter(self) -> None:
        self.query_one(Input).focus()

    def action_scope(self) -> None:
        self._scope = (self._scope + 1) % len(SCOPES)
        self._subtitle()
        self._fill()

    def action_quant(self) -> None:
        """Show the next format of the same model, by size; after the largest comes the smallest."""
        if not (row := self.row):
            return
        if not row.quants:
            self._say(f"{clean_line(row.name)} has only one format")
            return
        forms = _formats(row)
        place = [one.name for one in forms].index(row.name)
        other = forms[(place + 1) % len(forms)]
        at = next((number for number, one in enumerate(self._shown) if one.name == other.name), None)
        if at is not None:  # also on this machine, with its own row
            self.query_one(DataTable).move_cursor(row=at)
            return
        head = next(one.name for one in self._rows or () if self._chosen(one).name == row.name)
        self._quants[head] = other.name
        self._fill(other.name)

    def action_window(self, step: int) -> None:
        self._window = (self._window + step) % len(WINDOWS)
        self._subtitle()
        self._look()

    def action_download(self) -> None:
        if (row := self.row) and not row.local and not self.frame.options.offline:
            if not any(w.name == row.name and w.is_running for w in self.app.workers):  # outlives this screen
                self.app.run_worker(fetch(row.name, self._tell), row.name, "downloads", exit_on_error=False)
            self._say(f"downloading {clean_line(row.name)} in the background")

    def action_info(self) -> None:
        if row := self.row:
            show_command(self.app, "show" if row.local else "plan", row.name)

    async def action_remove(self) -> None:
        if not (row := self.row) or not row.local:
            return
        if row.name == self._now:
            self._say("this model is running: choose another one first")
        elif self._armed != row.name:
            self._armed = row.name
            self._say(f"press x again to remove {clean_line(row.name)} ({gib(row.size_bytes)}) for all programs")
        else:
            show_command(self.app, "rm", row.name, "-y", then=self._look)

    def action_leave(self) -> None:
        box = self.query_one(Input)
        if box.has_focus and box.value:
            box.value = ""
            self.action_table()
        else:
            self.dismiss(None)


def _formats(row: ModelChoice) -> list[ModelChoice]:
    """The formats of a model, by size."""
    return sorted((replace(row, quants=()), *row.quants), key=lambda one: one.size_bytes)


def _cells(row: ModelChoice, columns: tuple[str, ...], now: str) -> dict[str, str]:
    """Cell texts by column, as short as the shown columns require."""
    wide = "MEMORY" in columns
    if not row.supported:
        status = "✗ cannot run"
    elif not row.fits:
        short = row.need_bytes - row.have_bytes
        status = f"✗ {gib(short)} short" if wide and short > 0 else "✗ too large"
    else:
        status = "✓ running" if row.name == now else "✓ on disk" if row.local else "↓ download"
    return {
        "MODEL": fit(clean_line(row.name), 40 if wide else 22 if "SIZE" in columns else 18),
        "QUANT": row.format if wide else fit(row.format, 10),
        "SIZE": gib(row.size_bytes),
        "MEMORY": f"{gib(row.need_bytes)} @{tokens_short(row.ctx)}" if row.need_bytes and row.ctx else "–",
        "MAX CTX": tokens_short(row.max_ctx) if row.max_ctx else "–",
        "SPEED": pace(row, "tok/s" if wide else "t/s") if row.tps and row.fits else "–",
        "STATUS": status,
    }


def detail_lines(row: ModelChoice, width: int) -> list[Content]:
    """Details of a row, and its memory bar."""
    size = params_short(row.params) if row.params else ""
    active = f" ({row.active_params / 1e9:.1f} B active)" if 0 < row.active_params < row.params else ""
    parts = [row.license, size + active, row.note or row.reason]
    lines = [Content(fit(clean_line(" · ".join(part for part in parts if part)), width))]
    if row.quality:
        lines.append(Content(fit(f"measured quality against the original: {clean_line(row.quality)}", width)))
    if row.quants:
        names = [f"{'▸ ' if one.name == row.name else ''}{one.format} {gib(one.size_bytes)}" for one in _formats(row)]
        lines.append(Content(fit(clean_line("q " + " · ".join(names)), width)))
    if row.parts:
        whole = max(row.have_bytes, row.need_bytes, 1)
        marks = {name: MEMORY_MARKS.get(name, ("·", ""))[0] for name, _ in row.parts}
        text = [f"{marks[name]} {'KV' if name == 'kv' else name} {gib(size)}" for name, size in row.parts]
        text.append(f"░ free {gib(max(0, row.have_bytes - row.need_bytes))}")
        lines += [memory_bar(row.parts, whole, width), Content(fit("  ".join(text), width))]
    elif row.need_bytes:
        lines.append(Content(f"needs about {gib(row.need_bytes)} of {gib(row.have_bytes)} free"))
    return lines
