"""Line mode of `chat`: no full screen, no cursor movement; for screen readers, dumb terminals and logs."""

from __future__ import annotations

import contextlib
import time
from contextlib import closing

from localllm.cli.frame.command import Env
from localllm.cli.frame.console import columns, wrapped_at
from localllm.cli.question import Job
from localllm.cli.start import Start, backend_of, farewell, session_of
from localllm.config import UserConfig
from localllm.conversation import clipboard, commands
from localllm.conversation.attachments import fit, mentioned, missing, refuse_pictures
from localllm.conversation.saver import AUTOSAVE_S
from localllm.conversation.session import Session, complaint
from localllm.conversation.slash import OFF, SLASHES, Typed, understand
from localllm.conversation.tree import Exchange
from localllm.errors import ConfigError, LocalLLMError, OutOfMemory
from localllm.interface import ChatEvent
from localllm.request import cannot_chat
from localllm.terminal import clean, clean_line, dumb

from .run_view import Text
from .session import BackendError, Sampling, follow, open_backend, stats_line, wait_ready
from .tools import answered


def talk(env: Env, config: UserConfig, start: Start) -> int:
    """Load the model, then answer until Ctrl+D. Ctrl+C stops an answer; twice at the prompt, it quits."""
    console, conversation = env.console, start.conversation
    if start.choice is None:
        raise ConfigError("line mode needs a model", "localllm chat MODEL --plain")
    progress = env.progress(start.choice.shown)
    here = open_backend(env, config, start.sampling)
    with closing(backend_of(env, config, start)) if start.attached else here as backend:
        backend.start(start.choice.name or None)
        facts, _ = wait_ready(backend, progress)
        if not facts.has_chat_template:
            raise cannot_chat(clean_line(facts.model), facts.embeds)
        conversation.model = start.choice.saved
        device = f" on {facts.device}" if facts.device else ""
        console.say(f"{start.choice.shown}{device}, ctx {facts.ctx:,}. /help for commands, Ctrl+D to quit.")
        for warning in facts.warnings:
            console.warn(warning)
        for line in start.tools.connect() if start.tools is not None else ():
            console.warn(line[2:]) if line.startswith("! ") else console.say(line)
        session = session_of(env, config, start, backend)
        session.model = start.choice.saved
        session.copy = lambda text: clipboard.copy(text, console.to_terminal)
        try:
            Lines(env, config, session).loop()
        finally:
            if session.endpoint is not None:
                session.endpoint.stop()
            if start.tools is not None:
                start.tools.close()
            start.saver.close()
    farewell(env, conversation, start.saver, start.choice.saved)
    return 0


class Lines:
    """The loop of questions and answers."""

    def __init__(self, env: Env, config: UserConfig, session: Session) -> None:
        self._env, self._config, self._session = env, config, session
        self._talk = session.conversation
        self._shown_problem = ""
        if session.serves != OFF:
            try:
                env.console.say(session.serve(session.serves))
            except LocalLLMError as error:
                env.console.warn(f"{error.message} ({error.hint})")
        if self._talk.exchanges:
            env.console.say(f"resumed “{clean_line(self._talk.shown_title)}”; the last question was:")
            env.console.say(f"> {clean(self._talk.exchanges[-1].user)}")

    def loop(self) -> None:
        """Run until the end of input or /quit."""
        line: str | None = self._session.first or ask(self._env)
        while line is not None:
            try:
                typed = understand(line)
                if typed.command == "quit":
                    break
                if typed.command:
                    self._command(typed)
                elif typed.text.strip():
                    files = (*self._session.files, *mentioned(typed.text))
                    refuse_pictures(files, self._session.backend.facts())
                    if notice := missing(typed.text):
                        self._env.console.warn(notice)
                    self._session.files.clear()
                    self._turn(self._talk.ask(typed.text, files))
            except BackendError:
                raise
            except LocalLLMError as error:
                self._env.console.paragraph(clean_line(complaint(error)))
            self._show_problem()
            line = ask(self._env)

    def _show_problem(self) -> None:
        said = self._session.saver.problem or self._session.saver.notice
        if said and said != self._shown_problem:
            self._env.console.warn(said)
        self._shown_problem = said

    def _command(self, typed: Typed) -> None:
        if typed.command == "help":
            self._help()
        elif typed.command == "regen":
            self._turn(self._talk.again(self._talk.numbered(typed.text)))
        elif typed.command == "continue":
            self._turn(self._talk.cut_short, goes_on=True)
        elif any(slash.plain and slash.name == typed.command for slash in SLASHES):
            self._env.console.say(clean(commands.run(self._session, typed)))
        else:
            raise ConfigError(
                f"/{typed.command} works in full-screen mode only", "start `localllm chat` without --plain"
            )
        if typed.command in commands.SETTINGS:
            self._session.saver.save(self._talk)

    def _help(self) -> None:
        known = [(f"/{slash.name} {slash.argument}", slash.meaning) for slash in SLASHES if slash.plain]
        width = max(len(name) for name, _ in known)
        for name, meaning in known:
            text = wrapped_at(width + 3, meaning, columns(self._env.console.err_tty))
            self._env.console.say(f"{name:{width}}   {text}")
        more = "//text sends a message that starts with /; end a line with a backslash to continue it"
        self._env.console.paragraph(more)

    def _turn(self, exchange: Exchange, goes_on: bool = False) -> None:
        """Answer one question; a failure is shown and the conversation continues."""
        console, backend = self._env.console, self._session.backend
        if not goes_on:
            self._save(exchange)
            for said in fit(self._talk, exchange, backend.facts(), backend.count_tokens, self._session.offered):
                console.say(clean(said))
        view = Text(console, Job([], Sampling(), stream=True, show_thinking=console.out_tty, markdown=False))
        exchange.text = exchange.text.rstrip()

        def turn() -> None:
            """Generate the answer, or the rest of it."""
            view.close([])
            messages = self._talk.messages(exchange)
            if exchange.text:
                messages.append({"role": "assistant", "content": exchange.text})
            turn = backend.send(messages, None, self._talk.template_values, self._session.offered)
            self._follow(turn, view, exchange)
            view.close([])

        try:
            answered(console, self._session.tools, exchange, turn, backend.facts)
        except BackendError as error:
            view.close([])
            console.fail(error)
            if not goes_on:
                self._talk.remove(exchange)
                self._save(exchange)
            if isinstance(error, OutOfMemory) or error.exit_code == 6:
                raise
            return
        except BaseException:  # SIGTERM, SIGHUP, a second Ctrl+C: keep the partial answer
            exchange.stop = exchange.stop or "partial"
            self._save(exchange)
            raise
        view.close([exchange])
        if exchange.stop == "abort":
            console.say("stopped by you")
        self._save(exchange)
        if self._config.ui.stats == "footer":
            console.say(console.style(f"[{stats_line(exchange, backend.facts())}]", "dim", err=True))

    def _follow(self, turn: int, view: Text, exchange: Exchange) -> None:
        """Show a turn; Ctrl+C ends it and keeps what has been generated."""
        backend, answers = self._session.backend, {turn: exchange}
        saved_at = time.monotonic()

        def show(event: ChatEvent) -> None:
            nonlocal saved_at
            view.event(event)
            if (now := time.monotonic()) - saved_at >= AUTOSAVE_S:
                saved_at = now
                self._session.saver.save(self._talk, exchange)

        try:
            follow(backend, [turn], show, answers)
        except KeyboardInterrupt:
            follow(backend, [turn], show, answers)  # the turn was told to stop and ends soon

    def _save(self, exchange: Exchange) -> None:
        future = self._session.saver.save(self._talk, exchange)
        if future is not None:
            future.exception()  # waits; `_show_problem` reports an error


def ask(env: Env) -> str | None:
    """Read the next line; None at the end of input. A backslash at its end continues on the next line."""
    with contextlib.suppress(ImportError):
        import readline  # editing and history in input()

        if not dumb():  # Python turns it off, and then every pasted line would be sent by itself
            readline.parse_and_bind("set enable-bracketed-paste on")
    parts: list[str] = []
    interrupted = False
    while True:
        try:
            line = input("... " if parts else "> ")
        except EOFError:
            env.console.say("")
            return None
        except KeyboardInterrupt:
            if interrupted:
                return None
            interrupted = True
            parts.clear()
            env.console.say("\nCtrl+C again, or Ctrl+D, to quit")
            continue
        interrupted = False
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        return "\n".join([*parts, line])
