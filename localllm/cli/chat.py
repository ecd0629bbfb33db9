"""`localllm chat`: a conversation, full-screen or in lines; with standard input piped, one answer as `run` gives it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from localllm.config import UserConfig
from localllm.errors import ConfigError
from localllm.terminal import dumb, is_tty

from . import logs, params
from .command import Env, command
from .names import Choice, choose
from .session import Sampling, make_backend


@command(
    "localllm chat",
    "localllm chat qwen",
    'localllm chat smollm2 --temp 0 "What is the capital of France?"',
    "localllm chat smollm2 --plain",
)
def chat(
    env: Env,
    model: params.MaybeModel = None,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT...]", help="The first message.")] = None,
    system: params.System = None,
    plain: Annotated[bool, typer.Option("--plain", help="Line mode: for screen readers and dumb terminals.")] = False,
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
    no_mouse: Annotated[bool, typer.Option("--no-mouse", help="Leave the mouse to the terminal.")] = False,
    no_animations: Annotated[bool, typer.Option("--no-animations", help="Nothing moves by itself.")] = False,
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
    flags = params.sampling_flags(values) | params.engine_flags(values) | {"ui.theme": theme}
    flags |= {"ui.mouse": False if no_mouse else None, "ui.animations": False if no_animations else None}
    config = env.settings(flags)
    instructions = params.text_or_file(system, "--system") or config.chat.system
    sampling = Sampling(config.sampling.given(), tuple(stop or ()))
    first = " ".join(prompt or [])
    if not is_tty(sys.stdin):
        return once(env, config, model, first, instructions, sampling, ctx)
    if env.console.as_json:
        raise ConfigError("chat has no --json", 'localllm run MODEL "Hello" --json')
    choice = choose(env, config, model)
    if plain or dumb() or not env.console.err_tty:
        from .plain import talk

        return talk(env, config, choice, first, instructions, sampling, ctx)
    return full_screen(env, config, choice, first, instructions, sampling, ctx)


def once(
    env: Env, config: UserConfig, model: str | None, first: str, system: str, sampling: Sampling, ctx: str | None
) -> int:
    """Standard input is no terminal: answer it as `run` does."""
    from .run import Job, answer, gather_prompt, messages_of

    text = gather_prompt([first] if first else [], [])
    env.console.say("stdin is not a terminal: answering it once, as `localllm run` does")
    tty = env.console.out_tty
    job = Job(messages_of(system, text), sampling, ctx=ctx, stream=tty, show_thinking=tty, stats=tty)
    return answer(env, config, model, job)


def full_screen(
    env: Env, config: UserConfig, choice: Choice, first: str, system: str, sampling: Sampling, ctx: str | None
) -> int:
    """The Textual interface; afterwards one line on the normal screen."""
    if not env.console.out_tty:
        env.console.warn("stdout is not a terminal; the chat is drawn on stderr and nothing is written to stdout")
    from localllm.tui.stderr_guard import stderr_to

    logs.no_stderr()
    backend: Any = None
    conversation: Any = None
    with stderr_to(logs.path()):
        from localllm.tui.app import ChatApp
        from localllm.tui.conversation import Conversation

        conversation = Conversation(system, sampling.given)
        backend = make_backend(env, config, sampling, ctx=ctx)
        os.environ.setdefault("ESCDELAY", "50")
        app = ChatApp(
            backend,
            conversation,
            model=choice.name,
            shown=choice.shown,
            ui=config.ui,
            first_message=first,
            offline=env.offline,
        )
        app.run(mouse=config.ui.mouse)
        close_soon(backend)
    if app.failure is not None:
        raise app.failure  # becomes one sentence and a line in the log
    if conversation.summary:
        env.console.say(f"{conversation.summary}\nAgain: localllm chat {choice.name}")
    return 0


def close_soon(backend: Any, wait_s: float = 3.0) -> None:
    """Close the backend, but do not make somebody who has left wait for a model that is still loading."""
    import threading

    closing = threading.Thread(target=backend.close, name="close", daemon=True)
    closing.start()
    closing.join(wait_s)
