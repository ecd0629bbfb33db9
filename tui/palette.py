"""Ctrl+P: everything by name, including saved chats and local models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from textual.command import DiscoveryHit, Hit, Hits, Provider

from localllm.history.records import SavedChat
from localllm.terminal import clean_line
from localllm.tui.chat.screen import ChatScreen
from localllm.tui.keymap import KEYS

CHATS = 200
ACTIONS = {
    "Models": "models.open", "Chats": "chats.open", "New chat": "chat.new", "Parameters": "params.open",
    "Engine": "engine.open", "Sidebar": "ui.sidebar", "Thinking": "ui.thinking", "Help": "app.help",
    "Doctor": "app.doctor", "Log": "app.log", "Edit in $EDITOR": "prompt.editor", "Earlier messages": "prompt.search",
}  # fmt: skip
TYPED = {
    "Copy the last answer": "/copy", "Copy the last code block": "/copy code", "Answer again": "/regen",
    "Continue the answer": "/continue", "Take back the last question": "/undo", "Export as Markdown": "/export md",
    "Export as HTML": "/export html", "Export as JSON": "/export json", "Serve this model to other programs": "/serve",
    "Stop serving": "/serve off", "Context usage": "/ctx", "Statistics": "/stats", "Plan": "/plan",
    "Loaded models": "/ps",
}  # fmt: skip
Row = tuple[str, str, Callable[[], Any]]


class Everything(Provider):
    """The program's commands, the chats, the models. Rows are (name, help, action)."""

    @property
    def _chat(self) -> ChatScreen:
        return next(screen for screen in self.app.screen_stack if isinstance(screen, ChatScreen))

    async def startup(self) -> None:
        """Read the lists once, when the palette opens."""
        chat, session = self._chat, self._chat.session
        kept = await chat.read_history(lambda history: history.chats(CHATS)) if session.saver.kept else None
        self._chats: list[SavedChat] = kept or []
        self._models = [row.name for row in await asyncio.to_thread(session.backend.choices) if row.local]

    def _commands(self) -> Iterator[Row]:
        chat, app = self._chat, self.app
        for name, key in ACTIONS.items():
            meaning = f"{KEYS[key].meaning}  ({chat.frame.keymap.label(key)})"
            yield name, meaning, partial(chat.run_action, KEYS[key].action)
        for name, command in TYPED.items():
            yield name, command, partial(chat.submit, command)
        yield "Theme", "change the colors", app.search_themes
        yield "Screenshot", "write an SVG of this screen", app.deliver_screenshot
        yield "Quit", "quit; the chat is saved", app.exit

    def _lists(self) -> Iterator[Row]:
        for chat in self._chats:
            title = clean_line(chat.title) or "untitled"
            yield title, "open this chat", partial(self._chat.open_chat, chat.id)
        for name in self._models:
            yield clean_line(name), "use this model", partial(self._chat.use_model, name)

    async def discover(self) -> Hits:
        for name, meaning, action in self._commands():
            yield DiscoveryHit(name, action, help=meaning)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, meaning, action in (*self._commands(), *self._lists()):
            score = matcher.match(name)
            if score > 0:
                yield Hit(score, matcher.highlight(name), action, text=name, help=meaning)
