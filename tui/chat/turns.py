"""The chat screen's state, and the turns: questions wait here until the model is free, are sent, or are dropped.

`ChatScreen` is a chain of classes, each building on the previous: `turns`, `stream` (backend events),
`actions` (keys and lists), `screen` (layout and widget messages).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

from textual.screen import Screen
from textual.timer import Timer

from localllm.conversation.attachments import fit
from localllm.conversation.session import Session, complaint, full_name
from localllm.conversation.slash import OFF
from localllm.conversation.tools import stop as end_calls
from localllm.conversation.tree import Conversation, Exchange
from localllm.errors import LocalLLMError
from localllm.request import Message
from localllm.terminal import cell_width, clean, clean_line
from localllm.tui.frame import Frame
from localllm.tui.widgets.choices import Choices
from localllm.tui.widgets.home import Home
from localllm.tui.widgets.messages import AssistantMessage, UserMessage
from localllm.tui.widgets.prompt import PromptArea
from localllm.tui.widgets.status import State
from localllm.tui.widgets.transcript import Transcript


class Turns(Screen[None]):
    """State shared by the parts of the chat screen.

    phase    none (no model chosen), loading, ready or failed
    current  (backend turn, message) of the running answer
    calling  set while tools run for `current`: the event that stops them
    stuck    the question that waits until the user answers a question of ours
    side     a turn outside the conversation, and its text so far
    editing  (exchange being edited, whether it is the question)
    draft    the prompt before it was filled with the text to edit
    message  a short message in the status line
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.phase = "none"
        self.waiting: deque[tuple[Exchange, UserMessage]] = deque()
        self.current: tuple[int, AssistantMessage] | None = None
        self.calling: threading.Event | None = None
        self.stuck: Exchange | None = None
        self.side: tuple[int, list[str]] | None = None
        self.editing: tuple[Exchange, bool] | None = None
        self.draft = ""
        self.state = State(sampling=session.conversation.sampling)
        self.message = ""
        self._fading: Timer | None = None
        self._saved_at = self._sent_at = 0.0
        # the draining timer and the key handlers are separate tasks: one at a time changes the conversation
        self.changing = asyncio.Lock()
        self.in_order = asyncio.Lock()  # inputs are carried out one at a time, in typing order

    @property
    def frame(self) -> Frame:
        return cast(Frame, self.app)

    @property
    def conversation(self) -> Conversation:
        return self.session.conversation

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def prompt(self) -> PromptArea:
        return self.query_one(PromptArea)

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Change the conversation, one task at a time; then update the lines."""
        async with self.changing:
            yield
        self.refresh_lines()

    def refresh_lines(self) -> None:
        """Update the title, status and key lines."""
        raise NotImplementedError

    async def end_answer(self, message: AssistantMessage) -> None:
        """Show and save a finished answer."""
        raise NotImplementedError

    def flash(self, text: str, seconds: float = 4.0) -> None:
        """Show a message in the status line for a while, a longer one in the transcript; "" ends it."""
        if self._fading is not None:
            self._fading.stop()
        self.message = clean_line(text)
        if cell_width(self.message) > self.app.size.width - 2 and self.transcript.display:
            self.call_later(self.transcript.say, text)
            self.message = ""
        self._fading = self.set_timer(seconds, partial(self.flash, "")) if text else None
        self.refresh_lines()

    async def complain(self, error: LocalLLMError) -> None:
        if self.transcript.display:
            await self.transcript.say(complaint(error), "warning")
        else:
            self.query_one(Home).tell(complaint(error))

    def show_home(self, shown: bool) -> None:
        """Show the list of chats and models in place of the transcript."""
        self.query_one(Home).display = shown
        self.transcript.display = not shown

    async def choose_model(self, name: str, changes: Mapping[str, Any] | None = None) -> None:
        """Load the model with this name. Raises LocalLLMError for an unknown one; a running answer then continues."""
        find, now = self.session.backend.find, self.session.model
        found = full_name(await asyncio.to_thread(find, name))
        with suppress(LocalLLMError):  # a bare file name cannot be resolved again
            now = await asyncio.to_thread(find, now)
        if found == now and not changes and self.phase in ("loading", "ready"):
            running = self.phase == "ready"
            if not running or await asyncio.to_thread(self.session.backend.is_there):
                self.flash(f"{clean_line(name)} is already {'running' if running else 'being loaded'}")
                return
        async with self.changing:
            await self.load(found, changes)

    async def load(self, name: str, changes: Mapping[str, Any] | None = None) -> None:
        """Load another model, or the same one with other settings; the conversation and queued messages stay."""
        message, waiting = self.current and self.current[1], list(self.waiting)
        self.give_up()
        if message is not None:
            message.draw_calls()
            await self.end_answer(message)
        self.waiting.extend(waiting)
        self.show_home(False)
        self.session.model = self.conversation.model = name
        self.phase = "loading"
        self.state.facts = type(self.state.facts)()
        await self.transcript.begin_loading(name)
        await self._close_endpoint()
        self.session.backend.start(name, changes)

    async def tell_of_change(self, used: str, *others: str) -> None:
        """Say so when the chat continues with another model than before. `others`: further names of the new one."""
        now, used = clean_line(self.session.model), clean_line(used)
        if used and now and used not in (now, *others):
            said = f"! this chat used {used} and now continues with {now}; /model {used} changes back"
            await self.transcript.say(said, "warning")

    async def pause(self) -> None:
        await self._close_endpoint()
        await asyncio.to_thread(self.session.backend.close)
        self.session.backend.events().clear()
        await self.transcript.end_loading()
        self.phase, self.state.text = "failed", "paused"
        name = clean_line(self.session.model)
        await self.transcript.say(f"the download of {name} is paused; /model {name} resumes it")

    async def _close_endpoint(self) -> None:
        """The model is about to be unloaded: stop serving it."""
        if self.session.endpoint is not None and self.session.url:
            await asyncio.to_thread(self.session.endpoint.stop)

    async def serve(self, port: int | None) -> None:
        """Start or stop the endpoint, in a thread; errors are shown."""
        try:
            said = await asyncio.to_thread(self.session.serve, port)
        except LocalLLMError as error:
            await self.complain(error)
        else:
            self.flash(said) if port == OFF else await self.transcript.say(said)

    def keep(self, *exchanges: Exchange) -> None:
        """Save the chat and these turns, in another thread."""
        self.conversation.model = self.conversation.model or self.session.model
        self.session.saver.save(self.conversation, *exchanges)

    async def read_history(self, reads: Callable[[Any], Any]) -> Any:
        """Run `reads` on the database in its thread; on failure, show the error and return None."""
        try:
            return await asyncio.wrap_future(self.session.saver.run(reads))
        except LocalLLMError as error:
            self.flash(error.message)
            return None

    @property
    def runs(self) -> bool:
        return self.current is not None or self.side is not None

    @property
    def busy(self) -> bool:
        return self.runs or self.stuck is not None or bool(self.waiting)

    def may_change(self) -> bool:
        """Whether the branch can be changed now; shows the reason when it cannot."""
        if self.runs:
            self.flash(f"stop the answer first: {self.frame.keymap.label('chat.stop')}")
        elif self.busy:
            asks = self.query_one(Choices).display
            self.flash("first choose above the prompt: Tab" if asks else "the queued messages come first")
        return not self.busy

    @property
    def can_go_on(self) -> bool:
        """Whether the last answer was stopped or reached its limit, and nothing else is running."""
        last = self.conversation.exchanges[-1] if self.conversation.exchanges else None
        cut = last is not None and last.text != "" and last.stop in ("abort", "length")
        return cut and self.phase == "ready" and self.editing is None and not self.busy

    async def enqueue(self, exchange: Exchange) -> None:
        """Show a question, and send it when its turn comes."""
        self.show_home(False)
        self.waiting.append((exchange, await self.transcript.add_question(exchange)))
        self.keep(exchange)
        await self.next_turn()
        await self.transcript.trim()

    async def ask_again(self, exchange: Exchange) -> None:
        """Show the newly made branch of a question, and send it."""
        self.conversation.exchanges.remove(exchange)
        await self.transcript.sync()
        self.conversation.exchanges.append(exchange)
        await self.enqueue(exchange)

    async def next_turn(self) -> None:
        """Send the next message if the model is ready and free; mark the others as queued."""
        free = not self.runs and self.stuck is None
        tools = self.session.tools
        if self.phase == "ready" and free and self.waiting and (tools is None or tools.is_connected):
            exchange, widget = self.waiting.popleft()
            widget.queue("")
            for said in await asyncio.to_thread(self._fit, exchange) if exchange.attachments else ():
                await self.transcript.say(said, after=widget)
            await self._answer(exchange, widget)
        self.mark_queued()

    def mark_queued(self) -> None:
        """Say at the queued messages what they wait for."""
        waits_for = "sent when the model is free"
        if self.phase != "loading" and not self.runs and self.query_one(Choices).display:
            waits_for = "waits for your choice above the prompt"
        elif self.phase == "failed":
            waits_for = "sent when a model is loaded"
        for _, widget in self.waiting:
            widget.queue(waits_for)

    def _fit(self, exchange: Exchange) -> list[str]:
        backend = self.session.backend
        said = fit(self.conversation, exchange, backend.facts(), backend.count_tokens, self.session.offered)
        return said[::-1]  # each is inserted directly below the question

    async def _answer(self, exchange: Exchange, question: UserMessage) -> None:
        """Show an answer, and let the model write it or go on with it."""
        message, messages = await self.transcript.add_answer(exchange, question), self.conversation.messages(exchange)
        await message.restore_rounds()
        if exchange.text:
            message.answer.feed(clean(exchange.text))
            messages.append(Message(role="assistant", content=exchange.text))
        self.send(message, messages)

    def send(self, message: AssistantMessage, messages: list[Message]) -> None:
        message.exchange.model = self.session.model
        self._saved_at = self._sent_at = time.monotonic()
        self.state.used_tokens = self.conversation.used_tokens
        values = self.conversation.template_values
        turn = self.session.backend.send(messages, None, values, self.session.offered)
        self.current = turn, message
        self.state.text = "reading"

    async def go_on(self, exchange: Exchange) -> None:
        """Let the model continue an answer that was cut short."""
        widget = await self.transcript.drop_answer(exchange)
        if widget is None:
            return
        exchange.text, exchange.stop, exchange.failed = exchange.text.rstrip(), "", None
        await self._answer(exchange, widget)

    async def branch(self, exchange: Exchange) -> None:
        """Continue the conversation after this exchange."""
        self.conversation.cut_after(exchange)
        await self.transcript.sync()
        self.flash("the next message continues from here; later messages stay in another branch")

    def edit(self, exchange: Exchange, is_question: bool) -> None:
        if self.may_change():
            if self.editing is None:
                self.draft = self.prompt.text
            self.editing = exchange, is_question
            self.prompt.put(exchange.user if is_question else exchange.text)
            self.prompt.focus()
            self.refresh_lines()

    def leave_editing(self) -> None:
        """Restore the draft; ↑ brings back the edited text."""
        if self.editing is not None:
            self.editing = None
            self.prompt.put(self.draft)
            self.refresh_lines()

    def give_up(self) -> None:
        """Stop the running answer and drop the queue; a partial answer is kept."""
        if self.current is not None:
            self.session.backend.stop(self.current[0])
            exchange = self.current[1].exchange
            if self.calling is not None:
                self.calling.set()
                self.calling = None
                end_calls(exchange)
            exchange.stop = exchange.stop or "abort"
            self.keep(exchange)
            self.current = None
        if self.side is not None:
            self.session.backend.stop(self.side[0])
            self.side = None
        self.waiting.clear()
        self.stuck = None
        self.query_one(Choices).display = False

    async def clear(self) -> None:
        self.give_up()
        self.leave_editing()
        self.session.files.clear()
        self.conversation.clear()
        self.conversation.model = self.session.model
        if self.phase == "ready":
            self.state.text = "ready"
        await self.transcript.clear()
        self.prompt.focus()
