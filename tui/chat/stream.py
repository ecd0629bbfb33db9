"""Backend events, drained by a timer: loading phases, pieces of an answer, its end; and drawing them."""

from __future__ import annotations

import time
from collections import deque

from localllm.conversation import load_times
from localllm.conversation.saver import AUTOSAVE_S
from localllm.conversation.session import Session
from localllm.conversation.slash import OFF
from localllm.interface import ChatEvent, Delta, Done, Facts, Failed, Prefill
from localllm.request import LoadProgress, cannot_chat
from localllm.terminal import clean_line, rate, tokens_short
from localllm.tui.widgets.engine import EnginePanel, sparkline
from localllm.tui.widgets.messages import AssistantMessage
from localllm.tui.widgets.status import bar

from .calls import ToolCalls
from .questions import Questions
from .turns import Turns

# share of one core for this thread while an answer streams; drawing waits until it is below this
DRAW_SHARE = 0.035
SAMPLE_S = 1.0
SAMPLES = 10  # speeds shown as bars during an answer
LOOK_S = 1.0  # between checks of an idle engine
MAX_DRAW_S = 0.9  # longest wait before drawing


class Stream(Turns):
    """Takes events in batches, then draws once."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.questions = Questions(self)
        self.calls = ToolCalls(self, self.end_answer)
        self._rates: deque[tuple[float, int]] = deque()
        self._history: deque[int] = deque(maxlen=SAMPLES)
        self._sampled_at = self._looked = self.ended_at = 0.0
        self._reading: tuple[float, int] | None = None  # (start of reading the prompt, cached tokens)
        self._drawn = (0.0, 0.0)

    async def drain(self) -> None:
        """Handle all events since the last call, then redraw once."""
        events = self.session.backend.events()
        busy = bool(events) or self.current is not None or self.phase == "loading"
        if not busy and not self._idle_news():
            return
        async with self.changing:
            while events:
                await self._take(events.popleft())
            if self.current is not None and self.calling is None:
                if not self._may_draw():
                    return
                message = self.current[1]
                await message.draw()
                self._live_footer(message)
                if (now := time.monotonic()) - self._saved_at >= AUTOSAVE_S:
                    self._saved_at = now
                    self.keep(message.exchange)
            elif self.phase == "loading" and (card := self.transcript.card):
                card.tick()
        self.refresh_lines()

    def _idle_news(self) -> bool:
        """Whether kernel timing on the GPU started or stopped in an idle moment; checked once a second."""
        facts, now = self.state.facts, time.monotonic()
        if facts.device in ("", "cpu") or now - self._looked < LOOK_S:
            return False
        self._looked = now
        self.state.facts = self.session.backend.facts()
        return self.state.facts.times_kernels != facts.times_kernels

    def _may_draw(self) -> bool:
        """Limit this thread's share of the CPU during an answer: the model may need the same cores."""
        now, cpu = time.monotonic(), time.thread_time()
        waited, spent = now - self._drawn[0], cpu - self._drawn[1]
        if waited < MAX_DRAW_S and spent > DRAW_SHARE * waited:
            return False
        self._drawn = now, cpu
        return True

    async def _take(self, event: ChatEvent) -> None:
        if isinstance(event, LoadProgress):
            await self._phase(event)
        elif isinstance(event, Failed) and event.turn < 0:
            await self._loading_failed(event)
        elif self.side is not None and event.turn == self.side[0]:
            await self._take_side(event, self.side[1])
        elif self.current is None or event.turn != self.current[0]:
            return  # from an abandoned turn
        elif isinstance(event, Prefill):
            self._prefill(self.current[1], event)
        elif isinstance(event, Delta):
            self._rates.append((time.monotonic(), event.num_tokens))
            self.state.used_tokens += event.num_tokens
            self.current[1].feed(event)
        elif isinstance(event, Done | Failed):
            await self._ended(self.current[1], event)

    async def _take_side(self, event: ChatEvent, said: list[str]) -> None:
        if isinstance(event, Delta) and event.kind == "content":
            said.append(event.text)
        elif isinstance(event, Done | Failed):
            self.side = None
            await self.questions.summarised("".join(said), event)

    async def _phase(self, phase: LoadProgress) -> None:
        transcript, card = self.transcript, self.transcript.card
        if phase.name != "ready":
            if phase.name == "resolve" and " " in phase.detail:  # a sentence of the hub's, not a model name
                await transcript.say(phase.detail)
            elif card:
                card.update(phase)
            return
        self.state.facts = facts = self.session.backend.facts()
        if not facts.has_chat_template:
            await self._loading_failed(Failed.of(-1, cannot_chat(clean_line(facts.model), facts.embeds)))
            return
        self.phase = "ready"
        speed = f" · est. {rate(facts.decode_tps)} tok/s" if facts.decode_tps else ""
        self.state.text = f"ready{speed}"
        await transcript.say(facts.run_summary, after=card)
        for warning in facts.warnings:
            await transcript.say(f"! {warning}", "warning", after=card)
        if card:
            if card.elapsed_s is not None and not facts.url:
                load_times.add(self.session.model, card.elapsed_s)
            await transcript.end_loading()
        if self.session.endpoint is not None and self.session.serves != OFF:
            await self.serve(self.session.serves)
        await self.next_turn()

    async def _loading_failed(self, failed: Failed) -> None:
        self.phase = "failed"
        self.state.facts, self.state.text = Facts(), "no model is loaded"
        await self.transcript.end_loading()
        await self.transcript.fail(failed)
        self.questions.not_loaded(failed)

    def _prefill(self, message: AssistantMessage, event: Prefill) -> None:
        self.state.used_tokens = event.total or self.state.used_tokens  # some servers do not tell
        share = event.done / event.total if event.total else 0.0
        now = time.monotonic()
        if event.done == 0 or self._reading is None or event.done < self._reading[1]:
            self._reading = now, event.done  # cached tokens do not count towards the speed
        rate = (event.done - self._reading[1]) / (now - self._reading[0]) if now > self._reading[0] else 0.0
        speed = f" · {tokens_short(round(rate))} tok/s" if rate else ""
        message.footer(f"reading {event.total:,} tokens {bar(share, 6)} {share * 100:.0f} %{speed}")
        self.state.text = f"reading {share * 100:.0f} %"

    def _live_footer(self, message: AssistantMessage) -> None:
        now = time.monotonic()
        while self._rates and now - self._rates[0][0] > 1.0:
            self._rates.popleft()
        exchange = message.exchange
        if not (exchange.text or exchange.reasoning):
            return
        rate = sum(count for _, count in self._rates)
        if now - self._sampled_at >= SAMPLE_S:
            self._sampled_at = now
            self._history.append(rate)
        most = max([*self._history, 1])
        bars = f" {sparkline(self._history, SAMPLES, most)}" if self.frame.moving and len(self._history) > 1 else ""
        message.footer(f"{rate} tok/s{bars} · {self.frame.keymap.label('chat.stop')} stop")
        since = int(now - self._sent_at)
        what = "thinking" if not exchange.text else "generating"
        self.state.text = f"{what} {since // 60}:{since % 60:02d}"

    async def _ended(self, message: AssistantMessage, event: Done | Failed) -> None:
        exchange, tools = message.exchange, self.session.tools
        if isinstance(event, Failed) and tools and (said := tools.leave_out(event.param, event.message)):
            await self.transcript.say(f"! {said}", "warning")
            self.send(message, self.conversation.messages(exchange))
            return
        exchange.add(event)
        if isinstance(event, Done):
            full = self.state.facts.ctx and self.conversation.used_tokens >= self.state.facts.ctx
            exchange.stop = "full" if full and exchange.stop == "length" else exchange.stop
            self.query_one(EnginePanel).add(event.timing)
            if exchange.wants_results and tools is not None:
                self._rates.clear()
                await self.calls.begin(message, tools)
                return
        await self.end_answer(message)
        if not isinstance(event, Failed) or not self.questions.about(exchange, event):
            await self.next_turn()

    async def end_answer(self, message: AssistantMessage) -> None:
        """Show and save a finished answer."""
        exchange, state = message.exchange, self.state
        self.current = self._reading = self.calling = None
        self.ended_at = time.monotonic() if exchange.stop not in ("abort", "error") else 0.0
        self._rates.clear()
        self._history.clear()
        state.facts, state.text = self.session.backend.facts(), "ready"
        self.keep(exchange)  # drawing takes a while, in which the program may be closed
        await message.finish()
        self.keep(exchange)
        if exchange.stop != "abort":
            what = "the answer failed" if exchange.failed else "the answer is ready"
            self.frame.attention.call(self.conversation.shown_title, what)
        if self.can_go_on:
            state.text = "stopped" if exchange.stop == "abort" else "length limit"
            if self.frame.options.ui.enter == "send":
                state.text += f" · {self.frame.keymap.label('prompt.send')} continues"
