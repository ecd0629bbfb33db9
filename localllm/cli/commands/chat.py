"""Talk: Interactive chat (full-screen; --plain for line mode)"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from localllm.cli.attach import wish_of
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.help import OPTIONAL_NUMBER
from localllm.cli.frame.options import (
    AttachTo,
    EngineFlags,
    MaybeModel,
    Preset,
    SamplingFlags,
    System,
    Think,
    setting,
    text_or_file,
)
from localllm.cli.full_screen import full_screen, in_tab
from localllm.cli.loading import within_models
from localllm.cli.names import placed
from localllm.cli.question import Job, KeptChat, gather_prompt, messages_of
from localllm.cli.session import Sampling
from localllm.cli.start import Start, new_start, noted, preset_of, template_of, think_of, typed_or_else
from localllm.cli.tools import toolbox
from localllm.config import UserConfig
from localllm.conversation.slash import OFF, parse_port
from localllm.errors import ConfigError
from localllm.terminal import dumb, is_tty


@command(
    "localllm chat qwen",
    'localllm chat smollm2 --temp 0 "What is the capital of France?"',
    "localllm chat -c",
    "localllm chat smollm2 --plain",
)
def chat(
    env: Env,
    model: MaybeModel = None,
    prompt: Annotated[list[str] | None, Argument(metavar="[PROMPT...]", help="The first message.")] = None,
    resume_last: Annotated[bool, Option("-c", "--continue", help="Continue the last chat.")] = False,
    resume: Annotated[str | None, Option(metavar="ID", help="Continue this chat.")] = None,
    system: System = None,
    preset: Preset = None,
    think: Think = None,
    attach: Annotated[
        list[Path] | None,
        Option("-a", "--attach", metavar="PATH", help="A file, folder or image for the first message."),
    ] = None,
    plain: Annotated[bool, Option("--plain", help="Line mode, for screen readers and dumb terminals.")] = False,
    web: Annotated[bool, Option("--web", help="Chat in a browser on this machine.")] = False,
    attach_to: AttachTo = "auto",
    serve: Annotated[
        str | None,
        Option(metavar=OPTIONAL_NUMBER, help="Also serve other programs, on this port."),
    ] = None,
    mcp: Annotated[Path | None, Option(metavar="FILE", help="MCP servers whose tools the model may call.")] = None,
    no_save: Annotated[bool, Option("--no-save", help="Do not save this chat.")] = False,
    sampled: SamplingFlags = SamplingFlags(),
    engine: EngineFlags = EngineFlags(),
    theme: Annotated[str | None, setting("ui.theme", "--theme", metavar="NAME")] = None,
    keys: Annotated[str | None, setting("ui.keys", "--keys")] = None,
    list_keys: Annotated[bool, Option("--list-keys", help="List the keys that [keys] can rebind.")] = False,
    no_mouse: Annotated[bool, Option("--no-mouse", help="Let the terminal handle the mouse.")] = False,
    no_animations: Annotated[bool, Option("--no-animations", help="Turn animations off.")] = False,
    inline: Annotated[bool, Option("--inline", help="Draw below the shell prompt instead of full-screen.")] = False,
) -> int:
    """Talk to a model. Without a name: the chat model used last, else a local one, else a small starter.

    Full-screen in a terminal; line mode with --plain, with TERM=dumb, or when stderr is not a terminal. When standard
    input is piped, all of it is one question, and only the answer goes to stdout.
    """
    flags = sampled.settings() | {"ui.theme": theme, "ui.keys": keys}
    flags |= {"ui.mouse": False if no_mouse else None, "ui.animations": False if no_animations else None}
    flags["chat.save"] = False if no_save else None
    config = engine.config(env, flags, exits=False, parallel=1 if serve is None else None)
    if not config.chat.save:
        config = replace(config, engine=replace(config.engine, kv_store=0))
    if env.console.as_json and (list_keys or web or is_tty(sys.stdin)):
        raise ConfigError("chat has no --json", 'localllm run MODEL "Hello" --json')
    if list_keys:
        return _list_keys(env, config)
    if web and (other := [flag for flag, given in (("--plain", plain), ("--inline", inline)) if given]):
        raise ConfigError(f"--web opens a chat in a browser, {other[0]} in a terminal", "drop one of them")
    if resume and resume_last:
        raise ConfigError("-c continues the last chat and --resume the one you name", "drop one of them")
    first = " ".join(prompt or [])
    sampling = Sampling(config.sampling.given(), tuple(sampled.stop or ()))
    typed = in_tab() or is_tty(sys.stdin)
    port = _port(serve, web or not typed, attach_to)
    resumed = resume or ("last" if resume_last else None)
    if not typed and not web:
        if mcp is not None:
            raise ConfigError(
                "--mcp needs a terminal, where you approve each call", "localllm run MODEL --mcp FILE --yes-tools NAME"
            )
        chosen = preset_of(config, preset)
        sampling.given = chosen.sampling.given() | typed_or_else(config, preset)
        asked = gather_prompt([first] if first else [], [])
        system = text_or_file(system, "--system") or chosen.system or config.chat.system
        kept = KeptChat.open(system, asked, sampling.given, resumed) if resumed else None
        job = Job(kept.messages if kept else messages_of(system, asked), sampling)
        job.chat, job.resumed = kept if config.chat.save else None, kept.talk.model if kept else ""
        job.place, job.template = wish_of(env, config, engine, attach_to), template_of(think_of(config, think))
        return once(env, config, model or chosen.model or None, job, attach or ())
    instructions = text_or_file(system, "--system") or config.chat.system
    start = new_start(config, sampling, instructions, resumed)
    start.first, start.ctx, start.inline, start.serve = first, engine.ctx, inline, port
    _prepare(start, config, preset, think, attach or [])
    start.tools = toolbox(env, config, mcp)
    wish = "off" if attach_to == "auto" and serve is not None else wish_of(env, config, engine, attach_to)
    named = model or preset_of(config, preset).model
    start.choice, start.attached = placed(env, config, wish, named, start.conversation.model)
    if start.attached is None:
        config = within_models(env, config, [start.choice])
    if web:
        from localllm.cli.web import serve_web

        return serve_web(env, config, start, attach or [])
    start.shares = wish == "auto"
    if in_tab():  # `localllm ps` has its server
        return full_screen(env, config, start)
    with noted(start):
        if plain or dumb() or not env.console.err_tty:
            from localllm.cli.plain import talk

            start.shares = False  # line mode never changes its model
            return talk(env, config, start)
        return full_screen(env, config, start)


def home(env: Env) -> int:
    """Run `localllm` without arguments in a terminal: chats to continue, models to start."""
    start = new_start(env.config, Sampling(env.config.sampling.given()), env.config.chat.system)
    start.tools = toolbox(env, env.config, None)
    start.shares = wish_of(env, env.config, EngineFlags(), "auto") == "auto"
    with noted(start):
        return full_screen(env, env.config, start)


def once(env: Env, config: UserConfig, model: str | None, job: Job, attach: Sequence[Path]) -> int:
    """Answer piped standard input as `run` does."""
    from localllm.cli.commands.run import answer
    from localllm.conversation.documents import read_document

    job.documents = tuple(map(read_document, attach))
    job.stream = job.show_thinking = job.stats = env.console.out_tty
    env.console.say("stdin is not a terminal: answering once, like `localllm run`")
    return answer(env, config, model, job)


def _port(typed: str | None, is_not_here: bool, attach_to: str) -> int | None:
    """Return the port that --serve names. Raises ConfigError where this terminal runs no engine of its own."""
    if typed is None:
        return OFF
    if is_not_here or attach_to not in ("auto", "off"):
        raise ConfigError("--serve needs a chat that runs its own model in this terminal", "localllm serve MODEL")
    try:
        port = parse_port(typed)
    except ConfigError:
        port = OFF
    if port == OFF:
        raise ConfigError(f"--serve must be a port number, not {typed}", "localllm chat MODEL --serve 8000")
    return port


def _list_keys(env: Env, config: UserConfig) -> int:
    from localllm.tui.keymap import KEYS, Keymap

    keymap = Keymap(config.ui.keys, config.keys)
    env.console.table(("ID", "KEYS", "MEANING"), [(n, ",".join(keymap.keys(n)), k.meaning) for n, k in KEYS.items()])
    for problem in keymap.problems:
        env.console.warn(problem)
    return 0


def _prepare(start: Start, config: UserConfig, preset: str | None, think: str | None, attach: list[Path]) -> None:
    from localllm.conversation.documents import read_document

    if preset is not None:
        said = typed_or_else(config, preset)
        start.conversation.use(preset_of(config, preset))
        start.conversation.sampling.update(said)  # a flag wins over the preset
    if think is not None:
        start.conversation.think = think_of(config, think)
    start.files = tuple(read_document(path) for path in attach)
