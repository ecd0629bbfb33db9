"""A text to read: the log, a raw message, or the output of another command of this program."""

from __future__ import annotations

import contextlib
import os
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from localllm.terminal import clean
from localllm.tui.downloads import start_own

from .dialogs import Modal

LOG_BYTES = 64 << 10


class Viewer(Modal[None]):
    """Esc closes, `y` copies. With `command`, shows the output of that command of ours, line by line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,f9,f12", "leave", "Close"), Binding("y,c", "copy", "Copy")]

    def __init__(self, title: str, text: str = "", *, command: tuple[str, ...] = (), at_end: bool = False) -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._command = command
        self._at_end = at_end

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box -tall -wide") as box:
            box.border_title = self._title
            box.border_subtitle = "y copy · esc close"
            yield Static(clean(self._text), markup=False)

    def on_mount(self) -> None:
        box = self.query_one(VerticalScroll)
        box.focus()
        if self._command:
            self._run()
        elif self._at_end:
            self.call_after_refresh(box.scroll_end, animate=False)

    @work(exclusive=True, exit_on_error=False)
    async def _run(self) -> None:
        env = dict(os.environ) | {"NO_COLOR": "1", "COLUMNS": str(max(40, self.app.size.width - 8))}
        process = await start_own(*self._command, stdout=PIPE, stderr=STDOUT, env=env)
        assert process.stdout is not None
        text = self.query_one(Static)
        text.update("…")
        try:
            async for line in process.stdout:
                self._text += line.decode("utf-8", "replace")
                text.update(clean(self._text))
            await process.wait()
        finally:  # stop a command when nobody reads it any more
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        if not self._text:
            text.update("no output")

    def action_copy(self) -> None:
        self.query_one(VerticalScroll).border_subtitle = self.frame.copy(self._text)


def show_command(app: App[Any], *words: str, then: Callable[[], Any] | None = None) -> None:
    """Show the output of another command of this program; `then` is called when the view is closed."""
    app.push_screen(Viewer(f"localllm {' '.join(words)}", command=words), lambda _: then() if then else None)


def log_text(path: Path | None) -> str:
    """The end of the log file."""
    if path is None:
        return "no log file"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return f"{path}\n\n" + file.read(LOG_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return f"{path}: {error.strerror}"
