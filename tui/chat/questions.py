"""Questions above the prompt, and the effect of each answer: full context, out of memory, dead engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from localllm._version import __version__
from localllm.conversation.tree import Exchange
from localllm.interface import ChatEvent, Done, Failed
from localllm.request import Message
from localllm.terminal import clean_line, counted, fit, tokens_short
from localllm.tui.widgets.choices import Choice, Choices

from .turns import Turns

ANSWER_ROOM = 1024  # tokens left for the answer in a larger window
SUMMARISE = (
    "Summarize the conversation so far in a few sentences: what was asked, what was decided, what is still open."
)


class Questions:
    """Offers the choices and carries them out."""

    def __init__(self, screen: Turns) -> None:
        self._screen = screen
        self._leave = Choice("q", "do nothing; the chat stays readable", self._nothing)

    def _offer(self, title: str, choices: list[Choice]) -> None:
        self._screen.query_one(Choices).offer(title, choices)

    async def answer(self, choice: Choice) -> None:
        self._screen.prompt.focus()
        await choice.take()

    async def _nothing(self) -> None:
        pass

    async def _models(self) -> None:
        await self._screen.run_action("models")

    async def _reload(self, **changes: Any) -> None:
        await self._screen.load(self._screen.session.model, changes)

    def not_loaded(self, failed: Failed) -> None:
        """Ask what to do about a model that failed to load."""
        choices = [Choice("r", "try again", self._load), Choice("m", "choose another model", self._models), self._leave]
        if failed.code.startswith("E4") and failed.fixes:
            command = failed.fixes[0][0]
            choices.insert(1, Choice("y", f"copy the command: {command}", partial(self._copy_fix, failed)))
        self._offer("No model is loaded", choices)

    async def _load(self) -> None:
        await self._screen.load(self._screen.session.model)

    async def _copy_fix(self, failed: Failed) -> None:
        self._screen.flash(self._screen.session.copy(failed.fixes[0][0]))
        self.not_loaded(failed)

    def fetching(self) -> None:
        """Ask about a running download."""
        pause = Choice("p", "pause it; loading the model again resumes it", self._screen.pause)
        self._offer("The model is downloading", [pause, Choice("k", "keep downloading", self._nothing)])
        self._screen.query_one(Choices).focus()  # opened by a key

    def about(self, exchange: Exchange, failed: Failed) -> bool:
        """Ask what to do about a failed turn. False when there is no choice."""
        screen = self._screen
        if failed.code.startswith("E9"):
            screen.stuck = exchange
            self._full(exchange, int(failed.context.get("prompt_tokens") or 0))
        elif failed.code == "E502":
            self._out_of_memory()
        elif failed.code.startswith("E6"):
            screen.phase, screen.state.text = "failed", "the engine stopped"
            self._stopped(failed)
        elif failed.code == "E802":
            screen.phase, screen.state.text = "failed", "the server is gone"
            self._gone()
        else:
            return False
        return True

    def _out_of_memory(self) -> None:
        facts, choices = self._screen.session.backend.facts(), []
        if facts.kv not in ("int8", "fp8") and facts.device:
            kind = "fp8" if facts.device.startswith("cuda") else "int8"
            what = f"reload with an {kind} KV cache: half the memory"
            choices.append(Choice("k", what, partial(self._reload, kv=kind)))
        if facts.ctx > 1024:
            half = facts.ctx // 2
            what = f"reload with a context of {tokens_short(half)}"
            choices.append(Choice("c", what, partial(self._reload, ctx=half)))
        choices.append(Choice("m", "choose a smaller model", self._models))
        choices.append(Choice("q", "do nothing", self._screen.next_turn))
        self._offer("Out of memory; the chat is saved", choices)

    def _gone(self) -> None:
        again = Choice("r", "load the model again", self._load)
        choices = [again, Choice("m", "choose another model", self._models), self._leave]
        self._offer("The server is gone; what was written so far is kept", choices)

    def _stopped(self, failed: Failed) -> None:
        screen, frame = self._screen, self._screen.frame
        log = frame.options.log_file
        report = (  # for a bug report: contains no text of the conversation
            f"localllm {__version__}\n{failed.message} [{failed.code}]\n{failed.why}\n"
            f"{screen.session.backend.facts().run_summary}\nlog: {log}\n"
            "`localllm doctor --report` describes the machine\n"
        )

        async def copy_report() -> None:
            screen.flash(f"report: {frame.copy(report)}")
            self._stopped(failed)

        choices = [
            Choice("r", "load the model again", self._load),
            Choice("x", "restart the program with this chat", self._restart),
            Choice("p", f"copy a report{f'; the log is {log}' if log else ''}", copy_report),
            self._leave,
        ]
        self._offer("The engine stopped; what was written so far is kept", choices)

    async def _restart(self) -> None:
        self._screen.frame.wants_restart = True  # a device error can persist until the process ends
        self._screen.app.exit()

    def _full(self, exchange: Exchange, needed: int) -> None:
        """`needed`: tokens of the message and everything before it; 0 when unknown."""
        talk, facts = self._screen.conversation, self._screen.session.backend.facts()
        resend = partial(self._resend, exchange)
        oldest = talk.oldest_half(exchange)
        choices = []
        fits_alone = needed - talk.used_tokens < facts.ctx  # else dropping turns cannot make room for it
        if oldest and fits_alone:
            first = fit(clean_line(oldest[0].user), 40)
            count = f"the oldest {len(oldest)} questions" if len(oldest) > 1 else "the oldest question"
            forget = f"drop {count} (from “{first}”) and send again"
            choices.append(Choice("t", forget, partial(resend, forget=oldest)))
            summarise = partial(self._summarise, exchange, oldest)
            choices.append(Choice("s", f"summarize {count} and send again", summarise))
        wanted = min(facts.max_ctx, max(facts.ctx * 2, -(-(needed + ANSWER_ROOM) // 1024) * 1024))
        if wanted > max(facts.ctx, needed):
            what = f"reload with a context of {tokens_short(wanted)} (fits)"
            choices.append(Choice("c", what, partial(resend, ctx=wanted)))
        if exchange.parent is not None and fits_alone:
            choices.append(Choice("n", "start a new chat with this message", partial(resend, new=True)))
        choices.append(Choice("e", "edit the message", partial(self._edit, exchange)))
        self._offer("The context window is full; nothing was sent", choices)

    async def _resend(
        self, exchange: Exchange, *, forget: Sequence[Exchange] = (), new: bool = False, ctx: int = 0
    ) -> None:
        """Resend the message that did not fit: without some turns, in a new chat, or in a larger context."""
        screen = self._screen
        if screen.stuck is not exchange:
            return  # another chat was opened in the meantime
        screen.stuck = None
        for old in forget:
            old.forgotten = True
        screen.keep(*forget)
        if new:
            await self._move(exchange)
            return
        exchange.failed, exchange.stop, exchange.sent = None, "", None
        await screen.transcript.drop_answer(exchange)
        screen.waiting.extendleft(zip([exchange], await screen.transcript.questions([exchange]), strict=True))
        if ctx:
            await self._reload(ctx=ctx)
        await screen.next_turn()

    async def _move(self, exchange: Exchange) -> None:
        """Move the message, and those queued after it, to a new chat."""
        screen = self._screen
        moved = [exchange, *(one for one, _ in screen.waiting)]
        screen.conversation.remove(exchange)
        screen.keep()
        await screen.clear()
        for one in moved:
            await screen.enqueue(screen.conversation.ask(one.user, one.attachments))

    async def _edit(self, exchange: Exchange) -> None:
        """Put the message back into the prompt. Those queued after it stay and are sent."""
        screen = self._screen
        if screen.stuck is not exchange:
            return
        screen.stuck = None
        later = screen.conversation.take_out(exchange)
        screen.keep(*later)
        await screen.transcript.sync()
        screen.waiting = deque(zip(later, await screen.transcript.questions(later), strict=True))
        screen.prompt.put(exchange.user)
        screen.session.files[:] = exchange.attachments
        await screen.next_turn()

    async def _summarise(self, exchange: Exchange, oldest: Sequence[Exchange]) -> None:
        screen, last = self._screen, oldest[-1]
        messages = [*screen.conversation.messages(last), Message(role="assistant", content=last.text)]
        turn = screen.session.backend.send([*messages, Message(role="user", content=SUMMARISE)])
        screen.side = turn, []
        screen.state.text = "summarizing"

    async def summarised(self, text: str, event: ChatEvent) -> None:
        """Handle the end of a summary of the oldest turns."""
        screen, talk, exchange = self._screen, self._screen.conversation, self._screen.stuck
        if exchange is None:
            return
        if isinstance(event, Done) and event.stop != "abort" and text.strip():
            oldest = talk.oldest_half(exchange)
            talk.summary_text = "\n".join(part for part in (talk.summary_text, text.strip()) if part)
            count = counted(len(oldest), "question")
            await screen.transcript.say(f"{count} summarized for the model: {text.strip()}")
            await self._resend(exchange, forget=oldest)
        else:
            await screen.transcript.say("! the model could not write a summary", "warning")
            self._full(exchange, 0)
