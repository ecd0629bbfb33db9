"""Line mode of `chat`: no full screen, no cursor movement; for screen readers, dumb terminals and logs."""

from __future__ import annotations

import sys

from localllm.config import UserConfig
from localllm.errors import ConfigError, LocalLLMError, OutOfMemory
from localllm.request import ChatBackend, Facts
from localllm.terminal import clean, clean_line
from localllm.tui.clipboard import copy
from localllm.tui.conversation import SLASHES, Conversation, Exchange, Typed, understand

from .command import Env
from .names import Choice
from .progress import make_progress
from .run import Job, Text
from .session import Answered, BackendError, Sampling, follow, open_backend, stats_line, wait_ready


def talk(
    env: Env, config: UserConfig, choice: Choice, first: str, system: str, sampling: Sampling, ctx: str | None
) -> int:
    """Load, then questions and answers until Ctrl-D. Ctrl-C stops an answer; at the prompt, twice, it leaves."""
    console = env.console
    conversation = Conversation(system, sampling.given)
    progress = make_progress(console, env.options.progress or "auto", choice.shown)
    with open_backend(env, config, sampling, ctx=ctx) as backend:
        backend.start(choice.name)
        facts, _ = wait_ready(backend, progress)
        if not facts.has_chat_template:
            name = clean_line(facts.model)
            raise ConfigError(
                f"{name} is a base model: it has no chat template", f'localllm run {name} "Once upon a time"'
            )
        device = f" on {facts.device}" if facts.device else ""
        console.say(f"{choice.shown}{device}, ctx {facts.ctx:,}. /help for commands, Ctrl-D to quit.")
        for warning in facts.warnings:
            console.warn(warning)
        line: str | None = first or ask(env)
        while line is not None:
            typed = _understood(env, line)
            if typed is not None and typed.command == "quit":
                break
            if typed is not None and typed.command:
                _command(env, typed, conversation, backend.facts())
            elif typed is not None and typed.text.strip():
                answered = _turn(env, backend, conversation, typed.text)
                if answered is not None and config.ui.stats == "footer":
                    console.say(console.style(f"[{stats_line(answered, backend.facts())}]", "dim", err=True))
            line = ask(env)
    if conversation.summary:
        console.say(f"{conversation.summary}\nAgain: localllm chat {choice.name}")
    return 0


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


def _turn(env: Env, backend: ChatBackend, conversation: Conversation, text: str) -> Answered | None:
    """One question; a failure is shown and the conversation goes on."""
    console = env.console
    exchange = conversation.ask(text)
    job = Job([], Sampling(), stream=True, show_thinking=console.out_tty, markdown=False)
    view = Text(console, job)
    try:
        turn = backend.send(conversation.messages(exchange))
        answered = _follow(backend, turn, view, exchange)
    except BackendError as error:
        view.close([])
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
    exchange.text, exchange.reasoning = answered.text, answered.reasoning
    exchange.stop, exchange.usage, exchange.timing = answered.stop, answered.usage, answered.timing
    return answered


def _command(env: Env, typed: Typed, conversation: Conversation, facts: Facts) -> None:
    say = env.console.say
    try:
        if typed.command == "help":
            width = max(len(f"/{s.name} {s.argument}") for s in SLASHES)
            for slash in SLASHES:
                say(f"/{slash.name} {slash.argument}".ljust(width) + f"   {slash.meaning}")
            say("//text sends a message that begins with /; a backslash at the end of a line goes on in the next")
        elif typed.command == "new":
            conversation.clear()
            say("new chat")
        elif typed.command == "system":
            say(clean(conversation.set_system(typed.text)))
        elif typed.command == "set":
            say(clean(conversation.set_sampling(typed.text)))
        elif typed.command == "stats":
            say(facts.truth_line)
            if conversation.summary:
                say(conversation.summary)
        elif typed.command == "copy":
            text, what = conversation.pick(typed.text)
            say(f"{what}: {copy(text, lambda sequence: _to_terminal(env, sequence))}")
    except LocalLLMError as error:
        say(f"! {clean(error.message)}" + (f" ({clean(error.hint)})" if error.hint else ""))


def _to_terminal(env: Env, sequence: str) -> None:
    if env.console.err_tty and sys.stderr is not None:
        env.console.stderr.write(sequence)
        env.console.stderr.flush()
