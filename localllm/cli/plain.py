"""Line mode of `chat`: no full screen, no cursor movement; for screen readers, dumb terminals and logs."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from localllm.cli.frame.command import Env
from localllm.cli.question import Job
from localllm.cli.start import Start, backend_of, farewell
from localllm.config import UserConfig
from localllm.conversation.attachments import read_attachments
from localllm.conversation.clipboard import copy
from localllm.conversation.serving import OFF, says, wished_port
from localllm.conversation.slash import SLASHES, Typed, understand
from localllm.conversation.storage import saved_chat, saved_messages
from localllm.conversation.tree import Conversation, Exchange
from localllm.errors import ConfigError, LocalLLMError, OutOfMemory
from localllm.interface import ChatBackend
from localllm.terminal import clean, clean_line

from .endpoint import ChatEndpoint
from .run_view import Text
from .session import Answered, BackendError, Sampling, follow, open_backend, stats_line, wait_ready


def talk(env: Env, config: UserConfig, start: Start) -> int:
    """Load, then questions and answers until Ctrl-D. Ctrl-C stops an answer; at the prompt, twice, it leaves."""
    console, conversation = env.console, start.conversation
    if start.choice is None:
        raise ConfigError("the line mode needs a model", "localllm chat MODEL --plain")
    progress = env.progress(start.choice.shown)
    here = open_backend(env, config, start.sampling, ctx=start.ctx)
    with closing(backend_of(env, config, start)) if start.attach_to else here as backend:
        backend.start(start.choice.name or None)
        facts, _ = wait_ready(backend, progress)
        if not facts.has_chat_template:
            name = clean_line(facts.model)
            raise ConfigError(
                f"{name} is a base model: it has no chat template", f'localllm run {name} "Once upon a time"'
            )
        conversation.model = start.choice.name
        device = f" on {facts.device}" if facts.device else ""
        console.say(f"{start.choice.shown}{device}, ctx {facts.ctx:,}. /help for commands, Ctrl-D to quit.")
        for warning in facts.warnings:
            console.warn(warning)
        lines = Lines(env, config, start, backend)
        try:
            lines.loop()
        finally:
            lines.endpoint.stop()
            start.saver.close()
    farewell(env, conversation, start.saver, start.choice.name)
    return 0


class Lines:
    """The loop of questions and answers."""

    def __init__(self, env: Env, config: UserConfig, start: Start, backend: ChatBackend) -> None:
        self._env, self._config, self._backend = env, config, backend
        self._talk, self._saver, self._first = start.conversation, start.saver, start.first
        self._files = list(start.files)
        self._told = ""
        self.endpoint = ChatEndpoint(env, config, backend, start.record)
        if start.serve != OFF:
            try:
                self._serve(start.serve)
            except LocalLLMError as error:
                env.console.warn(f"{error.message} ({error.hint})")
        if self._talk.exchanges:
            last = self._talk.exchanges[-1]
            env.console.say(f"resumed “{clean_line(self._talk.shown_title)}”; the last question was:")
            env.console.say(f"> {clean(last.user)}")

    def loop(self) -> None:
        """Until the end of input or /quit."""
        line: str | None = self._first or ask(self._env)
        while line is not None:
            typed = _understood(self._env, line)
            if typed is not None and typed.command == "quit":
                break
            if typed is not None and typed.command:
                self._command(typed)
            elif typed is not None and typed.text.strip():
                files, self._files = tuple(self._files), []
                self._turn(self._talk.ask(typed.text, files))
            self._tell_problem()
            line = ask(self._env)

    def _tell_problem(self) -> None:
        said = self._saver.problem or self._saver.notice
        if said and said != self._told:
            self._env.console.warn(said)
        self._told = said

    def _turn(self, exchange: Exchange) -> None:
        self._save(exchange)
        answered = _turn(self._env, self._backend, self._talk, exchange)
        self._save(exchange)
        if answered is not None and self._config.ui.stats == "footer":
            text = f"[{stats_line(answered, self._backend.facts())}]"
            self._env.console.say(self._env.console.style(text, "dim", err=True))

    def _save(self, exchange: Exchange) -> None:
        future = self._saver.save(self._talk, exchange)
        if future is not None:
            future.exception()  # waits; what is wrong is said by `_tell_problem`

    def _command(self, typed: Typed) -> None:
        say, talk = self._env.console.say, self._talk
        try:
            if typed.command == "attach":
                self._files += read_attachments(typed.text)
                say(f"{len(self._files)} files go with the next message")
            elif typed.command == "regen":
                self._turn(talk.again(self._last()))
            elif typed.command == "continue":
                self._continue(self._last())
            elif typed.command == "undo":
                last = self._last()
                talk.cut_after(last.parent) if last.parent is not None else talk.exchanges.clear()
                say("taken back; it stays as a branch")
            elif typed.command == "preset":
                self._preset(typed.text)
            elif typed.command == "serve":
                self._serve(wished_port(typed.text))
            else:
                _command(self._env, typed, talk, self._backend)
            self._save_settings(typed.command)
        except LocalLLMError as error:
            say(f"! {clean(error.message)}" + (f" ({clean(error.hint)})" if error.hint else ""))

    def _serve(self, port: int | None) -> None:
        """Open or close the endpoint. Raises LocalLLMError."""
        if port == OFF:
            self.endpoint.stop()
            self._env.console.say("closed: no other program uses this model now")
            return
        if port is not None or not self.endpoint.url:
            self.endpoint.start(self._talk.model, port)
        self._env.console.say(says(self.endpoint.url))

    def _last(self) -> Exchange:
        if not self._talk.exchanges:
            raise ConfigError("there is nothing in this chat yet", "")
        return self._talk.exchanges[-1]

    def _continue(self, exchange: Exchange) -> None:
        if not exchange.text or exchange.stop not in ("length", "abort", "partial"):
            raise ConfigError("the last answer was not cut short", "/regen answers again")
        answered = _turn(self._env, self._backend, self._talk, exchange, goes_on=True)
        if answered is not None:
            self._save(exchange)

    def _preset(self, name: str) -> None:
        presets = self._config.presets
        if name not in presets:
            raise ConfigError(f"presets: {', '.join(presets) or 'none is set'}", "/preset NAME")
        self._talk.use(presets[name])
        self._env.console.say(f"preset {name}, from the next message")

    def _save_settings(self, command: str) -> None:
        if command in ("rename", "system", "set", "think", "preset", "undo") and self._talk.roots:
            self._saver.save(self._talk)


def ask(env: Env) -> str | None:
    """The next line; None at the end of input. A backslash at the end goes on in the next line."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # editing and history in input()
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
            env.console.say("\nCtrl-C again, or Ctrl-D, to quit")
            continue
        interrupted = False
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        return "\n".join([*parts, line])


def _understood(env: Env, line: str) -> Typed | None:
    try:
        return understand(line)
    except ConfigError as error:
        env.console.say(f"! {clean(error.message)} ({error.hint})")
        return None


def _turn(
    env: Env, backend: ChatBackend, conversation: Conversation, exchange: Exchange, goes_on: bool = False
) -> Answered | None:
    """One question; a failure is shown and the conversation goes on."""
    console = env.console
    job = Job([], Sampling(), stream=True, show_thinking=console.out_tty, markdown=False)
    view = Text(console, job)
    messages = conversation.messages(exchange)
    if goes_on:
        exchange.text = exchange.text.rstrip()
        messages.append({"role": "assistant", "content": exchange.text})
    try:
        turn = backend.send(messages, None, conversation.template_values)
        answered = _follow(backend, turn, view, exchange)
    except BackendError as error:
        view.close([])
        if not goes_on:
            conversation.remove(exchange)
        console.fail(error)
        if isinstance(error, OutOfMemory) or error.exit_code == 6:
            raise
        return None
    view.close([answered])
    if answered.stop == "abort":
        console.say("stopped by you")
    return answered


def _follow(backend: ChatBackend, turn: int, view: Text, exchange: Exchange) -> Answered:
    """Show a turn; Ctrl-C ends it, and what was there by then is kept."""
    so_far: dict[int, Answered] = {}
    try:
        answered = follow(backend, [turn], view.event, so_far)[0]
    except KeyboardInterrupt:
        answered = follow(backend, [turn], view.event, so_far)[0]  # it was told to stop: its end is near
    exchange.text, exchange.reasoning = exchange.text + answered.text, exchange.reasoning + answered.reasoning
    exchange.stop, exchange.usage, exchange.timing = answered.stop, answered.usage, answered.timing
    return answered


def _command(env: Env, typed: Typed, conversation: Conversation, backend: ChatBackend) -> None:
    say = env.console.say
    if typed.command == "help":
        known = [slash for slash in SLASHES if slash.plain]
        width = max(len(f"/{s.name} {s.argument}") for s in known)
        for slash in known:
            say(f"/{slash.name} {slash.argument}".ljust(width) + f"   {slash.meaning}")
        say("//text sends a message that begins with /; a backslash at the end of a line goes on in the next")
    elif typed.command == "new":
        conversation.clear()
        say("new chat")
    elif typed.command == "system":
        say(clean(conversation.set_system(typed.text)))
    elif typed.command == "set":
        say(clean(conversation.set_sampling(typed.text)))
    elif typed.command == "think":
        say(clean(conversation.set_think(typed.text)))
    elif typed.command == "rename":
        conversation.title = clean_line(typed.text)[:200]
        say("renamed")
    elif typed.command in ("stats", "ctx"):
        facts = backend.facts()
        say(clean(facts.run_summary))
        if typed.command == "ctx":
            used = sum(
                backend.count_tokens(one.content) + backend.count_tokens(one.text) for one in conversation.exchanges
            )
            say(f"the conversation takes about {used:,} of {facts.ctx:,} tokens")
        elif conversation.summary:
            say(conversation.summary)
    elif typed.command == "copy":
        text, what = conversation.pick(typed.text)
        say(f"{what}: {copy(text, lambda sequence: _to_terminal(env, sequence))}")
    elif typed.command == "save":
        say(_write(typed.text, conversation.pick("code")[0]))
    elif typed.command == "export":
        from localllm.history.export import FORMATS, render

        words = typed.text.split(maxsplit=1)
        kind = words[0] if words and words[0] in FORMATS else "md"
        path = words[1] if len(words) == 2 and words[0] in FORMATS else "" if words[:1] == [kind] else typed.text
        messages = [m for one in conversation.exchanges for m in saved_messages(one)]
        say(_write(path or f"chat-{conversation.id[:6]}.{kind}", render(saved_chat(conversation), messages, kind)))
    else:
        raise ConfigError(f"/{typed.command} is for the full screen", "localllm chat without --plain")


def _write(path: str, text: str) -> str:
    """Write a new file; returns what to say. Raises ConfigError."""
    if not path:
        raise ConfigError("a path is needed", "/save script.py")
    try:
        with Path(path).expanduser().open("x", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else text + "\n")
    except FileExistsError:
        raise ConfigError(f"{clean_line(path)} is there already", "choose another name") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{clean_line(path)} cannot be written: {error}", "choose another place") from None
    return f"written to {clean_line(path)}"


def _to_terminal(env: Env, sequence: str) -> None:
    if env.console.err_tty and sys.stderr is not None:
        env.console.stderr.write(sequence)
        env.console.stderr.flush()
