"""Slow work in a thread while its phases are shown: loading an `LLM`, downloading, measuring."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from localllm.cli.frame.command import Env
from localllm.errors import Aborted
from localllm.request import LoadProgress, OnProgress

from .names import Choice

if TYPE_CHECKING:
    from localllm.config import EngineOptions
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


def watched(env: Env, title: str, work: Callable[[OnProgress, threading.Event], T]) -> T:
    """Run `work(tell, cancel)` in a thread and show its phases. Ctrl+C cancels it and becomes Aborted."""
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
        raise Aborted(progress.interrupted() or "stopped") from None
    finally:
        progress.close()
    return done.result()
