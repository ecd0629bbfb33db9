"""The conversation: one timer drains the backend's events; everything a key does ends in a call of the backend.

Knows nothing but `ChatBackend`. A message is a widget at once and waits until the model is ready and free. What typed
commands, browse mode and the questions above the prompt do stands in modules of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.widgets import Static

from localllm.conversation.attachments import Attachment, read_attachment
from localllm.conversation.slash import understand
from localllm.conversation.tree import Conversation, Exchange
from localllm.errors import ConfigError
from localllm.history import PromptHistory
from localllm.request import Message
from localllm.terminal import clean_line
from localllm.tui.keys import bindings
from localllm.tui.widgets.choices import Choices
from localllm.tui.widgets.copying import CopyCode
from localllm.tui.widgets.engine import EnginePanel, Turns
from localllm.tui.widgets.home import Home
from localllm.tui.widgets.loading import LoadCard
from localllm.tui.widgets.messages import AssistantMessage, UserMessage
from localllm.tui.widgets.prompt import Hints, Prompt, PromptArea
from localllm.tui.widgets.sidebar import Sidebar
from localllm.tui.widgets.status import State, StatusLine, TitleLine
from localllm.tui.widgets.transcript import Transcript

from .actions import Actions
from .browse import Browse
from .commands import Commands
from .questions import Questions
from .saved import SavedChats
from .serving import Serving
from .stream import SAMPLES, Stream

if TYPE_CHECKING:
    from localllm.tui.app import ChatApp


class ChatScreen(Actions, SavedChats, Stream):
    """The first and main screen."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self.conversation = conversation
        self.phase = "none"
        """none (no model was chosen), loading, ready or failed"""
        self.waiting: deque[tuple[Exchange, UserMessage]] = deque()
        self.current: tuple[int, AssistantMessage] | None = None
        self.stuck: Exchange | None = None
        """the question that waits for an answer to a question of ours"""
        self.editing: tuple[Exchange, bool] | None = None
        """(what is being edited, whether it is the question)"""
        self.attached: list[Attachment] = []
        self.turns = Turns()
        self.browse = Browse(self)
        self.commands = Commands(self)
        self.questions = Questions(self)
        self.serving = Serving(self)
        self.state = State(sampling=conversation.sampling)
        self.side: tuple[int, list[str]] | None = None
        """a turn that is no part of the conversation, and what it has said"""
        self.prompts = PromptHistory()
        self._rates: deque[tuple[float, int]] = deque()
        self._history: deque[int] = deque(maxlen=SAMPLES)
        self._told_problem = ""
        # the timer that drains and the handlers of keys are different tasks: one at a time changes the conversation
        self.changing = asyncio.Lock()

    @property
    def chat_app(self) -> ChatApp:
        """The application, with its backend and settings."""
        return cast("ChatApp", self.app)

    @property
    def transcript(self) -> Transcript:
        """The turns."""
        return self.query_one(Transcript)

    @property
    def prompt(self) -> PromptArea:
        """Where one types."""
        return self.query_one(PromptArea)

    def compose(self) -> ComposeResult:
        """Title, chats, transcript, engine, choices (mostly absent), prompt, status."""
        app, ui = self.chat_app, self.chat_app.ui
        yield TitleLine()
        with Horizontal(id="middle"):
            yield Sidebar()
            yield Home(app.keymap)
            yield Transcript(self.conversation, window=ui.history_window, thinking=ui.thinking)
            yield EnginePanel(app.backend.facts, self.turns, lambda: self.serving.url)
        yield Choices()
        yield Prompt(app.keymap, enter_sends=ui.enter == "send")
        yield StatusLine()
        yield Hints()
        yield Static("terminal too small (40×12)", id="small", markup=False)

    async def on_mount(self) -> None:
        """Focus the prompt, begin to load once the first frame is out, start the timer."""
        app = self.chat_app
        self.set_class(app.ui.stats == "off", "-no-stats")
        self.transcript.anchor()
        self.prompt.focus()
        self.state.offline = app.offline
        self.state.think = self.conversation.think
        self.query_one(Sidebar).display = False
        self.show_home(not app.starts_with_model and not self.conversation.exchanges)
        if self.query_one(Home).display:
            self.focus_home()
        if app.starts_with_model:
            self.phase = "loading"
            await self.transcript.begin_loading(app.model)
        self.call_after_refresh(app.start_backend)
        self.set_interval(app.drain_s, self.drain)
        self.refresh_lines()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Whoever types again has left the messages."""
        if event.widget is self.prompt:
            self.browse.unmark()
        self.refresh_lines()

    def on_resize(self) -> None:
        """Sides of the lines depend on the width."""
        self.refresh_lines()

    def show_home(self, shown: bool) -> None:
        """The list of chats and models in place of the transcript."""
        self.query_one(Home).display = shown
        self.transcript.display = not shown

    # --- turns -------------------------------------------------------------------------------------------------------

    async def load(self, name: str, changes: Mapping[str, Any] | None = None) -> None:
        """Load another model, or the same with other settings; the conversation stays."""
        self.give_up()
        self.show_home(False)
        self.chat_app.model = name
        self.conversation.model = name
        self.phase = "loading"
        self.state.facts = type(self.state.facts)()
        await self.transcript.begin_loading(name)
        await self.serving.pause()
        self.chat_app.backend.start(name, changes)

    async def pause(self) -> None:
        """End a download; its parts stay."""
        await self.serving.pause()
        await asyncio.to_thread(self.chat_app.backend.close)
        self.chat_app.backend.events().clear()
        await self.query(LoadCard).remove()
        self.phase, self.state.text = "failed", "paused"
        name = clean_line(self.chat_app.model)
        await self.transcript.say(f"the download of {name} is paused; /model {name} goes on with it")

    async def submit(self, text: str) -> None:
        """A message or a command was entered."""
        async with self.changing:
            await self._submit(text)
        self.refresh_lines()

    async def _submit(self, text: str) -> None:
        if self.editing is not None:
            await self._edited(text)
            return
        try:
            typed = understand(text)
            if typed.command:
                await self.commands.run(typed)
                return
            files = (*self.attached, *_mentioned(typed.text))
        except ConfigError as error:
            await self.transcript.say(f"! {error.message}" + (f" ({error.hint})" if error.hint else ""), "warning")
            return
        if self.phase in ("none", "failed") and not await self._start_default(text):
            return
        self.attached.clear()
        await self.enqueue(self.conversation.ask(typed.text, files))

    async def _start_default(self, text: str) -> bool:
        """A message without a model: with the best one here, else it goes back into the prompt."""
        name = self.query_one(Home).default_model if self.phase == "none" else ""
        if name:
            await self.load(name)
            return True
        self.prompt.put(text)
        models = self.chat_app.keymap.label("models.open")
        if self.phase == "none":
            self.flash(f"choose a model first: ↑ ↓ ⏎ above, or {models}")
            self.focus_home()
        else:
            await self.transcript.say(f"! no model is loaded: {models} chooses another one", "warning")
        return False

    async def _edited(self, text: str) -> None:
        assert self.editing is not None
        exchange, is_question = self.editing
        self.editing = None
        if is_question:
            await self.ask_again(self.conversation.edited(exchange, text))
        else:
            other = self.conversation.rewritten(exchange, text)
            self.keep(other)
            await self.transcript.sync()

    async def enqueue(self, exchange: Exchange) -> None:
        """Show a question and send it when its turn comes."""
        self.show_home(False)
        self.waiting.append((exchange, await self.transcript.add_question(exchange)))
        self.keep(exchange)
        await self.next_turn()
        await self.transcript.trim()

    async def ask_again(self, exchange: Exchange) -> None:
        """Show the branch of a question that was just made, and send it."""
        self.conversation.exchanges.remove(exchange)
        await self.transcript.sync()
        self.conversation.exchanges.append(exchange)
        await self.enqueue(exchange)

    async def next_turn(self) -> None:
        """Send the next message if the model is ready and free; mark the others as waiting."""
        free = self.current is None and self.side is None and self.stuck is None
        if self.phase == "ready" and free and self.waiting:
            exchange, widget = self.waiting.popleft()
            widget.set_queued(False)
            message = await self.transcript.add_answer(exchange, widget)
            self._send(message, self.conversation.messages(exchange))
        for _, widget in self.waiting:
            widget.set_queued(True)

    def _send(self, message: AssistantMessage, messages: list[Message]) -> None:
        message.exchange.model = self.chat_app.model
        self._saved_at = self._sent_at = time.monotonic()
        turn = self.chat_app.backend.send(messages, None, self.conversation.template_values)
        self.current = turn, message
        self.state.text = "reading"

    async def go_on(self, exchange: Exchange) -> None:
        """Let the model continue an answer that was cut short."""
        widget = await self.transcript.drop_answer(exchange)
        if widget is None:
            return
        exchange.text, exchange.stop, exchange.failed = exchange.text.rstrip(), "", None
        message = await self.transcript.add_answer(exchange, widget)
        message.prefill(exchange.text)
        answer: Message = {"role": "assistant", "content": exchange.text}
        self._send(message, [*self.conversation.messages(exchange), answer])

    def give_up(self) -> None:
        """Stop what runs and forget what waits; what there is of an answer is kept as it is."""
        if self.current is not None:
            self.chat_app.backend.stop(self.current[0])
            exchange = self.current[1].exchange
            exchange.stop = exchange.stop or "abort"
            self.keep(exchange)
            self.current = None
        if self.side is not None:
            self.chat_app.backend.stop(self.side[0])
            self.side = None
        self.waiting.clear()
        self.stuck = None
        self.query_one(Choices).close()

    # --- messages of the widgets -------------------------------------------------------------------------------------

    @on(Choices.Chosen)
    async def _chosen(self, event: Choices.Chosen) -> None:
        async with self.changing:
            await self.questions.answer(event.topic, event.name)
        self.refresh_lines()

    @on(PromptArea.Sent)
    async def _sent(self, event: PromptArea.Sent) -> None:
        area = self.prompt
        area.remember(event.text)
        self.prompts.add(event.text)
        area.text = ""
        await self.submit(event.text)

    @on(PromptArea.Nothing)
    async def _nothing_sent(self) -> None:
        """Enter alone goes on with an answer that was just cut short, as the status line says."""
        if self.can_go_on:
            await self.submit("/continue")

    @property
    def can_go_on(self) -> bool:
        """Whether the last answer was stopped, or reached its limit, and nothing else is under way."""
        busy = self.current is not None or self.side is not None or self.waiting or self.editing is not None
        last = self.conversation.exchanges[-1] if self.conversation.exchanges else None
        cut = last is not None and last.text != "" and last.stop in ("abort", "length")
        return cut and not busy and self.phase == "ready"

    @on(PromptArea.Quit)
    def _quit(self) -> None:
        self.chat_app.exit()

    @on(PromptArea.Interrupt)
    def _interrupt(self) -> None:
        self.action_interrupt()

    @on(PromptArea.Scroll)
    async def _scroll(self, event: PromptArea.Scroll) -> None:
        transcript, animate = self.transcript, self.chat_app.moving
        if event.where == "pageup":
            transcript.scroll_page_up(animate=animate)
        elif event.where == "pagedown":
            transcript.scroll_page_down(animate=animate)
        elif event.where == "home":
            if transcript.scroll_y <= 0:
                await transcript.load_earlier()
            transcript.scroll_home(animate=animate)
        else:
            transcript.anchor()

    @on(Transcript.Browsed)
    async def _browsed(self, event: Transcript.Browsed) -> None:
        await self.browse.key(event.key, event.character)
        self.refresh_lines()

    @on(CopyCode)
    def _copy_code(self, event: CopyCode) -> None:
        self.flash(f"code: {self.chat_app.copy(event.code)}")

    # --- what is on the screen ---------------------------------------------------------------------------------------

    def refresh_lines(self) -> None:
        """Title, status and keys, as things stand."""
        if not self.is_mounted:
            return
        state, app = self.state, self.chat_app
        if self.phase == "loading" and (card := self.transcript.card):
            state.text = card.current()
        elif self.phase == "none":
            state.text = "no model yet"
        state.think = self.conversation.think
        state.api = self.serving.url
        self._tell_problem()
        shown = replace(state, text=message, sampling={}, think="auto") if (message := self.message) else state
        self.query_one(StatusLine).show(shown, self.live_keys())
        self.query_one(TitleLine).show(self.conversation.shown_title, app.model, state.facts)
        title = f"{len(self.waiting)} queued" if self.waiting else ""
        if self.editing is not None:
            title = f"editing {'a question' if self.editing[1] else 'an answer'} · esc leaves it"
        self.query_one(Prompt).set_title(title)
        self.query_one(Prompt).set_files(self.attached)

    def _tell_problem(self) -> None:
        saver = self.chat_app.saver
        self.state.unsaved = bool(saver.problem)
        told, saver.notice = saver.notice, ""
        if saver.problem and saver.problem != self._told_problem:
            told = f"! this chat is not being saved: {saver.problem}"
        self._told_problem = saver.problem
        if told:
            self.call_later(self.transcript.say, told, "warning")


def _mentioned(text: str) -> list[Attachment]:
    """The files behind `@path` in a message. Raises ConfigError for one that is there and cannot be attached."""
    from pathlib import Path

    words = [word[1:].rstrip(".,;:!?)\"'") for word in text.split() if word.startswith("@") and len(word) > 1]
    return [read_attachment(word) for word in dict.fromkeys(words) if Path(word).expanduser().is_file()]
