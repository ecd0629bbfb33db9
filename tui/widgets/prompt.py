"""Where a message is typed: Enter sends, Shift+Enter, Alt+Enter, Ctrl+J or a trailing backslash begin a new line."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static, TextArea

from localllm.terminal import clean
from localllm.tui.conversation import matching

NEWLINE_KEYS = ("shift+enter", "alt+enter", "ctrl+j")
MAX_HINTS = 8


class PromptArea(TextArea):
    """The editor. Its messages tell the screen what to do; it knows no conversation."""

    class Sent(Message):
        """Enter was pressed on some text."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Scroll(Message):
        """A key that moves the transcript, because the prompt has no use for it."""

        def __init__(self, where: str) -> None:
            super().__init__()
            self.where = where

    class Quit(Message):
        """Ctrl+D on an empty prompt."""

    class Interrupt(Message):
        """Ctrl+C."""

    def __init__(self, *, enter_sends: bool = True) -> None:
        super().__init__(
            soft_wrap=True,
            compact=True,
            highlight_cursor_line=False,
            placeholder="Ask anything · / for commands",
            show_line_numbers=False,
            tab_behavior="focus",
        )
        self._enter_sends = enter_sends
        self._history: list[str] = []
        self._place = 0
        self._draft = ""

    def remember(self, text: str) -> None:
        """Add a sent message to what ↑ brings back."""
        if not self._history or self._history[-1] != text:
            self._history.append(text)
        self._place = len(self._history)

    async def _on_key(self, event: events.Key) -> None:
        """Take the keys that mean something here; the editor's own handler sees the others next."""
        key = event.key
        if key == "enter" and self._enter_sends or (key in NEWLINE_KEYS[1:] and not self._enter_sends):
            self._take(event)
            self._enter()
        elif key in NEWLINE_KEYS or key == "enter":
            self._take(event)
            self.insert("\n")
        elif key == "tab":
            self._take(event)
            self._complete()
        elif key == "ctrl+c":
            self._take(event)
            if not self.selected_text:
                self.post_message(self.Interrupt())
            else:
                self.action_copy()
        elif key == "ctrl+d" and not self.text:
            self._take(event)
            self.post_message(self.Quit())
        elif key in ("pageup", "pagedown") or (key in ("home", "end") and not self.text):
            self._take(event)
            self.post_message(self.Scroll(key))
        elif self._at_edge(key) and self._recall(-1 if key == "up" else 1):
            self._take(event)

    async def _on_paste(self, event: events.Paste) -> None:
        # the editor's own handler runs next, with what is left
        event.text = clean(event.text.replace("\r\n", "\n").replace("\r", "\n"))

    @staticmethod
    def _take(event: events.Key) -> None:
        event.stop()
        event.prevent_default()

    def _enter(self) -> None:
        if self.text.endswith("\\") and self.cursor_location == self.document.end:
            self.action_delete_left()
            self.insert("\n")
            return
        if self.text.strip():
            self.post_message(self.Sent(self.text))

    def _complete(self) -> None:
        if self.text.startswith("/") and " " not in self.text and (found := matching(self.text)):
            self.text = f"/{found[0].name}" + (" " if found[0].argument else "")
            self.move_cursor(self.document.end)

    def _at_edge(self, key: str) -> bool:
        return (key == "up" and self.cursor_at_first_line) or (key == "down" and self.cursor_at_last_line)

    def _recall(self, step: int) -> bool:
        place = self._place + step
        if not 0 <= place <= len(self._history):
            return False
        if self._place == len(self._history):
            self._draft = self.text
        self._place = place
        self.text = self._draft if place == len(self._history) else self._history[place]
        self.move_cursor(self.document.end)
        return True


class Prompt(Vertical):
    """The editor with its frame, and above it the commands that match what is being typed."""

    def __init__(self, *, enter_sends: bool = True) -> None:
        super().__init__()
        self.area = PromptArea(enter_sends=enter_sends)
        self.area.border_subtitle = "⏎ send · ⇧⏎/^J newline · / commands" if enter_sends else "^J send · / commands"

    def compose(self) -> ComposeResult:
        """Hints (mostly absent), then the editor."""
        hints = Static("", id="hints", markup=False)
        hints.display = False
        yield hints
        yield self.area

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        """Show the commands that match a half-typed one."""
        text = event.text_area.text
        hints = self.query_one("#hints", Static)
        found = matching(text) if text.startswith("/") and not text.startswith("//") and " " not in text else []
        hints.display = bool(found)
        if found:
            width = max(len(f"/{slash.name} {slash.argument}") for slash in found)
            rows = [f"/{s.name} {s.argument}".ljust(width) + f"   {s.meaning}" for s in found[:MAX_HINTS]]
            hints.update("\n".join(rows))

    def set_title(self, text: str) -> None:
        """What stands on the upper edge of the frame: that messages are queued."""
        if self.area.border_title != text:
            self.area.border_title = text
