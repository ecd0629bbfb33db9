"""Slow work in a thread while its phases are shown: loading an `LLM`, downloading, measuring."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from localllm.cli.frame.command import Env
from localllm.errors import Aborted, ConfigError, LocalLLMError
from localllm.request import LoadProgress, OnProgress

from .attach import fake_engine
from .names import Choice

if TYPE_CHECKING:
    from localllm.config import EngineOptions, UserConfig
    from localllm.llm.llm import LLM


T = TypeVar("T")
TICK_S = 0.05
CANCEL_S = 0.4  # how long Ctrl+C waits for a download to flush its bytes


def load_llm(env: Env, choice: Choice, options: EngineOptions) -> LLM:
    """Load a model. Raises the error that loading failed with; Ctrl+C becomes Aborted."""
    from localllm import hub
    from localllm.llm.llm import LLM

    load = partial(LLM, choice.name, options, offline=env.offline)
    llm = watched(env, choice.shown, lambda tell, cancel: load(on_progress=tell, cancel=cancel))
    hub.remember_model(choice.name, chats=llm.has_chat_template)
    return llm


def within_models(env: Env, config: UserConfig, choices: Sequence[Choice]) -> UserConfig:
    """The settings with a context that these models can hold.

    A context from the settings is lowered with a note. A flag is refused for one model; where several are served, those
    that hold less are named.
    """
    ctx = config.engine.ctx
    if not isinstance(ctx, int) or fake_engine():
        return config
    origin = config.origin("engine.ctx")
    most = {choice.shown: max_context(choice.name) for choice in choices}
    for shown, limit in most.items():
        if not 0 < limit < ctx:
            continue
        if origin == "flag" and len(most) == 1:
            raise ConfigError(
                f"--ctx {ctx:,} exceeds {shown}'s maximum context of {limit:,} tokens", f"use --ctx {limit} or less"
            )
        asked = "--ctx" if origin == "flag" else f"engine.ctx ({origin})"
        env.console.warn(f"{shown} runs with {limit:,} tokens, its maximum; {asked} asks for {ctx:,}")
    least = min((limit for limit in most.values() if limit), default=ctx)
    if len(most) > 1 or least >= ctx:
        return config
    return replace(config, engine=replace(config.engine, ctx=least))


def max_context(name: str) -> int:
    """The most tokens that a model on this machine can hold; 0 when its files cannot be read."""
    from localllm import hub
    from localllm.models.architectures import open_model

    with suppress(LocalLLMError):
        path = hub.resolve(name, offline=True).path
        if path is not None:
            with open_model(path) as checkpoint:
                return checkpoint.facts.max_context
    return 0


def watched(env: Env, title: str, work: Callable[[OnProgress, threading.Event], T], stopped: str = "stopped") -> T:
    """Run `work(tell, cancel)` in a thread and show its phases. Ctrl+C cancels it and becomes Aborted (`stopped`)."""
    progress = env.progress(title)
    phases: deque[LoadProgress] = deque()
    cancel = threading.Event()
    done: Future[T] = Future()

    def body() -> None:
        try:
            done.set_result(work(phases.append, cancel))
        except BaseException as error:  # raised again in the caller's thread
            done.set_exception(error)

    thread = threading.Thread(target=body, name="work", daemon=True)
    thread.start()
    try:
        while thread.is_alive() or phases:
            while phases:
                progress.update(phases.popleft())
            progress.tick()
            thread.join(TICK_S)
    except KeyboardInterrupt:
        cancel.set()
        thread.join(CANCEL_S)
        raise Aborted(progress.interrupted() or stopped) from None
    finally:
        progress.close()
    return done.result()
