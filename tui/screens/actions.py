"""What the keys of the chat screen do: each action by its name in `keys.py`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on, work
from textual.screen import Screen

from localllm.errors import LocalLLMError
from localllm.history import PromptHistory, SavedChat, SavedMessage
from localllm.terminal import clean, clean_line
from localllm.tui.attachments import Attachment
from localllm.tui.conversation import Conversation, Exchange
from localllm.tui.widgets.choices import Choices
from localllm.tui.widgets.engine import EnginePanel
from localllm.tui.widgets.home import BROWSE, Home
from localllm.tui.widgets.messages import AssistantMessage, UserMessage
from localllm.tui.widgets.prompt import Hints, PromptArea
from localllm.tui.widgets.sidebar import Sidebar
from localllm.tui.widgets.status import State
from localllm.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from localllm.history import History
    from localllm.tui.app import ChatApp

    from .browse import Browse

AGAIN_S = 2.0
"""A second Ctrl+C within this time quits."""


class Actions(Screen[None]):
    """The part of `ChatScreen` that answers to keys; apart from it because the two together are too long to read."""

    conversation: Conversation
    phase: str
    waiting: deque[tuple[Exchange, UserMessage]]
    current: tuple[int, AssistantMessage] | None
    editing: tuple[Exchange, bool] | None
    side: tuple[int, list[str]] | None
    attached: list[Attachment]
    browse: Browse
    state: State
    changing: asyncio.Lock
    prompts: PromptHistory
    _message = ""
    _message_until = 0.0
    _interrupted_at = -AGAIN_S

    if TYPE_CHECKING:  # what the screen has

        @property
        def chat_app(self) -> ChatApp: ...
        @property
        def transcript(self) -> Transcript: ...
        @property
        def prompt(self) -> PromptArea: ...
        def refresh_lines(self) -> None: ...
        def show_home(self, shown: bool) -> None: ...
        def keep(self, *exchanges: Exchange) -> None: ...
        def give_up(self) -> None: ...
        async def load(self, name: str, changes: Mapping[str, Any] | None = None) -> None: ...

    # --- saying something --------------------------------------------------------------------------------------------

    def flash(self, text: str, seconds: float = 4.0) -> None:
        """Say something in the status line for a moment."""
        self._message, self._message_until = clean_line(text), time.monotonic() + seconds
        self.refresh_lines()

    @property
    def message(self) -> str:
        """What is being said in the status line; empty when its time is over."""
        if time.monotonic() >= self._message_until:
            self._message = ""
        return self._message

    @property
    def flashing(self) -> bool:
        """Whether a message's time has just run out: the line must be drawn once more."""
        return bool(self._message) and time.monotonic() >= self._message_until

    def live_keys(self) -> str:
        """The few keys that matter now."""
        label = self.chat_app.keymap.label
        if self.browse.active:
            names = ["copy", "code", "edit", "again", "branch", "previous", "leave"]
            words = {"again": "answer again", "branch": "from here", "previous": "branches", "leave": "back"}
            shown = names if self.app.size.width >= 100 else [n for n in names if n not in ("branch", "code", "edit")]
            return " · ".join(f"{label(f'browse.{n}')} {words.get(n, n)}" for n in shown)
        if self.current is not None:
            return f"{label('chat.stop')} stop · {label('app.help')} help"
        if self.app.size.width < 100:
            return f"^P palette · {label('app.help')} help"
        return f"^P palette · {label('models.open')} models · {label('engine.open')} engine · {label('app.help')} help"

    def may_change(self) -> bool:
        """Whether the branch may be changed now; says why not."""
        if self.current is None and not self.waiting and self.side is None:
            return True
        self.flash(f"{self.chat_app.keymap.label('chat.stop')} stops the answer first")
        return False

    # --- stopping and leaving ----------------------------------------------------------------------------------------

    def action_escape(self) -> None:
        """Esc: stop the answer, else close what is open, else browse."""
        choices, hints = self.query_one(Choices), self.query_one(Hints)
        if self.current is not None:
            self.chat_app.backend.stop(self.current[0])
            self.state.text = "stopping…"
            self.refresh_lines()
        elif choices.display:
            choices.cancel()
        elif hints.display:
            hints.display = False
        elif self.editing is not None:
            self.editing = None
            self.prompt.text = ""
            self.refresh_lines()
        elif self.attached and not self.prompt.text:
            self.attached.clear()
            self.refresh_lines()
        elif self.query_one(Sidebar).display and self.has_class("-narrow"):
            self.query_one(Sidebar).display = False
            self.prompt.focus()
        elif self.query_one(EnginePanel).display and self.has_class("-narrow"):
            self.action_engine()
        elif self.query_one(Home).display:
            self.focus_home()
        elif not self.browse.enter():
            self.prompt.focus()
        else:
            self.refresh_lines()

    def action_interrupt(self) -> None:
        """Ctrl+C: copy the selection, else stop, else clear the prompt; twice within two seconds quits."""
        prompt = self.prompt
        selected = prompt.selected_text or self.get_selected_text()
        if selected:
            self.flash(self.chat_app.copy(selected))
            self.clear_selection()
            return
        now = time.monotonic()
        if now - self._interrupted_at < AGAIN_S:
            self.chat_app.exit()
            return
        self._interrupted_at = now
        if self.current is not None:
            self.action_escape()
            self.flash("stopping; press ctrl+c again to stop and quit", AGAIN_S)
        elif prompt.text:
            prompt.text = ""
            self.flash("cleared; press ctrl+c again to quit", AGAIN_S)
        else:
            self.flash("press ctrl+c again to quit", AGAIN_S)

    def action_quit_chat(self) -> None:
        """Leave."""
        self.chat_app.exit()

    # --- chats -------------------------------------------------------------------------------------------------------

    async def action_new_chat(self) -> None:
        """Begin another chat; this one is saved."""
        async with self.changing:
            await self.clear()
        self.flash("new chat")

    async def clear(self) -> None:
        """Forget the conversation on the screen."""
        self.give_up()
        self.editing = None
        self.conversation.clear()
        self.conversation.model = self.chat_app.model
        self.state.used_tokens = 0
        if self.phase == "ready":
            self.state.text = "ready"
        await self.transcript.clear()
        self.prompt.focus()

    async def action_sidebar(self) -> None:
        """Show or hide the chats."""
        bar = self.query_one(Sidebar)
        bar.display = not bar.display
        if bar.display:
            await self.list_chats()
        elif bar.has_focus_within:
            self.prompt.focus()

    async def action_chats(self) -> None:
        """Search the chats."""
        bar = self.query_one(Sidebar)
        if not bar.display:
            await self.action_sidebar()
        bar.focus_filter()

    async def list_chats(self, query: str = "") -> None:
        """Fill the sidebar."""
        chats = await self.read_history(lambda history: history.chats(query=query))
        if chats is not None:
            self.query_one(Sidebar).show(chats, self.conversation.id)

    async def read_history(self, reads: Any) -> Any:
        """What `reads` makes of the database, in its thread; None when it cannot be used, and that is said."""
        try:
            return await asyncio.wrap_future(self.chat_app.saver.run(reads))
        except LocalLLMError as error:
            self.flash(error.message)
            return None

    @on(Sidebar.Wanted)
    async def _wanted(self, event: Sidebar.Wanted) -> None:
        await self.list_chats(event.query_text)

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
            self.conversation = Conversation.restored(*found, self.conversation.sampling)
            self.chat_app.conversation = self.conversation
            self.browse.at = None
            self.show_home(False)
            await self.transcript.clear()
            await self.transcript.sync(self.conversation)
            last = self.conversation.exchanges[-1].usage if self.conversation.exchanges else None
            self.state.used_tokens = last.prompt_tokens + last.completion_tokens if last else 0
            await self._model_of(found[0])
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
            name = chat.model if self.chat_app.has_model(chat.model) else self.query_one(Home).default_model
            if name:
                await self.load(name)
        elif chat.model and self.chat_app.model and chat.model != self.chat_app.model:
            name = clean_line(chat.model)
            await self.transcript.say(f"this chat was with {name}; /model {name} goes back to it")

    # --- panels ------------------------------------------------------------------------------------------------------

    def action_engine(self) -> None:
        """Show or hide the engine."""
        panel = self.query_one(EnginePanel)
        panel.open(not panel.display)

    def action_models(self) -> None:
        """Choose a model."""
        from .models import ModelsScreen

        self.app.push_screen(ModelsScreen(self.chat_app.model), self._model_chosen)

    async def _model_chosen(self, chosen: tuple[str, int | None] | None) -> None:
        if chosen is None:
            return
        name, ctx = chosen
        async with self.changing:
            await self.load(name, {"ctx": ctx} if ctx else None)
        self.refresh_lines()

    async def use_model(self, name: str) -> None:
        """Load another model."""
        await self._model_chosen((name, None))

    def action_params(self) -> None:
        """Sampling, thinking, instructions."""
        from .params import ParamsScreen

        self.app.push_screen(ParamsScreen(self.conversation, self.chat_app.presets), self._params_set)

    def _params_set(self, changed: bool | None) -> None:
        if changed:
            self.keep()
            self.flash("parameters hold from the next message")

    def action_help(self) -> None:
        """F1."""
        from .help import HelpScreen

        self.app.push_screen(HelpScreen(self.chat_app.keymap))

    def action_doctor(self) -> None:
        """What `localllm doctor` says."""
        self.chat_app.show_command("doctor")

    def action_logs(self) -> None:
        """The end of the log."""
        from .viewer import Viewer, log_text

        self.app.push_screen(Viewer("Log", log_text(self.chat_app.log_file), at_end=True))

    def action_thinking(self) -> None:
        """Open or close the reasoning of the last answer that has any."""
        for message in reversed(list(self.query(AssistantMessage))):
            if message.exchange.reasoning:
                message.thought.toggle()
                return
        self.flash("there is no thinking here")

    def focus_home(self) -> None:
        """Choose on the first screen."""
        self.query_one("#home-list").focus()

    @on(Home.Typed)
    def _home_typed(self, event: Home.Typed) -> None:
        self.prompt.focus()
        self.prompt.insert(event.character)

    @on(Home.Chosen)
    async def _home_chosen(self, event: Home.Chosen) -> None:
        if event.kind == BROWSE:
            self.action_models()
        elif event.kind == "chat":
            await self.open_chat(event.name)
        else:
            async with self.changing:
                await self.load(event.name)
            self.prompt.focus()
            self.refresh_lines()

    # --- the prompt --------------------------------------------------------------------------------------------------

    async def action_browse_up(self) -> None:
        """The message above."""
        self.browse.enter(-1)
        self.refresh_lines()

    async def action_browse_down(self) -> None:
        """The message below."""
        self.browse.enter(1)
        self.refresh_lines()

    def action_search_prompts(self) -> None:
        """Search what was sent before."""
        from .pick import PickScreen

        rows = list(dict.fromkeys(reversed(self.prompt.sent_before)))
        self.app.push_screen(PickScreen("Sent before", [(text, clean_line(text)) for text in rows]), self._put)

    def _put(self, text: str | None) -> None:
        if text is not None:
            self.prompt.put(text)
        self.prompt.focus()

    def edit(self, exchange: Exchange, is_question: bool) -> None:
        """Put a message into the prompt, to be sent as a branch."""
        if self.may_change():
            self.editing = exchange, is_question
            self.prompt.put(exchange.user if is_question else exchange.text)
            self.prompt.focus()
            self.refresh_lines()

    def edit_last(self) -> None:
        """Edit the last question."""
        if self.conversation.exchanges:
            self.edit(self.conversation.exchanges[-1], True)

    def write_file(self, path: str | None, text: str) -> None:
        """Write a new file; one that is there is not overwritten."""
        if not path or not path.strip():
            return
        target = Path(path.strip()).expanduser()
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(text if text.endswith("\n") else text + "\n")
        except FileExistsError:
            self.flash(f"{clean_line(str(target))} is there already; choose another name")
        except (OSError, ValueError) as error:
            self.flash(f"{clean_line(str(target))}: {getattr(error, 'strerror', None) or error}")
        else:
            self.flash(f"written to {clean_line(str(target))}")

    @work(exclusive=True, group="editor", exit_on_error=False)
    async def action_editor(self) -> None:
        """Write the prompt in $EDITOR."""
        command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prompt.md"
            file.write_text(self.prompt.text, encoding="utf-8")
            try:
                with self.app.suspend():
                    subprocess.run([*command, str(file)], check=False)
            except (OSError, NotImplementedError) as error:
                self.flash(f"{command[0]} could not be started: {error}")
                return
            with contextlib.suppress(OSError):
                text = file.read_text(encoding="utf-8", errors="replace")
                self.prompt.put(clean(text.removesuffix("\n")))
        self.app.refresh(layout=True)
