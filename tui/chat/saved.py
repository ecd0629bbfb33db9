"""Chats on disk, as the chat screen shows and opens them."""

from __future__ import annotations

from textual import on

from localllm.conversation.session import Session
from localllm.conversation.storage import restored
from localllm.history.records import SavedChat, SavedMessage
from localllm.history.store import History
from localllm.terminal import clean_line
from localllm.tui.widgets.home import Home
from localllm.tui.widgets.sidebar import Sidebar

from .browse import Browse
from .stream import Stream

WIDE = 120  # columns from which on the list is shown by itself


class SavedChats(Stream):
    """The list of chats, and opening one."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.browse = Browse(self)

    async def action_new_chat(self) -> None:
        async with self.changing:
            await self.clear()
        self.flash("new chat")

    async def action_sidebar(self) -> None:
        bar = self.query_one(Sidebar)
        bar.display = not bar.display
        if bar.display:
            await self.list_chats()
        elif bar.has_focus_within:
            self.prompt.focus()

    async def show_chats_if_wide(self) -> None:
        """At the start: the list, where there is room for it and something in it."""
        wanted = self.frame.options.ui.sidebar
        wide = wanted is True or (wanted == "auto" and self.app.size.width >= WIDE)
        if not wide or not self.session.saver.kept or self.query_one(Home).display:
            return
        chats = await self.read_history(lambda history: history.chats())
        if chats:
            bar = self.query_one(Sidebar)
            bar.show(chats, self.conversation.id)
            bar.display = True

    async def action_chats(self) -> None:
        bar = self.query_one(Sidebar)
        if not bar.display:
            await self.action_sidebar()
        bar.focus_filter()

    async def list_chats(self, query: str = "") -> None:
        chats = await self.read_history(lambda history: history.chats(query=query))
        if chats is not None:
            self.query_one(Sidebar).show(chats, self.conversation.id)

    @on(Sidebar.Wanted)
    async def _wanted(self, event: Sidebar.Wanted) -> None:
        await self.list_chats(event.query)

    @on(Sidebar.Opened)
    async def _opened(self, event: Sidebar.Opened) -> None:
        await self.open_chat(event.chat_id)

    @on(Sidebar.Left)
    async def _left(self) -> None:
        if self.has_class("-narrow"):
            await self.action_sidebar()
        self.prompt.focus()

    async def open_chat(self, chat_id: str) -> None:
        """Put a saved chat on the screen; what runs is stopped and kept."""

        def read(history: History) -> tuple[SavedChat, list[SavedMessage]]:
            return history.chat(chat_id), history.messages(chat_id)

        async with self.changing:
            self.give_up()
            found = await self.read_history(read)
            if found is None:
                return
            chat, messages = found
            titles_itself = self.conversation.titles_itself
            self.session.conversation = restored(chat, messages, self.conversation.sampling)
            self.conversation.titles_itself = titles_itself
            self.browse.at = None
            self.show_home(False)
            await self.transcript.clear()
            await self.transcript.sync(self.conversation)
            self.state.used_tokens = self.conversation.used_tokens
            await self._model_of(chat)
        if self.query_one(Sidebar).display:
            if self.has_class("-narrow"):
                self.query_one(Sidebar).display = False
            else:
                await self.list_chats()
        self.prompt.focus()
        self.refresh_lines()

    async def _model_of(self, chat: SavedChat) -> None:
        """A chat opened from the first screen brings its model; else the one that is loaded goes on."""
        if self.phase == "none":
            name = chat.model if self.query_one(Home).has(chat.model) else self.query_one(Home).default_model
            if name:
                await self.load(name)
        elif chat.model and self.session.model and chat.model != self.session.model:
            name = clean_line(chat.model)
            await self.transcript.say(f"this chat was with {name}; /model {name} goes back to it")
