"""The chat screen: layout, startup, and input.

One timer drains the backend's events; every key action ends in a call of the backend.
"""

from __future__ import annotations

import asyncio
import gc
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.widgets import OptionList, Static

from localllm.conversation.attachments import mentioned, missing, refuse_pictures
from localllm.conversation.documents import Document
from localllm.conversation.session import Session
from localllm.conversation.slash import understand
from localllm.conversation.tools import Toolbox
from localllm.conversation.tree import Exchange
from localllm.errors import LocalLLMError
from localllm.history.prompts import PromptHistory
from localllm.tui.keymap import bindings
from localllm.tui.widgets.choices import Choices
from localllm.tui.widgets.copying import CopyCode
from localllm.tui.widgets.engine import EnginePanel
from localllm.tui.widgets.home import Home
from localllm.tui.widgets.prompt import Hints, Prompt, PromptArea
from localllm.tui.widgets.sidebar import Sidebar
from localllm.tui.widgets.status import StatusLine, TitleLine
from localllm.tui.widgets.transcript import Transcript

from .actions import Actions
from .commands import Commands

TYPING_S = 0.3  # pause in typing before the input is examined


class ChatScreen(Actions):
    """The first and main screen."""

    AUTO_FOCUS = ""  # `on_mount` sets the first focus
    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.commands = Commands(self)
        self.prompts = PromptHistory()
        self._shown_problem = ""
        self._named: tuple[Document, ...] = ()  # files named by @path in the prompt
        self._budget = ""  # tokens that the next message's files take
        self._measured_for: Any = None

    def compose(self) -> ComposeResult:
        app, ui = self.frame, self.frame.options.ui
        yield TitleLine()
        with Horizontal(id="middle"):
            yield Sidebar()
            yield Home(app.keymap, app.options.offline)
            yield Transcript(self.conversation, window=ui.history_window, thinking=ui.thinking)
            yield EnginePanel(self.session)
        yield Choices()
        yield Prompt(app.keymap, enter_sends=ui.enter == "send")
        yield StatusLine()
        yield Hints()
        yield Static("terminal too small (40×12)", id="small", markup=False)

    async def on_mount(self) -> None:
        options = self.frame.options
        self.set_class(options.ui.stats == "off", "-no-stats")
        self.transcript.anchor()
        self.state.offline = options.offline
        self.state.think = self.conversation.think
        self.query_one(Sidebar).display = False
        self.show_home(options.home and not self.conversation.exchanges)
        self.set_focus(self.query_one("#home-list") if self.query_one(Home).display else self.prompt)
        if not options.home:
            self.phase = "loading"
            await self.transcript.begin_loading(self.session.model)
        self.call_after_refresh(self._begin)
        if self.session.tools is not None:
            self._connect(self.session.tools)
        self.set_interval(self.frame.drain_s, self.drain)
        self.refresh_lines()

    async def _begin(self) -> None:
        """Start loading after the first frame. The prompt accepts input while torch is imported."""
        gc.enable()
        options = self.frame.options
        if options.home:
            self._fill_home()
        else:
            self.session.backend.start(options.name or self.session.model or None)
        for problem in self.frame.problems:
            await self.transcript.say(f"! {problem}", "warning")
        self.prompt.load_history(self.prompts.load())
        if self.conversation.exchanges:
            await self.transcript.sync()
            await self.tell_of_change(self.conversation.model, options.name or "")
        await self.show_chats_if_wide()
        if self.session.first:
            await self.submit(self.session.first)

    @work(exit_on_error=False, group="tools")
    async def _connect(self, tools: Toolbox) -> None:
        """Connect to the MCP servers; messages sent in the meantime wait for them."""
        lines = await asyncio.to_thread(tools.connect)
        async with self.change():
            for line in lines:
                await self.transcript.say(line, "warning" if line.startswith("! ") else "")
            await self.next_turn()

    @work(exit_on_error=False, group="home")
    async def _fill_home(self) -> None:
        """Fill the home screen piece by piece."""
        home, backend = self.query_one(Home), self.session.backend
        if self.session.saver.kept:
            home.show_chats(await self.read_history(lambda history: history.chats(limit=5)) or ())
        pieces: tuple[tuple[Callable[[Any], None], Callable[[], Any]], ...] = (
            (home.show_models, backend.choices), (home.show_machine, backend.checks)
        )  # fmt: skip
        for show, reads in pieces:
            try:
                show(await asyncio.to_thread(reads))
            except LocalLLMError as error:
                self.flash(error.message)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Focusing the prompt ends browse mode."""
        if event.widget is self.prompt:
            self.browse.unmark()
        elif event.widget is self.transcript and not self.browse.active:
            self.browse.enter()
        self.refresh_lines()

    def on_descendant_blur(self) -> None:
        self.call_after_refresh(self.settle_focus)

    def on_resize(self) -> None:
        self.refresh_lines()
        self.call_after_refresh(self.settle_focus)

    def settle_focus(self) -> None:
        """Give the focus to the prompt when the focused widget has gone."""
        at = self.focused
        if at is not None and at.id == "home-list" and self.query_one(Home).display:
            return  # empty, and so without height, until the chats are read
        if (at is None or not at.is_on_screen) and self.is_current and self.app.app_focus:
            self.set_focus(self.prompt)  # immediately: a key may be waiting for it

    def before_letter(self) -> None:
        """Lists take no letters. Focus the prompt before the first one, so that all arrive in order."""
        if isinstance(self.focused, OptionList) and not isinstance(self.focused, Choices):
            self.set_focus(self.prompt)

    async def submit(self, text: str, editing: tuple[Exchange, bool] | None = None) -> None:
        """Carry out the input, in order. Names and files are resolved before anything changes.

        editing   the message that the text replaces
        """
        async with self.in_order:
            try:
                await self._submit(text, editing)
            except LocalLLMError as error:
                await self.complain(error)
        self.refresh_lines()

    async def _submit(self, text: str, editing: tuple[Exchange, bool] | None) -> None:
        if editing is not None and any(one is editing[0] for one in self.conversation.exchanges):
            async with self.changing:
                await self._edited(text, *editing)
            return
        typed = understand(text)
        if typed.command == "model" and typed.text:
            await self.choose_model(typed.text)
        elif typed.command:
            async with self.changing:
                await self.commands.run(typed)
        else:
            files = (*self.session.files, *await asyncio.to_thread(mentioned, typed.text))
            if self.phase == "ready":
                refuse_pictures(files, self.session.backend.facts())
            if notice := await asyncio.to_thread(missing, typed.text):
                await self.transcript.say(f"! {notice}", "warning")
            async with self.changing:
                await self._ask(text, typed.text, files)

    async def _ask(self, typed: str, text: str, files: tuple[Document, ...]) -> None:
        if self.phase in ("none", "failed") and not await self._start_default(typed):
            return
        self.session.files.clear()
        await self.enqueue(self.conversation.ask(text, files))

    async def _start_default(self, text: str) -> bool:
        """Start the best local model for a first message, or put the message back into the prompt."""
        name = self.query_one(Home).default_model if self.phase == "none" else ""
        if name:
            await self.load(name)
            return True
        self.prompt.put(text)
        models = self.frame.keymap.label("models.open")
        if self.phase == "none":
            self.flash(f"choose a model first: ↑ ↓ ⏎ above, or {models}")
            self.query_one("#home-list").focus()
        else:
            await self.transcript.say(f"! no model is loaded: press {models} to choose one", "warning")
        return False

    async def _edited(self, text: str, exchange: Exchange, is_question: bool) -> None:
        if not self.may_change():  # an earlier message is being answered in this branch
            if self.editing is None:
                self.editing, self.draft = (exchange, is_question), self.prompt.text
                self.prompt.put(text)
        elif is_question:
            await self.ask_again(self.conversation.edited(exchange, text))
        else:
            other = self.conversation.rewritten(exchange, text)
            self.keep(other)
            await self.transcript.sync()

    @on(Choices.Chosen)
    async def _chosen(self, event: Choices.Chosen) -> None:
        async with self.change():
            await self.questions.answer(event.choice)

    @on(PromptArea.Sent)
    def _sent(self, event: PromptArea.Sent) -> None:
        if event.text:
            self.prompts.add(event.text)
            editing, self.editing = self.editing, None  # later input is no longer part of this edit
            if editing is not None and not self.prompt.text:
                self.prompt.put(self.draft)
            self.run_worker(self.submit(event.text, editing), group="typed")
        elif self.can_go_on:  # Enter alone continues an answer that was cut short, as the status line says
            self.run_worker(self.submit("/continue"), group="typed")
        elif self.query_one(Home).display:  # empty input: move to the list of things to start
            self.query_one("#home-list").focus()

    @on(PromptArea.Dropped)
    def _dropped(self, event: PromptArea.Dropped) -> None:
        if self.editing is not None or self.prompt.text.startswith("/"):
            self.prompt.insert(event.text)
        else:
            self.run_worker(self.submit(f"/attach {shlex.quote(event.path)}"), group="typed")

    async def action_scroll_to(self, key: str) -> None:
        transcript, animate = self.transcript, self.frame.moving
        if key == "pageup":
            transcript.scroll_page_up(animate=animate)
        elif key == "pagedown":
            transcript.scroll_page_down(animate=animate)
        elif key == "home":
            if transcript.scroll_y <= 0:
                await transcript.load_earlier()
            transcript.scroll_home(animate=animate)
        else:
            transcript.anchor()

    async def on_key(self, event: events.Key) -> None:
        """In the transcript, keys belong to browse mode; unhandled letters go to the prompt."""
        if self.transcript.has_focus and await self.browse.key(event.key):
            event.stop()
            self.refresh_lines()
        elif event.character and event.is_printable:
            event.stop()
            self.prompt.focus()
            self.prompt.insert(event.character)

    @on(CopyCode)
    def _copy_code(self, event: CopyCode) -> None:
        self.flash(f"code: {self.session.copy(event.code)}")

    def refresh_lines(self) -> None:
        if not self.is_mounted:
            return
        state = self.state
        if self.phase == "loading" and (card := self.transcript.card):
            state.text = card.current()
        elif self.phase == "none":
            state.text = "no model yet"
        state.think = self.conversation.think
        state.api = self.session.url
        if self.current is None:
            state.used_tokens = self.conversation.used_tokens
        self._show_problem()
        self.mark_queued()
        shown = replace(state, text=self.message, sampling={}, think="auto") if self.message else state
        self.query_one(StatusLine).show(shown, "" if self.message else self.live_keys())
        self.query_one(TitleLine).show(self.conversation.shown_title, self.session.model, state.facts)
        title = f"{len(self.waiting)} queued" if self.waiting else ""
        if self.editing is not None:
            title = f"editing {'a question' if self.editing[1] else 'an answer'} · esc cancels"
        self.query_one(Prompt).show(title, (*self.session.files, *self._named), self._budget)
        self._update_budget()

    def _update_budget(self) -> None:
        """Show how many tokens the next message's files take, before it is sent."""
        words = tuple(word for word in self.prompt.text.split()[:2000] if word.startswith("@") and len(word) > 1)
        key = tuple(map(id, self.session.files)), words, self.state.used_tokens, self.phase
        if key != self._measured_for:
            self._measured_for = key
            self._measure(" ".join(words))

    @work(exclusive=True, exit_on_error=False, group="files")
    async def _measure(self, words: str) -> None:
        named: tuple[Document, ...] = ()
        if words:
            await asyncio.sleep(TYPING_S)  # the path may not be complete yet
            with suppress(LocalLLMError):  # reported when the message is sent
                named = tuple(await asyncio.to_thread(mentioned, words))
        files = (*self.session.files, *named)
        budget = await asyncio.to_thread(self.session.budget, files) if files else ""
        if (named, budget) != (self._named, self._budget):
            self._named, self._budget = named, budget
            self.refresh_lines()

    @on(PromptArea.Changed)
    def _on_mention(self) -> None:
        if "@" in self.prompt.text or self._named:
            self._update_budget()

    def _show_problem(self) -> None:
        saver = self.session.saver
        self.state.unsaved = bool(saver.problem)
        told, saver.notice = saver.notice, ""
        if saver.problem and saver.problem != self._shown_problem:
            told = f"! this chat is not being saved: {saver.problem}"
        self._shown_problem = saver.problem
        if told:
            self.call_later(self.transcript.say, told, "warning")
