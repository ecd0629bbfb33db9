"""The key actions of the chat screen, named as in `keymap.toml`, and the handlers of its lists."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from textual import on, work
from textual.app import SuspendNotSupported
from textual.widgets import Input, OptionList, TextArea

from localllm.conversation.session import Session
from localllm.conversation.storage import restored
from localllm.conversation.tree import effective_sampling
from localllm.errors import LocalLLMError
from localllm.history.records import SavedChat
from localllm.terminal import clean, clean_line
from localllm.tui.screens.dialogs import PickScreen
from localllm.tui.screens.help import HelpScreen
from localllm.tui.screens.params import ParamsScreen
from localllm.tui.screens.viewer import Viewer, log_text, show_command
from localllm.tui.widgets.choices import Choices
from localllm.tui.widgets.engine import EnginePanel
from localllm.tui.widgets.home import Home
from localllm.tui.widgets.messages import AssistantMessage
from localllm.tui.widgets.prompt import Hints
from localllm.tui.widgets.sidebar import Sidebar

from .browse import Browse
from .stream import Stream

WIDE = 120  # minimum columns for showing the list of chats automatically
AGAIN_S = 2.0  # a second Ctrl+C within this time quits
LATE_S = 0.5  # an Esc this soon after the end of an answer was meant to stop it


class Actions(Stream):
    """The part of `ChatScreen` that handles keys."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.browse = Browse(self)
        self._interrupted_at = -AGAIN_S
        self._opened_chats = False  # whether a key opened the list of chats

    def live_keys(self) -> str:
        """The few keys that matter now."""
        label = self.frame.keymap.label
        if self.browse.active:
            names = ["copy", "code", "edit", "again", "branch", "previous", "leave"]
            words = {"again": "answer again", "branch": "from here", "previous": "branches", "leave": "back"}
            shown = names if self.app.size.width >= 100 else [n for n in names if n not in ("branch", "code", "edit")]
            return " · ".join(f"{label(f'browse.{n}')} {words.get(n, n)}" for n in shown)
        if self.current is not None:
            return f"{label('chat.stop')} stop · {label('app.help')} help"
        if self.state.facts.times_kernels:
            return f"timing kernels for this GPU · {label('chat.stop')} stop · {label('app.help')} help"
        if self.app.size.width < 100:
            return f"^P palette · {label('app.help')} help"
        return f"^P palette · {label('models.open')} models · {label('engine.open')} engine · {label('app.help')} help"

    # --- stopping and leaving ----------------------------------------------------------------------------------------

    def action_escape(self) -> None:
        """Esc: stop the answer, else close what is open, else browse; the draft stays."""
        choices, hints = self.query_one(Choices), self.query_one(Hints)
        if self.calling is not None:
            self.calling.set()
            self.run_worker(self.calls.stop(), exit_on_error=False)
        elif (turn := self.current or self.side) is not None:
            self.session.backend.stop(turn[0])
            self.state.text = "stopping…"
            self.refresh_lines()
        elif self.session.backend.facts().times_kernels:
            self.session.backend.rest()
            self.flash("kernel timing stopped; `localllm tune` resumes it")
        elif choices.display:
            choices.cancel()
            self.prompt.focus()  # at once: the choice itself may have to wait for a change that is under way
        elif hints.display:
            hints.display = False
        elif (card := self.transcript.card) and card.downloads:
            self.questions.fetching()
        elif self.editing is not None:
            self.leave_editing()
        elif self.session.files and not self.prompt.text:
            self.session.files.clear()
            self.refresh_lines()
        elif self.query_one(EnginePanel).display:
            self.action_engine()
        elif (bar := self.query_one(Sidebar)).display and (self._opened_chats or self.has_class("-narrow")):
            bar.display = False
            self.prompt.focus()
        elif self.query_one(Home).display:
            listing = self.query_one("#home-list")
            (self.prompt if listing.has_focus else listing).focus()
        elif time.monotonic() - self.ended_at < LATE_S:
            self.flash("the answer is complete")  # Esc was meant to stop it
        elif self.prompt.text or not self.browse.enter():
            self.prompt.focus()
        else:
            self.refresh_lines()

    def action_drop_file(self) -> None:
        """Backspace in an empty prompt: remove the last attached file."""
        if self.session.files:
            self.session.files.pop()
            self.refresh_lines()

    def action_choose(self) -> None:
        """Tab in the prompt: move to the question above it."""
        if (choices := self.query_one(Choices)).display:
            choices.focus()

    def action_interrupt(self) -> None:
        """Ctrl+C: copy the selection, else stop, else clear the prompt; twice within two seconds quits."""
        prompt = self.prompt
        selected = prompt.selected_text or self.get_selected_text()
        if selected:
            self.flash(self.session.copy(selected))
            self.clear_selection()
            return
        now = time.monotonic()
        if now - self._interrupted_at < AGAIN_S:
            self.app.exit()
            return
        self._interrupted_at = now
        if self.current is not None:
            self.action_escape()
            self.flash("stopping; press Ctrl+C again to stop and quit", AGAIN_S)
        elif prompt.text:
            prompt.put("")
            self.flash("cleared, ↑ restores it; press Ctrl+C again to quit", AGAIN_S)
        else:
            self.flash("press Ctrl+C again to quit", AGAIN_S)

    @on(TextArea.Changed)
    def _typed(self, event: TextArea.Changed) -> None:
        if event.text_area.text:  # typing resets the double Ctrl+C
            self._interrupted_at = -AGAIN_S

    # --- panels ------------------------------------------------------------------------------------------------------

    def action_engine(self) -> None:
        panel = self.query_one(EnginePanel)
        panel.open(not panel.display)

    @work
    async def action_models(self) -> None:
        from localllm.tui.screens.models import ModelsScreen

        now = self.session.model if self.phase in ("loading", "ready") else ""
        if chosen := await self.app.push_screen_wait(ModelsScreen(now, self.flash)):
            await self.use_model(*chosen)

    async def use_model(self, name: str, ctx: int | None = None) -> None:
        async with self.in_order:
            looking = f"looking up {clean_line(name)} …"
            self.flash(looking, 60.0)  # the hub may be slow
            try:
                await self.choose_model(name, {"ctx": ctx} if ctx else None)
            except LocalLLMError as error:
                await self.complain(error)
            if self.message == looking:
                self.flash("")
        self.refresh_lines()

    @work
    async def action_params(self) -> None:
        defaults = effective_sampling(self.session.backend.facts(), {})
        if await self.app.push_screen_wait(ParamsScreen(self.conversation, self.session.presets, defaults)):
            self.keep()
            self.flash("parameters apply from the next message")

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(self.frame.keymap))

    def action_doctor(self) -> None:
        show_command(self.app, "doctor")

    def action_logs(self) -> None:
        self.app.push_screen(Viewer("Log", log_text(self.frame.options.log_file), at_end=True))

    def action_thinking(self) -> None:
        """Fold or unfold the reasoning and calls of the last answer that has any."""
        if any(message.toggle() for message in reversed(list(self.query(AssistantMessage)))):
            return
        self.flash("no answer here has reasoning")

    @on(OptionList.OptionSelected, "#home-list")
    async def _home_chosen(self, event: OptionList.OptionSelected) -> None:
        kind, _, name = str(event.option_id).partition(":")
        if kind == "chat":
            await self.open_chat(name)
        elif kind == "model":
            await self.use_model(name)
            self.prompt.focus()
        else:
            self.action_models()

    # --- saved chats -------------------------------------------------------------------------------------------------

    async def action_new_chat(self) -> None:
        async with self.changing:
            await self.clear()
        self.flash("new chat")

    async def action_sidebar(self) -> None:
        bar = self.query_one(Sidebar)
        bar.display = self._opened_chats = not bar.display
        if bar.display:
            await self.list_chats()
        elif bar.has_focus_within:
            self.prompt.focus()

    async def show_chats_if_wide(self) -> None:
        """At startup: show the list if there is room and a chat to show."""
        wanted = self.frame.options.ui.sidebar
        wide = wanted is True or (wanted == "auto" and self.app.size.width >= WIDE)
        if not wide or not self.session.saver.kept or self.query_one(Home).display:
            return
        self.query_one(Sidebar).display = await self.list_chats()

    async def action_chats(self) -> None:
        bar = self.query_one(Sidebar)
        if not bar.display:
            await self.action_sidebar()
        bar.focus_filter()

    async def list_chats(self, query: str = "") -> bool:
        """Fill the list. Returns whether it has chats."""
        chats = await self.read_history(lambda history: history.chats(query=query))
        if chats is not None:
            self.query_one(Sidebar).show(chats, self.conversation.id)
        return bool(chats)

    @on(Input.Changed, "#chat-filter")
    async def _filtered(self, event: Input.Changed) -> None:
        await self.list_chats(event.value)

    @on(OptionList.OptionSelected, "#chat-list")
    @on(Input.Submitted, "#chat-filter")
    async def _chat_chosen(self, event: OptionList.OptionSelected | Input.Submitted) -> None:
        if isinstance(event, OptionList.OptionSelected):
            chosen = event.option_id
        else:
            await self.list_chats(event.value)  # the last keystrokes may not have been looked up yet
            chosen = self.query_one(Sidebar).first
        if chosen:
            await self.open_chat(chosen)

    async def action_leave_chats(self) -> None:
        if self.has_class("-narrow"):
            await self.action_sidebar()
        self.prompt.focus()

    async def open_chat(self, chat_id: str) -> None:
        """Show a saved chat; a running answer is stopped and kept."""
        async with self.changing:
            found = await self.read_history(lambda history: (history.chat(chat_id), history.messages(chat_id)))
            if found is None:
                return
            self.give_up()
            self.leave_editing()
            chat, messages = found
            titles_itself = self.conversation.titles_itself
            self.session.conversation = restored(chat, messages, self.conversation.sampling)
            self.conversation.titles_itself = titles_itself
            self.browse.at = None
            self.show_home(False)
            await self.transcript.clear()
            await self.transcript.sync(self.conversation)
            await self._model_of(chat)
        if self.query_one(Sidebar).display:
            if self.has_class("-narrow"):
                self.query_one(Sidebar).display = False
            else:
                await self.list_chats()
        self.prompt.focus()
        self.refresh_lines()

    async def _model_of(self, chat: SavedChat) -> None:
        """A chat opened from the home screen loads its model; otherwise the loaded model stays."""
        if self.phase == "none":
            home = self.query_one(Home)
            is_here = home.has(chat.model) or (Path(chat.model).is_absolute() and Path(chat.model).exists())
            if name := chat.model if is_here else home.default_model:
                await self.load(name)
        await self.tell_of_change(chat.model)

    # --- the prompt --------------------------------------------------------------------------------------------------

    def action_browse(self, step: int) -> None:
        self.browse.enter(step)
        self.refresh_lines()

    @work
    async def action_search_prompts(self) -> None:
        rows = [(text, clean_line(text)) for text in dict.fromkeys(reversed(self.prompt.sent_before))]
        text = await self.app.push_screen_wait(PickScreen("Earlier messages", rows))
        if text is not None:
            self.prompt.put(text)
        self.prompt.focus()

    @work(exclusive=True, group="editor", exit_on_error=False)
    async def action_editor(self) -> None:
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        try:
            command = shlex.split(editor)
        except ValueError:
            command = [editor]
        if not command or shutil.which(command[0]) is None:
            self.flash(f"the editor {editor} is not installed; set EDITOR to another one")
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prompt.md"
            file.write_text(self.prompt.text, encoding="utf-8")
            problem = ""
            try:
                with self.app.suspend():
                    try:  # an exception leaving `suspend` would leave the terminal suspended
                        code = subprocess.run([*command, str(file)], check=False).returncode
                        problem = f"{command[0]} exited with code {code}; the draft is unchanged" if code else ""
                    except OSError as error:
                        problem = f"cannot start {command[0]}: {error.strerror}"
            except SuspendNotSupported:
                problem = "this terminal cannot open an editor"
            if problem:
                self.flash(problem)
            else:
                with contextlib.suppress(OSError):
                    text = file.read_text(encoding="utf-8", errors="replace")
                    self.prompt.put(clean(text.removesuffix("\n")))
        self.app.refresh(layout=True)
