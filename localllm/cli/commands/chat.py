"""`localllm chat`: a conversation, full-screen or in lines; with standard input piped, one answer as `run` gives it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli.endpoint import ChatEndpoint
from localllm.cli.frame import logs
from localllm.cli.frame import options as params
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.help import OPTIONAL_NUMBER
from localllm.cli.names import Choice, choose
from localllm.cli.session import Sampling, make_backend
from localllm.config import UserConfig
from localllm.conversation.serving import OFF, wished_port
from localllm.errors import ConfigError, LocalLLMError, ModelNotFound
from localllm.terminal import clean_line, dumb, is_tty, locale_encoding

if TYPE_CHECKING:
    from localllm.conversation.attachments import Attachment
    from localllm.conversation.saver import Saver
    from localllm.conversation.tree import Conversation
    from localllm.history import History
    from localllm.interface import ChatBackend
    from localllm.processes import Record

THINK = "auto|off|on|low|medium|high"


@command(
    "localllm chat qwen",
    'localllm chat smollm2 --temp 0 "What is the capital of France?"',
    "localllm chat -c",
    "localllm chat smollm2 --plain",
)
def chat(
    env: Env,
    model: params.MaybeModel = None,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT...]", help="The first message.")] = None,
    resume_last: Annotated[bool, typer.Option("-c", "--continue", help="Go on with the last chat.")] = False,
    resume: Annotated[str | None, typer.Option("--resume", metavar="ID", help="Go on with this chat.")] = None,
    system: params.System = None,
    preset: Annotated[str | None, typer.Option("--preset", metavar="NAME", help="Instructions and sampling.")] = None,
    think: Annotated[str | None, typer.Option("--think", metavar=THINK, help="Reasoning.")] = None,
    attach: Annotated[
        list[Path] | None, typer.Option("-a", "--attach", metavar="FILE", help="Text file for the first message.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Line mode: for screen readers and dumb terminals.")] = False,
    web: Annotated[bool, typer.Option("--web", help="In a browser on this machine.")] = False,
    attach_to: Annotated[
        str, typer.Option("--attach-to", metavar="auto|off|URL", help="Use a running `localllm serve` of this model.")
    ] = "auto",
    serve: Annotated[
        str | None,
        typer.Option("--serve", metavar=OPTIONAL_NUMBER, help="Also answer other programs here, on a port."),
    ] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Keep this chat off the disk.")] = False,
    temp: params.Temp = None,
    top_p: params.TopP = None,
    top_k: params.TopK = None,
    min_p: params.MinP = None,
    repetition_penalty: params.Repeat = None,
    seed: params.Seed = None,
    max_tokens: params.MaxTokens = None,
    stop: params.Stop = None,
    ctx: params.Ctx = None,
    kv: params.Kv = None,
    dtype: params.Dtype = None,
    threads: params.Threads = None,
    debug_invariants: params.DebugInvariants = False,
    theme: Annotated[str | None, typer.Option("--theme", metavar="NAME", help="Colours.")] = None,
    keys: Annotated[str | None, typer.Option("--keys", metavar="default|vim", help="Keyboard style.")] = None,
    list_keys: Annotated[bool, typer.Option("--list-keys", help="Name what can be bound under [keys].")] = False,
    no_mouse: Annotated[bool, typer.Option("--no-mouse", help="Leave the mouse to the terminal.")] = False,
    no_animations: Annotated[bool, typer.Option("--no-animations", help="Nothing moves by itself.")] = False,
    inline: Annotated[bool, typer.Option("--inline", help="Below the prompt of the shell, not full-screen.")] = False,
) -> int:
    """Talk to a model. Without a name: the one used last, else a local one, else a small starter model.

    Full-screen in a terminal; line mode with --plain, TERM=dumb, or when stderr is no terminal. With standard input
    piped, the whole input is one question and its answer is all that goes to stdout.
    """
    env.debug_invariants = debug_invariants
    values = {
        "temp": temp, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed, "max_tokens": max_tokens,
        "repetition_penalty": repetition_penalty, "ctx": ctx, "kv": kv, "dtype": dtype, "threads": threads,
    }  # fmt: skip
    flags = params.sampling_flags(values) | params.engine_flags(values) | {"ui.theme": theme, "ui.keys": keys}
    flags |= {"ui.mouse": False if no_mouse else None, "ui.animations": False if no_animations else None}
    flags["chat.save"] = False if no_save else None
    config = env.settings(flags)
    if list_keys:
        return _list_keys(env, config)
    first = " ".join(prompt or [])
    sampling = Sampling(config.sampling.given(), tuple(stop or ()))
    instructions = params.text_or_file(system, "--system") or config.chat.system
    port = _port(serve, web or not is_tty(sys.stdin), attach_to)
    if not is_tty(sys.stdin) and not web:
        if attach_to not in ("auto", "off"):  # what is asked once is answered by a model of one's own
            raise ConfigError("--attach-to is for a chat in a terminal, and standard input is none", "localllm chat")
        return once(env, config, model, first, instructions, sampling, ctx)
    if env.console.as_json:
        raise ConfigError("chat has no --json", 'localllm run MODEL "Hello" --json')
    start = _start(env, config, sampling, instructions, resume or ("last" if resume_last else None))
    start.first, start.ctx, start.inline, start.serve = first, ctx, inline, port
    _prepare(start, config, preset, think, attach or [])
    if attach_to == "auto" and (
        serve is not None or debug_invariants or any(v is not None for v in (ctx, kv, dtype, threads))
    ):
        attach_to = "off"  # how a model is loaded is said for a model of one's own
    _place(env, config, start, attach_to, model or _preset_model(config, preset))
    if web:
        from localllm.cli.web import serve_web

        return serve_web(env, config, start)
    return open_chat(env, config, start, plain=plain)


@dataclass
class Start:
    """What a chat begins with."""

    conversation: Conversation
    saver: Saver
    sampling: Sampling
    choice: Choice | None = None
    """None: nothing is loaded before something is chosen"""
    first: str = ""
    files: tuple[Attachment, ...] = ()
    ctx: str | None = None
    inline: bool = False
    attach_to: str = ""
    """the server that computes; "" for this process"""
    key: str = ""
    serve: int | None = OFF
    """the port at which the engine of this chat answers other programs; None: the usual one"""
    record: Record | None = None


def home(env: Env) -> int:
    """`localllm` without words in a terminal: chats to continue, models to start."""
    config = env.settings({})
    start = _start(env, config, Sampling(config.sampling.given()), config.chat.system, None)
    with noted(start):
        return full_screen(env, config, start)


def open_chat(env: Env, config: UserConfig, start: Start, *, plain: bool = False) -> int:
    """In lines or full-screen, as the terminal allows; `localllm ps` shows it meanwhile."""
    with noted(start):
        return _open_chat(env, config, start, plain)


@contextmanager
def noted(start: Start) -> Iterator[None]:
    """This process in `localllm ps`; a folder that cannot be written costs that line, not the chat."""
    from localllm.processes import Record

    record = None
    with suppress(OSError, LocalLLMError):
        record = Record("chat")
        record.update((start.choice.shown,) if start.choice and not start.attach_to else ())
        start.record = record
    try:
        yield
    finally:
        if record is not None:
            record.remove()


def _open_chat(env: Env, config: UserConfig, start: Start, plain: bool) -> int:
    if plain or dumb() or not env.console.err_tty:
        from localllm.cli.plain import talk

        return talk(env, config, start)
    return full_screen(env, config, start)


def once(
    env: Env, config: UserConfig, model: str | None, first: str, system: str, sampling: Sampling, ctx: str | None
) -> int:
    """Standard input is no terminal: answer it as `run` does."""
    from localllm.cli.commands.run import Job, answer, gather_prompt, messages_of

    text = gather_prompt([first] if first else [], [])
    env.console.say("stdin is not a terminal: answering it once, as `localllm run` does")
    tty = env.console.out_tty
    job = Job(messages_of(system, text), sampling, ctx=ctx, stream=tty, show_thinking=tty, stats=tty)
    return answer(env, config, model, job)


def _port(typed: str | None, is_not_here: bool, attach_to: str) -> int | None:
    """What --serve means. Raises ConfigError where there is no engine of this chat's own in this terminal."""
    if typed is None:
        return OFF
    if is_not_here or attach_to not in ("auto", "off"):
        raise ConfigError("--serve is for a chat in this terminal that runs its model itself", "localllm serve MODEL")
    try:
        port = wished_port(typed)
    except ConfigError:
        port = OFF
    if port == OFF:
        raise ConfigError(f"--serve {typed}: that is no port", "localllm chat MODEL --serve 8000")
    return port


def _list_keys(env: Env, config: UserConfig) -> int:
    from localllm.tui.keys import KEYS, Keymap

    keymap = Keymap(config.ui.keys, config.keys)
    env.console.table(("ID", "KEYS", "MEANING"), [(n, ",".join(keymap.keys(n)), k.meaning) for n, k in KEYS.items()])
    for problem in keymap.problems:
        env.console.warn(problem)
    return 0


def _start(env: Env, config: UserConfig, sampling: Sampling, system: str, resumed: str | None) -> Start:
    """A new conversation, or a saved one. Raises ChatNotFound."""
    from localllm.conversation.saver import Saver
    from localllm.conversation.tree import Conversation

    saver = Saver(_history if config.chat.save else None)
    think = {True: "on", False: "off"}.get(config.chat.think, "auto") if config.chat.think != "auto" else "auto"
    if resumed is None:
        talk = Conversation(system, sampling.given, think)
        talk.titles_itself = config.chat.title == "auto"
        return Start(talk, saver, sampling)
    from localllm.cli.commands.logs import find
    from localllm.conversation.storage import restored
    from localllm.history import History

    typed = {name: value for name, value in sampling.given.items() if config.origins.get(f"sampling.{name}") == "flag"}
    with History() as history:
        chat = find(history, resumed)
        talk = restored(chat, history.messages(chat.id), sampling.given)
    talk.sampling.update(typed)  # what the settings say gives way to what the chat had, what was typed now does not
    talk.system = system or talk.system
    talk.titles_itself = config.chat.title == "auto"
    return Start(talk, saver, sampling)


def _history() -> History:
    from localllm.history import History

    return History()


def _prepare(start: Start, config: UserConfig, preset: str | None, think: str | None, attach: list[Path]) -> None:
    from localllm.conversation.attachments import read_attachment

    if preset is not None:
        if preset not in config.presets:
            known = ", ".join(config.presets) or "none is set"
            raise ConfigError(f"there is no preset {preset!r}", f"one of: {known}")
        said = dict(start.sampling.given)
        start.conversation.use(config.presets[preset])
        start.conversation.sampling.update(said)  # a flag wins over the preset
    if think is not None:
        if think not in THINK.split("|"):
            raise ConfigError(f"--think is {think!r}, it can be {THINK.replace('|', ', ')}", "--think off")
        start.conversation.think = think
    start.files = tuple(read_attachment(path) for path in attach)


def _place(env: Env, config: UserConfig, start: Start, wish: str, name: str | None) -> None:
    """Where the model runs: in a server that has it already, else here."""
    from localllm.cli.attach import find_server

    if wish not in ("auto", "off"):
        attached = find_server(wish, (name,) if name else ())
    else:
        start.choice = _choose(env, config, name, start.conversation.model)
        attached = find_server(wish, (start.choice.shown, start.choice.name))
    if attached is not None:
        start.attach_to, start.key = attached.url, attached.key
        start.choice = Choice(attached.model, attached.model or attached.url)


def _preset_model(config: UserConfig, preset: str | None) -> str | None:
    return config.presets[preset].model if preset is not None else None


def _choose(env: Env, config: UserConfig, name: str | None, resumed: str) -> Choice:
    """The model asked for; else that of the chat that is resumed, if it is still here; else the usual one."""
    if name is None and resumed:
        try:
            return choose(env, config, resumed)
        except ModelNotFound:
            env.console.warn(f"{clean_line(resumed)}, the model of this chat, is not here; another one goes on with it")
    return choose(env, config, name)


def full_screen(env: Env, config: UserConfig, start: Start) -> int:
    """The Textual interface; afterwards one line on the normal screen."""
    if not env.console.out_tty and "TEXTUAL_DRIVER" not in os.environ:  # a browser's tab has a pipe instead
        env.console.warn("stdout is not a terminal; the chat is drawn on stderr and nothing is written to stdout")
    from localllm.tui.stderr_guard import stderr_to

    logs.no_stderr()
    choice = start.choice
    with stderr_to(logs.path()):
        from localllm.tui.app import ChatApp

        backend = backend_of(env, config, start)
        endpoint = ChatEndpoint(env, config, backend, start.record)
        os.environ.setdefault("ESCDELAY", "50")
        if "TEXTUAL_DRIVER" not in os.environ:  # a shell that exports them would fix the size for ever
            for name in ("LINES", "COLUMNS"):
                os.environ.pop(name, None)
        app = ChatApp(
            backend,
            start.conversation,
            model=choice.name if choice else None,
            shown=choice.shown if choice else "",
            ui=config.ui,
            keys=config.keys,
            presets=config.presets,
            saver=start.saver,
            first_message=start.first,
            files=start.files,
            offline=env.offline,
            home=choice is None,
            log_file=logs.path(),
            endpoint=endpoint,
            serve=start.serve,
            encoding=locale_encoding(),
        )
        app.run(mouse=config.ui.mouse, inline=start.inline, inline_no_clear=start.inline)
        app.downloads.stop()
        start.saver.close()
        endpoint.stop()
        close_soon(backend)
    if app.failure is not None:
        raise app.failure  # becomes one sentence and a line in the log
    if app.wants_restart:
        _restart(app.model, app.conversation.id)
    farewell(env, app.conversation, start.saver, app.model)
    return 0


def backend_of(env: Env, config: UserConfig, start: Start) -> ChatBackend:
    """The engine of this chat: a running server, or one in this process."""
    if start.attach_to:
        from localllm.backend.over_http import RemoteBackend
        from localllm.cli.attach import process_at

        key = start.key or os.environ.get("LOCALLLM_API_KEY", "")
        sampling, pid = start.sampling, process_at(start.attach_to)
        return RemoteBackend(start.attach_to, key, given=sampling.given, stop=sampling.stop, pid=pid)
    return make_backend(env, config, start.sampling, ctx=start.ctx)


def farewell(env: Env, conversation: Conversation, saver: Saver, model: str) -> None:
    """What was saved, and how to go on with it."""
    if not conversation.summary and not conversation.exchanges:
        return
    summary = f" · {conversation.summary}" if conversation.summary else ""
    if saver.kept and not saver.problem:
        env.console.say(f"Saved “{clean_line(conversation.shown_title) or 'untitled'}”{summary}")
        env.console.say(
            f"Continue: localllm chat -c      Export: localllm logs export {conversation.id[:6]} -o chat.md"
        )
    else:
        if saver.kept:
            env.console.warn(f"the chat was not saved: {saver.problem}")
        env.console.say(f"{conversation.summary or conversation.shown_title}\nAgain: localllm chat {clean_line(model)}")


def _restart(model: str, chat_id: str) -> None:
    words = [sys.executable, "-P", "-c", "from localllm.cli import main; main()", "chat", model, "--resume", chat_id]
    sys.stdout.flush()
    os.execv(sys.executable, words)


def close_soon(backend: Any, wait_s: float = 3.0) -> None:
    """Close the backend, but do not make somebody who has left wait for a model that is still loading."""
    import threading

    closing = threading.Thread(target=backend.close, name="close", daemon=True)
    closing.start()
    closing.join(wait_s)
