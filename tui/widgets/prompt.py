"""The message editor with its suggestions: commands after `/`, files after `@`, earlier messages with ↑."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static, TextArea

from localllm.conversation.attachments import dropped, matching_files
from localllm.conversation.documents import Document
from localllm.conversation.slash import matching
from localllm.terminal import clean
from localllm.tui.keymap import Keymap

MAX_HINTS = 8
_AT = re.compile(r"(?:^|\s)@([^\s]*)$")


class PromptArea(TextArea):
    """The editor. Its messages tell the screen what to do; it knows nothing about the conversation."""

    @dataclass
    class Sent(Message):
        """Enter was pressed; `text` is empty if the prompt was."""

        text: str

    @dataclass
    class Dropped(Message):
        """A file was dropped on the terminal, which pasted its path as `text`."""

        path: str
        text: str

    def __init__(self, keymap: Keymap, *, enter_sends: bool = True) -> None:
        super().__init__(
            soft_wrap=True,
            compact=True,
            highlight_cursor_line=False,
            placeholder="Ask anything · / for commands · @ for files",
            show_line_numbers=False,
            tab_behavior="focus",
        )
        self.cursor_blink = False  # saves two repaints a second
        send, newline = keymap.keys("prompt.send"), keymap.keys("prompt.newline")
        swapped = not enter_sends and "enter" in send
        self._send = frozenset(k for k in newline if k != "shift+enter") if swapped else frozenset(send)
        self._newline = frozenset({"enter", "shift+enter"}) if swapped else frozenset(newline)
        self.sent_before: list[str] = []
        self._place = 0
        self._drafts: dict[int, str] = {}  # text typed at each position among the earlier messages

    def load_history(self, lines: list[str]) -> None:
        self.sent_before[:0] = lines
        self._place += len(lines)
        self._drafts = {place + len(lines): text for place, text in self._drafts.items()}

    def remember(self, text: str) -> None:
        """Keep a text for ↑, after drafts left at other positions."""
        before, drafts = self.sent_before, sorted(self._drafts.items())
        left = [draft for place, draft in drafts if draft not in before[place : place + 1] and place != self._place]
        for one in (*left, text):
            if one.strip() and before[-1:] != [one]:
                before.append(one)
        self._place = len(before)
        self._drafts.clear()

    def put(self, text: str) -> None:
        """Replace the draft; ↑ brings back a draft that was not empty."""
        if self.text != text:
            self.remember(self.text)
        self._set(text)

    def _set(self, text: str) -> None:
        self.text = text
        self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        """Handle keys with a meaning here; the editor's own handler gets the others next."""
        key = event.key
        hints = self.screen.query_one(Hints)
        if hints.display and key in ("up", "down", "tab") or (hints.display and key == "enter" and hints.takes_enter):
            self._take(event)
            self._choose(hints, key)
        elif key in self._send:
            self._take(event)
            self._enter()
        elif key in self._newline:
            self._take(event)
            self.insert("\n")
        elif key == "tab":
            self._take(event)
            await self.screen.run_action("choose")
        elif key == "ctrl+c":
            self._take(event)
            await self.screen.run_action("interrupt")
        elif key == "backspace" and not self.text:
            self._take(event)
            await self.screen.run_action("drop_file")
        elif key == "ctrl+d" and not self.text:
            self._take(event)
            await self.screen.run_action("app.quit")
        elif key in ("pageup", "pagedown") or (key in ("home", "end") and not self.text):
            self._take(event)
            await self.screen.run_action(f"scroll_to('{key}')")  # the transcript; the prompt does not use these keys
        elif self._at_edge(key) and self._recall(-1 if key == "up" else 1):
            self._take(event)

    async def _on_paste(self, event: events.Paste) -> None:
        # the editor's own handler runs next, with the remaining text
        event.text = clean(event.text.replace("\r\n", "\n").replace("\r", "\n"))
        if path := dropped(event.text):
            event.stop()
            event.prevent_default()
            self.post_message(self.Dropped(path, event.text))

    @staticmethod
    def _take(event: events.Key) -> None:
        event.stop()
        event.prevent_default()

    def _choose(self, hints: Hints, key: str) -> None:
        if key in ("up", "down"):
            hints.move(-1 if key == "up" else 1)
            return
        word = hints.word
        start = max(0, len(self.text) - len(hints.typed))
        self._set(self.text[:start] + word + ("" if word.endswith("/") or not hints.spaced else " "))

    def _enter(self) -> None:
        if self.text.endswith("\\") and self.cursor_location == self.document.end:
            self.action_delete_left()
            self.insert("\n")
            return
        if (text := self.text).strip() or not text:
            self.remember(text)
            self._set("")  # now, because the next keys may come before the message is handled
            self.post_message(self.Sent(text))

    def _at_edge(self, key: str) -> bool:
        return (key == "up" and self.cursor_at_first_line) or (key == "down" and self.cursor_at_last_line)

    def _recall(self, step: int) -> bool:
        place = self._place + step
        if not 0 <= place <= len(self.sent_before):
            return False
        self._drafts[self._place] = self.text
        self._place = place
        self._set(self._drafts.get(place, (*self.sent_before, "")[place]))
        return True


class Hints(Static):
    """Suggestions, drawn over the transcript so that nothing moves."""

    def __init__(self) -> None:
        super().__init__("", id="hints", markup=False)
        self.display = False
        self._rows: list[tuple[str, str]] = []
        self._at = 0
        self.typed = ""
        self.spaced = False  # whether a chosen word gets a space after it
        self.takes_enter = False

    @property
    def word(self) -> str:
        return self._rows[self._at][0]

    def move(self, step: int) -> None:
        self._at = (self._at + step) % len(self._rows)
        self._draw()

    def offer(self, text: str, rows: int) -> None:
        """Look at the text before the cursor; `rows` is the room for suggestions."""
        self._rows, self.spaced, self.takes_enter = [], False, False
        if text.startswith("/") and not text.startswith("//") and " " not in text and "\n" not in text:
            found = matching(text)[:rows]
            self._rows = [(f"/{s.name}", f"{s.argument}  {s.meaning}".strip()) for s in found]
            self.typed, self.spaced = text, bool(found and found[0].argument)
            if [s for s in found if f"/{s.name}" == text]:
                self._rows = [row for row in self._rows if row[0] == text]
        elif match := _AT.search(text):
            self._rows = [(f"@{path}", "") for path in matching_files(match[1], rows)]
            self.typed, self.spaced, self.takes_enter = f"@{match[1]}", True, True
            if [row for row in self._rows if row[0] == self.typed]:
                self._rows = []
        self._at = 0
        self.display = bool(self._rows)
        self._draw()

    def _draw(self) -> None:
        width = max((len(word) for word, _ in self._rows), default=0) + 2
        lines = (
            Content.styled(f" {word:{width}}", "reverse" if place == self._at else "bold")
            + Content.styled(clean(meaning), "dim")
            for place, (word, meaning) in enumerate(self._rows)
        )
        self.update(Content("\n").join(lines))


class Prompt(Vertical):
    """The editor with its frame; files of the next message above it."""

    def __init__(self, keymap: Keymap, *, enter_sends: bool = True) -> None:
        super().__init__()
        self.area = PromptArea(keymap, enter_sends=enter_sends)
        send, newline = keymap.label("prompt.send"), keymap.labels("prompt.newline").split("  ")
        keys = f"{send} send · {newline[0]}/{newline[-1]} newline" if enter_sends else f"{newline[-1]} send"
        self.area.border_subtitle = f"{keys} · / commands · @ files"

    def compose(self) -> ComposeResult:
        files = Static("", id="files", markup=False)
        files.display = False
        yield files
        yield self.area

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        """Update the suggestions for the text before the cursor."""
        area = event.text_area
        hints = self.screen.query_one(Hints)
        at_end = area.cursor_location == area.document.end
        below = self.outer_size.height + 1
        room = self.screen.size.height - below - 3  # between title and prompt, without the frame
        hints.offer(area.text if at_end and len(area.text) < 1000 else "", max(1, min(MAX_HINTS, room)))
        hints.styles.offset = (2, -below)

    def show(self, title: str, attachments: Sequence[Document], budget: str) -> None:
        """Show `title` on the frame (queue length or editing), and the files with their budget above it."""
        if self.area.border_title != title:
            self.area.border_title = title
        files = self.query_one("#files", Static)
        files.display = bool(attachments)
        files.update("   ".join([*(f"+ {one.label}" for one in attachments), *([budget] if budget else [])]))
