"""The tool calls of the current answer: each is shown, confirmed and run in a thread, one at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from localllm.conversation import tools as calls
from localllm.conversation.answer import Call
from localllm.conversation.tools import Toolbox
from localllm.terminal import clean_line, fit
from localllm.tui.widgets.choices import Choice, Choices
from localllm.tui.widgets.messages import AssistantMessage

from .turns import Turns


class ToolCalls:
    """Runs tool calls. `ends` shows and saves a finished answer."""

    def __init__(self, screen: Turns, ends: Callable[[AssistantMessage], Awaitable[None]]) -> None:
        self._screen = screen
        self._ends = ends

    async def begin(self, message: AssistantMessage, tools: Toolbox) -> None:
        """Start the calls of an answer; the model waits for their results."""
        screen = self._screen
        if said := calls.at_limit(message.exchange):
            await screen.transcript.say(f"! {said}", "warning")
            await self._ends(message)
            await screen.next_turn()
            return
        screen.calling = threading.Event()
        await message.show_calls()
        await self._next(message, tools)

    async def stop(self) -> None:
        """Esc: pending calls get no result, and the answer ends."""
        screen = self._screen
        async with screen.change():
            if screen.calling is None or screen.current is None:
                return
            message = screen.current[1]
            calls.stop(message.exchange)
            message.draw_calls()
            screen.query_one(Choices).display = False
            await self._ends(message)
            await screen.next_turn()

    async def _next(self, message: AssistantMessage, tools: Toolbox) -> None:
        """Confirm or run the next call; after the last one the model continues."""
        screen, exchange = self._screen, message.exchange
        for call in exchange.calls:
            if tools.must_ask(call):
                self._ask(message, tools, call)
            elif call.result is None:
                self._run(message, tools, call)
            else:
                continue
            message.draw_calls()
            return
        exchange.end_round()
        screen.keep(exchange)
        screen.calling = None
        await message.next_round()
        screen.send(message, screen.conversation.messages(exchange))

    def _ask(self, message: AssistantMessage, tools: Toolbox, call: Call) -> None:
        screen, name = self._screen, clean_line(call.name)
        answer = partial(self._answered, message, tools, call)
        choices = [
            Choice("y", "run it once", partial(answer, runs=True)),
            Choice("a", f"always run {name}, until this chat is closed", partial(answer, runs=True, ever=True)),
            Choice("n", "do not run it", partial(answer, runs=False)),
            Choice("v", f"never run {name}", partial(answer, runs=False, ever=True)),
        ]  # fmt: skip
        screen.state.text = f"asks to run {name}"
        message.footer(f"{screen.frame.keymap.label('chat.stop')} stop")
        screen.frame.attention.call(screen.conversation.shown_title, f"asks to run {name}")
        screen.query_one(Choices).offer(f"Run {fit(clean_line(calls.shown_call(call)), 60)}?", choices)

    async def _answered(
        self, message: AssistantMessage, tools: Toolbox, call: Call, *, runs: bool, ever: bool = False
    ) -> None:
        if self._screen.calling is None or call.result is not None:
            return  # stopped in the meantime
        if ever:
            tools.decide(call.name, runs)
        if runs:
            self._run(message, tools, call)
        else:
            calls.refuse(call)
            await self._next(message, tools)

    def _run(self, message: AssistantMessage, tools: Toolbox, call: Call) -> None:
        screen, cancel = self._screen, self._screen.calling
        assert cancel is not None
        room = calls.room_for(screen.state.facts, screen.state.used_tokens, len(message.exchange.calls))
        screen.state.text = f"running {clean_line(call.name)}"
        message.footer(f"running · {screen.frame.keymap.label('chat.stop')} stop")

        async def work() -> None:
            done = replace(call)
            await asyncio.to_thread(tools.run, done, room, cancel)
            async with screen.change():
                if screen.calling is cancel and not cancel.is_set():
                    call.result, call.failed = done.result, done.failed
                    await self._next(message, tools)

        screen.run_worker(work(), exit_on_error=False)
