"""The chat screen's state, and the turns: what is asked waits here, is sent when the model is free, and is given up.

`ChatScreen` is a chain of classes, each knowing those before it: `turns`, `stream` (events of the backend),
`actions` (keys and lists), `screen` (layout and messages of the widgets).
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
from localllm.conversation.session import Session, complaint
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
    """What the parts of the chat screen share.

    phase    none (no model was chosen), loading, ready or failed
    current  (the backend's turn, its message) of the answer that comes
    calling  while tools are called for `current`: what ends that
    stuck    the question that waits for an answer to a question of ours
    side     a turn that is no part of the conversation, and what it has said
    editing  (what is being edited, whether it is the question)
    draft    what stood in the prompt before it was filled with the text to edit
    message  what is said in the status line for a moment
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
        # the timer that drains and the handlers of keys are different tasks: one at a time changes the conversation
        self.changing = asyncio.Lock()
        self.in_order = asyncio.Lock()  # what was typed is carried out one after the other, in the order of typing

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
        """One task at a time changes the conversation; afterwards the lines say how things stand."""
        async with self.changing:
            yield
        self.refresh_lines()

    def refresh_lines(self) -> None:
        """Title, status and keys, as things stand."""
        raise NotImplementedError

    def flash(self, text: str, seconds: float = 4.0) -> None:
        """Say something in the status line for a moment, what is longer in the transcript; "" ends it."""
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
        """The list of chats and models in place of the transcript."""
        self.query_one(Home).display = shown
        self.transcript.display = not shown

    async def choose_model(self, name: str, changes: Mapping[str, Any] | None = None) -> None:
        """Load the model a name stands for. Raises LocalLLMError for one that stands for none; what runs goes on."""
        find, now = self.session.backend.find, self.session.model
        found = await asyncio.to_thread(find, name)
        with suppress(LocalLLMError):  # a file's name alone is not found again
            now = await asyncio.to_thread(find, now)
        if found == now and not changes and self.phase in ("loading", "ready"):
            running = self.phase == "ready"
            if not running or await asyncio.to_thread(self.session.backend.is_there):
                self.flash(f"{clean_line(name)} is {'running' if running else 'being loaded'} already")
                return
        async with self.changing:
            await self.load(found, changes)

    async def load(self, name: str, changes: Mapping[str, Any] | None = None) -> None:
        """Load another model, or the same with other settings; the conversation stays."""
        self.give_up()
        self.show_home(False)
        self.session.model = self.conversation.model = name
        self.phase = "loading"
        self.state.facts = type(self.state.facts)()
        await self.transcript.begin_loading(name)
        await self._close_endpoint()
        self.session.backend.start(name, changes)

    async def pause(self) -> None:
        await self._close_endpoint()
        await asyncio.to_thread(self.session.backend.close)
        self.session.backend.events().clear()
        await self.transcript.end_loading()
        self.phase, self.state.text = "failed", "paused"
        name = clean_line(self.session.model)
        await self.transcript.say(f"the download of {name} is paused; /model {name} goes on with it")

    async def _close_endpoint(self) -> None:
        """The model is about to go: nobody may use it any more."""
        if self.session.endpoint is not None and self.session.url:
            await asyncio.to_thread(self.session.endpoint.stop)

    async def serve(self, port: int | None) -> None:
        """Answer other programs, or no longer, in a thread; an error is said."""
        try:
            said = await asyncio.to_thread(self.session.serve, port)
        except LocalLLMError as error:
            await self.complain(error)
        else:
            self.flash(said) if port == OFF else await self.transcript.say(said)

    def keep(self, *exchanges: Exchange) -> None:
        """Write the chat and these turns of it to the disk, in another thread."""
        self.conversation.model = self.conversation.model or self.session.model
        self.session.saver.save(self.conversation, *exchanges)

    async def read_history(self, reads: Callable[[Any], Any]) -> Any:
        """What `reads` makes of the database, in its thread; None when it cannot be used, and that is said."""
        try:
            return await asyncio.wrap_future(self.session.saver.run(reads))
        except LocalLLMError as error:
            self.flash(error.message)
            return None

    @property
    def busy(self) -> bool:
        return self.current is not None or self.side is not None or bool(self.waiting)

    def may_change(self) -> bool:
        """Whether the branch may be changed now; says why not."""
        if self.busy:
            self.flash(f"{self.frame.keymap.label('chat.stop')} stops the answer first")
        return not self.busy

    @property
    def can_go_on(self) -> bool:
        """Whether the last answer was stopped, or reached its limit, and nothing else is under way."""
        last = self.conversation.exchanges[-1] if self.conversation.exchanges else None
        cut = last is not None and last.text != "" and last.stop in ("abort", "length")
        return cut and self.phase == "ready" and self.editing is None and not self.busy

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
        tools = self.session.tools
        if self.phase == "ready" and free and self.waiting and (tools is None or tools.is_connected):
            exchange, widget = self.waiting.popleft()
            widget.remove_class("-queued")
            for said in await asyncio.to_thread(self._fit, exchange) if exchange.attachments else ():
                await self.transcript.say(said, after=widget)
            message = await self.transcript.add_answer(exchange, widget)
            self.send(message, self.conversation.messages(exchange))
        for _, widget in self.waiting:
            widget.add_class("-queued")

    def _fit(self, exchange: Exchange) -> list[str]:
        backend = self.session.backend
        said = fit(self.conversation, exchange, backend.facts(), backend.count_tokens, self.session.offered)
        return said[::-1]  # each is put right below the question

    def send(self, message: AssistantMessage, messages: list[Message]) -> None:
        message.exchange.model = self.session.model
        self._saved_at = self._sent_at = time.monotonic()
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
        message = await self.transcript.add_answer(exchange, widget)
        await message.restore_rounds()
        message.answer.feed(clean(exchange.text))
        answer: Message = {"role": "assistant", "content": exchange.text}
        self.send(message, [*self.conversation.messages(exchange), answer])

    async def branch(self, exchange: Exchange) -> None:
        """The next message follows this exchange."""
        self.conversation.cut_after(exchange)
        await self.transcript.sync()
        self.flash("the next message goes on from here; what came after is kept as another branch")

    def edit(self, exchange: Exchange, is_question: bool) -> None:
        if self.may_change():
            if self.editing is None:
                self.draft = self.prompt.text
            self.editing = exchange, is_question
            self.prompt.put(exchange.user if is_question else exchange.text)
            self.prompt.focus()
            self.refresh_lines()

    def leave_editing(self) -> None:
        """The draft returns; ↑ brings back what was edited."""
        if self.editing is not None:
            self.editing = None
            self.prompt.put(self.draft)
            self.refresh_lines()

    def give_up(self) -> None:
        """Stop what runs and forget what waits; what there is of an answer is kept as it is."""
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
