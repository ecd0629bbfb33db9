"""What is asked above the prompt, and what each answer does: a full context, memory that ran out, a dead engine."""

from __future__ import annotations

from localllm._version import __version__
from localllm.conversation.tree import Exchange
from localllm.interface import ChatEvent, Done, Failed
from localllm.terminal import clean_line, fit, tokens_short
from localllm.tui.screens.dialogs import REPORT, CrashScreen
from localllm.tui.widgets.choices import Choice, Choices

from .turns import Turns

FULL, MEMORY, CRASH, LOADING, FETCHING = "full", "memory", "crash", "loading", "fetching"
SUMMARISE = (
    "Summarise the conversation so far in a few sentences: what was asked, what was decided, what is still open."
)


class Questions:
    """Makes the choices and carries them out."""

    def __init__(self, screen: Turns) -> None:
        self._screen = screen
        self._failed: Failed | None = None

    def _offer(self, topic: str, title: str, choices: list[Choice]) -> None:
        banner = self._screen.query_one(Choices)
        typing = bool(self._screen.prompt.text)
        banner.offer(topic, title + (" · Tab to choose" if typing else ""), choices)
        if typing:
            self._screen.prompt.focus()

    def about(self, exchange: Exchange, failed: Failed) -> bool:
        """Ask what to do about a turn that failed. False when there is nothing to choose."""
        facts = self._screen.session.backend.facts()
        self._failed = failed
        if failed.code.startswith("E9"):
            self._screen.stuck = exchange
            self._offer(FULL, "The context window is full; nothing was sent", self._full(exchange))
        elif failed.code == "E502":
            choices = []
            if facts.kv not in ("int8", "fp8") and facts.device:
                kind = "fp8" if facts.device.startswith("cuda") else "int8"
                choices.append(Choice("k", f"kv:{kind}", f"reload with the KV cache as {kind}: half the memory"))
            if facts.ctx > 1024:
                half = tokens_short(facts.ctx // 2)
                choices.append(Choice("c", f"ctx:{facts.ctx // 2}", f"reload with a context of {half}"))
            choices += [Choice("m", "models", "choose a smaller model"), Choice("q", "nothing", "leave it as it is")]
            self._offer(MEMORY, "Memory ran out; the chat is saved", choices)
        elif failed.code.startswith("E6"):
            self._screen.phase, self._screen.state.text = "failed", "the engine stopped"
            self._stopped(failed)
        else:
            return False
        return True

    def _stopped(self, failed: Failed) -> None:
        frame, log = self._screen.frame, self._screen.frame.options.log_file
        choices = [
            Choice("r", "reload", "load the model again"),
            Choice("x", "restart", "start localllm again with this chat"),
            Choice("p", REPORT, "copy a report"),
            _LEAVE,
        ]
        screen = CrashScreen(failed.message, str(log or ""), choices, lambda: frame.copy(self._report(failed)))
        frame.push_screen(screen, self._after_crash)

    def _report(self, failed: Failed) -> str:
        """What to paste into a bug report: no text of the conversation."""
        return (
            f"localllm {__version__}\n{failed.message} [{failed.code}]\n{failed.why}\n"
            f"{self._screen.session.backend.facts().run_summary}\nlog: {self._screen.frame.options.log_file}\n"
            "localllm doctor --report tells about the machine\n"
        )

    async def _after_crash(self, name: str | None) -> None:
        async with self._screen.change():
            await self.answer(CRASH, name or _LEAVE.name)

    def not_loaded(self, failed: Failed) -> None:
        """Ask what to do about a model that could not be loaded."""
        self._failed = failed
        choices = [Choice("r", "reload", "try again"), Choice("m", "models", "choose another model")]
        if failed.code.startswith("E4"):
            commands = [command for command, _ in failed.fixes]
            choices.insert(1, Choice("y", "fix", f"copy the command: {commands[0]}")) if commands else None
        self._offer(LOADING, "No model is loaded", [*choices, _LEAVE])

    def fetching(self) -> None:
        """Ask about a download that goes on."""
        pause = Choice("p", "pause", "pause it; the same model goes on where it was")
        self._offer(FETCHING, "The model is being downloaded", [pause, Choice("k", "nothing", "keep downloading")])

    def _full(self, exchange: Exchange) -> list[Choice]:
        talk, facts = self._screen.conversation, self._screen.session.backend.facts()
        oldest = talk.oldest_half(exchange)
        choices = []
        if oldest:
            first = fit(clean_line(oldest[0].user), 40)
            count = f"the oldest {len(oldest)} questions" if len(oldest) > 1 else "the oldest question"
            choices.append(Choice("t", "forget", f"leave out {count} (from “{first}”) and send again"))
            choices.append(Choice("s", "summarise", f"let the model summarise {count}, then send"))
        if facts.max_ctx > facts.ctx:
            wanted = min(facts.max_ctx, max(facts.ctx * 2, facts.ctx + 1024))
            choices.append(Choice("c", f"ctx:{wanted}", f"reload with a context of {tokens_short(wanted)} (fits)"))
        if len(talk.exchanges) > 1:
            choices.append(Choice("n", "new", "start a new chat with this message"))
        return [*choices, Choice("e", "edit", "edit the message")]

    # --- answers -----------------------------------------------------------------------------------------------------

    async def answer(self, topic: str, name: str) -> None:
        screen = self._screen
        screen.prompt.focus()
        if topic == FULL:
            await self._make_room(name)
        elif name == "reload":
            await screen.load(screen.session.model)
        elif name == "pause":
            await screen.pause()
        elif name == "models":
            await screen.run_action("models")
        elif name == "restart":
            screen.frame.restart()
        elif name == "fix" and self._failed is not None:
            screen.flash(screen.session.copy(self._failed.fixes[0][0]))
            self.not_loaded(self._failed)
        elif name.partition(":")[0] in ("ctx", "kv"):
            await self._reload(name)
        if topic == MEMORY and name == "nothing":
            await screen.next_turn()

    async def _reload(self, name: str) -> None:
        what, _, value = name.partition(":")
        screen, waiting = self._screen, list(self._screen.waiting)
        await screen.load(screen.session.model, {what: int(value) if what == "ctx" else value})
        screen.waiting.extend(waiting)

    async def _make_room(self, choice: str) -> None:
        screen, talk = self._screen, self._screen.conversation
        exchange, screen.stuck = screen.stuck, None
        if exchange is None:
            return
        if choice == "summarise":
            oldest = talk.oldest_half(exchange)
            screen.stuck = exchange
            messages = [*talk.messages(oldest[-1]), {"role": "assistant", "content": oldest[-1].text}]
            turn = screen.session.backend.send([*messages, {"role": "user", "content": SUMMARISE}])  # type: ignore[list-item]
            screen.side = turn, []
            screen.state.text = "summarising"
            return
        if choice == "forget":
            for old in talk.oldest_half(exchange):
                old.forgotten = True
                screen.keep(old)
        files, text = exchange.attachments, exchange.user
        talk.remove(exchange)
        await screen.transcript.take_back(exchange)
        if choice == "edit":
            screen.prompt.put(text)
            screen.session.files[:] = files
            await screen.next_turn()
            return
        if choice == "new":
            await screen.clear()
        if choice.startswith("ctx:"):
            await self._reload(choice)
        await screen.enqueue(talk.ask(text, files))

    async def summarised(self, text: str, event: ChatEvent) -> None:
        """The model has summarised the oldest turns, or could not."""
        screen, talk = self._screen, self._screen.conversation
        exchange = screen.stuck
        if exchange is None:
            return
        if isinstance(event, Done) and event.stop != "abort" and text.strip():
            oldest = talk.oldest_half(exchange)
            for old in oldest:
                old.forgotten = True
            talk.summary_text = "\n".join(part for part in (talk.summary_text, text.strip()) if part)
            screen.keep(*oldest)
            await screen.transcript.say(f"{len(oldest)} questions are now summarised for the model: {text.strip()}")
            screen.stuck = None
            talk.remove(exchange)
            await screen.transcript.take_back(exchange)
            await screen.enqueue(talk.ask(exchange.user, exchange.attachments))
            return
        await screen.transcript.say("! the summary could not be made", "warning")
        self._offer(FULL, "The context window is full; nothing was sent", self._full(exchange))


_LEAVE = Choice("q", "nothing", "leave it; the chat can be read and copied")
