"""Ctrl+P: everything by name; also saved chats and local models."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from localllm.errors import LocalLLMError
from localllm.history import SavedChat
from localllm.terminal import clean_line

if TYPE_CHECKING:
    from .app import ChatApp
    from .screens.chat import ChatScreen

CHATS = 200


class Everything(Provider):
    """The commands of the program, the chats, the models."""

    @property
    def _app(self) -> ChatApp:
        return cast("ChatApp", self.app)

    @property
    def _screen(self) -> ChatScreen:
        return self._app.chat

    async def startup(self) -> None:
        """Read the lists once, when the palette opens."""
        self._chats: list[SavedChat] = []
        if self._app.saver.kept:
            try:
                self._chats = await asyncio.wrap_future(self._app.saver.run(lambda history: history.chats(CHATS)))
            except LocalLLMError as error:
                self._screen.flash(error.message)
        self._models = [row.name for row in await asyncio.to_thread(self._app.backend.choices) if row.local]

    async def discover(self) -> Hits:
        """Before anything is typed: the commands."""
        for name, meaning, action in self._app.everything():
            yield DiscoveryHit(name, action, help=meaning)

    async def search(self, query: str) -> Hits:
        """Whatever matches."""
        matcher = self.matcher(query)
        rows = [(name, meaning, action) for name, meaning, action in self._app.everything()]
        for chat in self._chats:
            title = clean_line(chat.title) or "untitled"
            rows.append((title, "open this chat", partial(self._screen.open_chat, chat.id)))
        rows += [(clean_line(n), "use this model", partial(self._screen.use_model, n)) for n in self._models]
        for name, meaning, action in rows:
            score = matcher.match(name)
            if score > 0:
                yield Hit(score, matcher.highlight(name), action, text=name, help=meaning)
