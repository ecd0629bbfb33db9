"""The conversation: one timer drains the backend's events; everything a key does ends in a call of the backend.

Knows nothing but `ChatBackend`. A message is a widget at once and waits until the model is ready and free.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Static

from localllm.errors import ConfigError
from localllm.request import ChatEvent, Delta, Done, Failed, Phase, Prefill
from localllm.terminal import clean_line
from localllm.tui.conversation import Conversation, Exchange, Typed, understand
from localllm.tui.screens.help import HelpScreen
from localllm.tui.widgets.choices import ContextChoices
from localllm.tui.widgets.loading import LoadCard
from localllm.tui.widgets.markdown import Fence
from localllm.tui.widgets.messages import AssistantMessage, UserMessage
from localllm.tui.widgets.prompt import Prompt, PromptArea
from localllm.tui.widgets.status import State, StatusLine, TitleLine
from localllm.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from localllm.tui.app import ChatApp

AGAIN_S = 2.0
"""A second Ctrl+C within this time quits."""
DRAW_SHARE = 0.05
"""Of one core, for everything this thread does while an answer comes; drawing waits until it is back below."""
MAX_DRAW_S = 0.3
"""But not longer than this."""


class ChatScreen(Screen[None]):
    """The first and main screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", id="chat.stop"),
        Binding("ctrl+c", "interrupt", "Interrupt", show=False, priority=True, id="app.interrupt"),
        Binding("ctrl+n", "new_chat", "New chat", id="chat.new"),
        Binding("ctrl+t", "thinking", "Thinking", id="ui.thinking"),
        Binding("f1", "help", "Help", id="app.help"),
    ]

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self.conversation = conversation
        self.phase = "loading"
        """loading, ready or failed"""
        self._waiting: deque[tuple[Exchange, UserMessage]] = deque()
        self._current: tuple[int, AssistantMessage] | None = None
        self._rates: deque[tuple[float, int]] = deque()
        self._state = State(sampling=conversation.sampling)
        self._message = ""
        self._message_until = 0.0
        self._interrupted_at = -AGAIN_S
        self._drawn = (0.0, 0.0)
        self._stuck: Exchange | None = None
        # the timer that drains and the handlers of keys are different tasks: one at a time changes the conversation
        self._changing = asyncio.Lock()

    @property
    def chat_app(self) -> ChatApp:
        """The application, with its backend and settings."""
        return cast("ChatApp", self.app)

    @property
    def transcript(self) -> Transcript:
        """The turns."""
        return self.query_one(Transcript)

    def compose(self) -> ComposeResult:
        """Title, transcript, choices (mostly absent), prompt, status."""
        yield TitleLine()
        ui = self.chat_app.ui
        yield Transcript(self.conversation, self.chat_app.model, window=ui.history_window, thinking=ui.thinking)
        yield ContextChoices()
        yield Prompt(enter_sends=ui.enter == "send")
        yield StatusLine()
        yield Static("terminal too small (40×12)", id="small", markup=False)

    def on_mount(self) -> None:
        """Focus the prompt, begin to load once the first frame is out, start the timer."""
        self.transcript.anchor()
        self.query_one(PromptArea).focus()
        self._state.offline = self.chat_app.offline
        self.call_after_refresh(self.chat_app.start_backend)
        self.set_interval(self.chat_app.drain_s, self.drain)
        self._refresh_lines()

    def on_resize(self) -> None:
        """Sides of the lines depend on the width."""
        self._refresh_lines()

    # --- events of the backend ---------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Everything that happened since the last time, then one redraw."""
        events = self.chat_app.backend.events()
        busy = bool(events) or self._current is not None or self.phase == "loading"
        if not busy and (not self._message or time.monotonic() < self._message_until):
            return
        async with self._changing:
            while events:
                await self._take(events.popleft())
            if self._current is not None:
                if not self._may_draw():
                    return
                message = self._current[1]
                await message.draw()
                self._live_footer(message)
            elif self.phase == "loading" and (card := self.transcript.card):
                card.tick()
        self._refresh_lines()

    def _may_draw(self) -> bool:
        """Keep this thread's share of the CPU small while an answer comes: the model may need the same cores."""
        now, cpu = time.monotonic(), time.thread_time()
        waited, spent = now - self._drawn[0], cpu - self._drawn[1]
        if waited < MAX_DRAW_S and spent > DRAW_SHARE * waited:
            return False
        self._drawn = now, cpu
        return True

    async def _take(self, event: ChatEvent) -> None:
        if isinstance(event, Phase):
            await self._phase(event)
        elif isinstance(event, Failed) and event.turn < 0:
            await self._loading_failed(event)
        elif self._current is None or event.turn != self._current[0]:
            return  # of a turn that was given up
        elif isinstance(event, Prefill):
            self._prefill(self._current[1], event)
        elif isinstance(event, Delta):
            self._rates.append((time.monotonic(), event.num_tokens))
            self._state.used_tokens += event.num_tokens
            self._current[1].feed(event.kind, event.text)
        elif isinstance(event, Done):
            await self._done(self._current[1], event)
        elif isinstance(event, Failed):
            await self._turn_failed(self._current[1], event)

    async def _phase(self, phase: Phase) -> None:
        transcript, card = self.transcript, self.transcript.card
        if phase.name != "ready":
            if phase.name == "resolve" and " " in phase.detail:  # a sentence of the hub's, not the name looked up
                await transcript.say(phase.detail)
            elif card:
                card.update(phase)
            return
        self._state.facts = facts = self.chat_app.backend.facts()
        if not facts.has_chat_template:
            name = clean_line(facts.model)
            fixes = ((f'localllm run {name} "Once upon a time"', "completes text"),)
            message = f"{name} is a base model: it has no chat template"
            await self._loading_failed(Failed(-1, "E202", message, "", fixes))
            return
        self.phase = "ready"
        self._state.text = "ready"
        await transcript.say(facts.truth_line, after=card)
        for warning in facts.warnings:
            await transcript.say(f"! {warning}", "warning", after=card)
        if card:
            await card.remove()
        await self._next()

    async def _loading_failed(self, failed: Failed) -> None:
        self.phase = "failed"
        self._state.text = "no model is loaded"
        await self.query(LoadCard).remove()
        await self.transcript.fail(failed)

    def _prefill(self, message: AssistantMessage, event: Prefill) -> None:
        self._state.used_tokens = max(self._state.used_tokens, event.total)
        share = event.done / event.total if event.total else 0.0
        filled = round(share * 6)
        bar = "▓" * filled + "░" * (6 - filled)
        message.footer(f"reading {event.total:,} tokens {bar} {share * 100:.0f} %")
        self._state.text = f"reading {share * 100:.0f} %"

    def _live_footer(self, message: AssistantMessage) -> None:
        now = time.monotonic()
        while self._rates and now - self._rates[0][0] > 1.0:
            self._rates.popleft()
        exchange = message.exchange
        if not (exchange.text or exchange.reasoning):
            return
        rate = sum(count for _, count in self._rates)
        message.footer(f"{rate} tok/s · esc stop")
        self._state.text = "thinking" if not exchange.text else "generating"

    async def _done(self, message: AssistantMessage, event: Done) -> None:
        exchange = message.exchange
        exchange.stop, exchange.usage, exchange.timing = str(event.stop), event.usage, event.timing
        self._state.used_tokens = event.usage.prompt_tokens + event.usage.completion_tokens
        await self._end(message)
        await message.finish(self.chat_app.ui.stats == "footer")
        await self._next()

    async def _turn_failed(self, message: AssistantMessage, failed: Failed) -> None:
        message.exchange.failed = failed
        message.exchange.stop = "error"
        await self._end(message)
        await message.fail(failed)
        if failed.code.startswith("E9"):
            self._stuck = message.exchange
            self.query_one(ContextChoices).offer(self.conversation, message.exchange)
        else:
            await self._next()

    async def _end(self, message: AssistantMessage) -> None:
        self._current = None
        self._rates.clear()
        self._state.facts = self.chat_app.backend.facts()
        self._state.text = "ready"

    # --- turns -------------------------------------------------------------------------------------------------------

    async def submit(self, text: str) -> None:
        """A message or a command was entered."""
        async with self._changing:
            await self._submit(text)
        self._refresh_lines()

    async def _submit(self, text: str) -> None:
        try:
            typed = understand(text)
            if typed.command:
                await self._command(typed)
                return
        except ConfigError as error:
            await self.transcript.say(f"! {error.message}" + (f" ({error.hint})" if error.hint else ""), "warning")
            return
        if self.phase == "failed":
            await self.transcript.say(
                "! no model is loaded: leave with Ctrl+D, then use one of the commands above", "warning"
            )
            self.query_one(PromptArea).text = text
            return
        await self._enqueue(self.conversation.ask(typed.text))

    async def _enqueue(self, exchange: Exchange) -> None:
        self._waiting.append((exchange, await self.transcript.add_question(exchange)))
        await self._next()
        await self.transcript.trim()

    async def _next(self) -> None:
        """Send the next message if the model is ready and free; mark the others as waiting."""
        if self.phase == "ready" and self._current is None and self._waiting and self._stuck is None:
            exchange, widget = self._waiting.popleft()
            widget.set_queued(False)
            await self._send(exchange, widget)
        for _, widget in self._waiting:
            widget.set_queued(True)

    async def _send(self, exchange: Exchange, widget: UserMessage) -> None:
        message = await self.transcript.add_answer(exchange, widget)
        turn = self.chat_app.backend.send(self.conversation.messages(exchange))
        self._current = turn, message
        self._state.text = "reading"

    @on(ContextChoices.Chosen)
    async def _chosen(self, event: ContextChoices.Chosen) -> None:
        await self._choose(event.choice)

    async def _choose(self, choice: str) -> None:
        async with self._changing:
            await self._resolve(choice)
        self._refresh_lines()

    async def _resolve(self, choice: str) -> None:
        exchange, self._stuck = self._stuck, None
        self.query_one(ContextChoices).display = False
        prompt = self.query_one(PromptArea)
        prompt.focus()
        if exchange is None:
            return
        if choice == "forget":
            for old in self.conversation.oldest_half(exchange):
                old.forgotten = True
        self.conversation.remove(exchange)
        await self.transcript.take_back(exchange)
        if choice == "edit":
            prompt.text = exchange.user
            prompt.move_cursor(prompt.document.end)
            await self._next()
            return
        if choice == "new":
            await self._clear()
        await self._enqueue(self.conversation.ask(exchange.user))

    # --- commands ----------------------------------------------------------------------------------------------------

    async def _command(self, typed: Typed) -> None:
        if typed.command == "quit":
            self.chat_app.exit()
        elif typed.command == "help":
            self.action_help()
        elif typed.command == "new":
            await self._clear()
            self.flash("new chat")
        elif typed.command == "system":
            await self.transcript.say(self.conversation.set_system(typed.text))
        elif typed.command == "set":
            await self.transcript.say(self.conversation.set_sampling(typed.text))
        elif typed.command == "stats":
            await self.transcript.say(self.chat_app.stats_text(self.conversation))
        elif typed.command == "copy":
            text, what = self.conversation.pick(typed.text)
            self.flash(f"{what}: {self.chat_app.copy(text)}")

    def flash(self, text: str, seconds: float = 4.0) -> None:
        """Say something in the status line for a moment."""
        self._message, self._message_until = clean_line(text), time.monotonic() + seconds
        self._refresh_lines()

    async def action_new_chat(self) -> None:
        """Forget the conversation."""
        async with self._changing:
            await self._clear()
        self.flash("new chat")

    async def _clear(self) -> None:
        if self._current is not None:
            self.chat_app.backend.stop(self._current[0])
            self._current = None
        self._waiting.clear()
        self._stuck = None
        self.query_one(ContextChoices).display = False
        self.conversation.clear()
        self._state.used_tokens = 0
        if self.phase == "ready":
            self._state.text = "ready"
        await self.transcript.clear()
        self.query_one(PromptArea).focus()

    def action_stop(self) -> None:
        """Esc: stop the answer, else close the choices."""
        if self._current is not None:
            self.chat_app.backend.stop(self._current[0])
            self._state.text = "stopping…"
        elif self._stuck is not None:
            self.call_later(self._choose, "edit")

    def action_interrupt(self) -> None:
        """Ctrl+C: copy the selection, else stop, else clear the prompt; twice within a second quits."""
        prompt = self.query_one(PromptArea)
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
        if self._current is not None:
            self.action_stop()
            self.flash("stopping; press ctrl+c again to stop and quit", AGAIN_S)
        elif prompt.text:
            prompt.text = ""
            self.flash("cleared; press ctrl+c again to quit", AGAIN_S)
        else:
            self.flash("press ctrl+c again to quit", AGAIN_S)

    def action_thinking(self) -> None:
        """Open or close the reasoning of the last answer that has any."""
        for message in reversed(list(self.query(AssistantMessage))):
            if message.exchange.reasoning:
                message.thought.toggle()
                return

    def action_help(self) -> None:
        """F1."""
        self.app.push_screen(HelpScreen())

    @on(PromptArea.Sent)
    async def _sent(self, event: PromptArea.Sent) -> None:
        area = self.query_one(PromptArea)
        area.remember(event.text)
        area.text = ""
        await self.submit(event.text)

    @on(PromptArea.Quit)
    def _quit(self) -> None:
        self.chat_app.exit()

    @on(PromptArea.Interrupt)
    def _interrupt(self) -> None:
        self.action_interrupt()

    @on(PromptArea.Scroll)
    def _scroll(self, event: PromptArea.Scroll) -> None:
        transcript = self.transcript
        animate = self.chat_app.moving
        if event.where == "pageup":
            transcript.scroll_page_up(animate=animate)
        elif event.where == "pagedown":
            transcript.scroll_page_down(animate=animate)
        elif event.where == "home":
            transcript.scroll_home(animate=animate)
        else:
            transcript.anchor()

    @on(Fence.Copy)
    def _copy_code(self, event: Fence.Copy) -> None:
        self.flash(f"code: {self.chat_app.copy(event.code)}")

    # --- what is on the screen ---------------------------------------------------------------------------------------

    def _refresh_lines(self) -> None:
        if not self.is_mounted:
            return
        state = self._state
        if self.phase == "loading" and (card := self.transcript.card):
            state.text = card.current()
        shown = state
        if time.monotonic() >= self._message_until:
            self._message = ""
        if self._message:
            shown = State(self._message, state.facts, state.used_tokens, {}, state.offline)
        keys = "esc stop · F1 help" if self._current is not None else "^N new · F1 help · ^D quit"
        self.query_one(StatusLine).show(shown, keys)
        first = self.conversation.exchanges[0].user if self.conversation.exchanges else ""
        self.query_one(TitleLine).show(first.split("\n")[0], self.chat_app.model, state.facts)
        self.query_one(Prompt).set_title(f"{len(self._waiting)} queued" if self._waiting else "")
