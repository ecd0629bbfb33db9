"""Loads an `LLM` in a thread while its phases are shown: for commands that need more than a `ChatBackend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localllm.cli.commands.pull import watched
from localllm.cli.frame.command import Env
from localllm.cli.frame.progress import make_progress

from .names import Choice

if TYPE_CHECKING:
    from localllm.llm.llm import LLM


def load_llm(env: Env, choice: Choice, options: dict[str, Any]) -> LLM:
    """Load a model. Raises what loading failed with; Ctrl-C becomes Aborted."""
    from localllm import hub
    from localllm.llm.llm import LLM

    progress = make_progress(env.console, env.options.progress or "auto", choice.shown)
    llm = watched(progress, lambda tell, cancel: LLM(choice.name, on_progress=tell, cancel=cancel, **options))
    hub.remember_model(choice.name)
    return llm
