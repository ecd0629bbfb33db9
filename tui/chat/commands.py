"""The slash commands that act on the screen; `conversation.commands` handles the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from textual.widgets import Input

from localllm.conversation import commands
from localllm.conversation.slash import OFF, Typed, parse_port
from localllm.errors import ConfigError
from localllm.tui.screens.viewer import show_command
from localllm.tui.widgets.sidebar import Sidebar

from .turns import Turns

ACTIONS = {"help": "help", "keys": "help", "logs": "logs", "engine": "engine", "params": "params", "quit": "app.quit"}
BENCHES = {"": "-r 2", "quick": "-p 128 -n 32 -r 1 --no-save"}
SHOWN = ("ps", "plan", "doctor")  # commands of the program, shown in a panel
SAID = (
    "system",
    "think",
    "set",
    "preset",
    "ctx",
    "stats",
    "tools",
)  # their replies go to the transcript, the others' to the status line


class Commands:
    """Runs typed commands. User errors are LocalLLMErrors, shown by the screen."""

    def __init__(self, screen: Turns) -> None:
        self._screen = screen

    async def run(self, typed: Typed) -> None:
        name, screen = typed.command, self._screen
        own: Callable[[str], Awaitable[None]] | None = getattr(self, f"_do_{name}", None)
        if own is not None:
            await own(typed.text)
        elif name in ACTIONS:
            await screen.run_action(ACTIONS[name])
        elif name in SHOWN:
            show_command(screen.app, name, *(typed.text.split() if name == "plan" else ()))
        else:
            await self._shared(typed)

    async def _shared(self, typed: Typed) -> None:
        name, screen = typed.command, self._screen
        if name in commands.SLOW:
            said = await asyncio.to_thread(commands.run, screen.session, typed)
        else:
            said = commands.run(screen.session, typed)
        if name in commands.SETTINGS:
            screen.keep()
        if name in SAID:
            await screen.transcript.say(said)
        elif said:
            screen.flash(said)

    async def _do_serve(self, text: str) -> None:
        screen, session, port = self._screen, self._screen.session, parse_port(text)
        if session.endpoint is None or port == OFF or screen.phase == "ready":
            await screen.serve(port)
        else:
            session.serves = port
            screen.flash("other programs can use the model as soon as it is ready")

    async def _do_bench(self, text: str) -> None:
        if self._screen.may_change():
            words = BENCHES.get(text, text).split()
            show_command(self._screen.app, "bench", self._screen.session.model, *words)

    async def _do_theme(self, text: str) -> None:
        app = self._screen.app
        if not text:
            app.search_themes()
            return
        if text not in app.available_themes:
            raise ConfigError(f"unknown theme {text}", "choose one of " + ", ".join(sorted(app.available_themes)))
        app.theme = text
        self._screen.flash(f"theme {text}; to keep it: localllm config set ui.theme {text}")

    async def _do_model(self, text: str) -> None:
        await self._screen.run_action("models")

    async def _do_chats(self, text: str) -> None:
        self._screen.call_later(self._screen.run_action, "chats")
        if text:
            self._screen.query_one(Sidebar).query_one(Input).value = text

    async def _do_new(self, text: str) -> None:
        await self._screen.clear()
        self._screen.flash("new chat")

    async def _do_attach(self, text: str) -> None:
        said = await asyncio.to_thread(commands.run, self._screen.session, Typed(text, "attach"))
        how = "; backspace in an empty prompt removes the last, esc all" if self._screen.session.files else ""
        self._screen.flash(said + how)

    async def _do_regen(self, text: str) -> None:
        exchange = self._screen.conversation.numbered(text)
        if self._screen.may_change():
            await self._screen.ask_again(self._screen.conversation.again(exchange))

    async def _do_edit(self, text: str) -> None:
        self._screen.edit(self._screen.conversation.numbered(text), True)

    async def _do_undo(self, text: str) -> None:
        exchange = self._screen.conversation.numbered("")
        if self._screen.may_change():
            await self._shared(Typed("", "undo"))
            await self._screen.transcript.sync()
            self._screen.prompt.put(exchange.user)

    async def _do_branch(self, text: str) -> None:
        exchange = self._screen.conversation.numbered(text)
        if self._screen.may_change():
            await self._screen.branch(exchange)

    async def _do_continue(self, text: str) -> None:
        exchange = self._screen.conversation.cut_short
        if self._screen.phase != "ready":
            raise ConfigError("no model is ready", "wait until it is loaded, or choose one with /model")
        if self._screen.may_change():
            await self._screen.go_on(exchange)
