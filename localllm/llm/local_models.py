"""The model choices of a chat: the local models, and the default model."""

from __future__ import annotations

from dataclasses import replace

from localllm.config import EngineOptions
from localllm.interface import ModelChoice


def model_choices(options: EngineOptions, ctx: int | None = None) -> list[ModelChoice]:
    """List the models on this machine, then those in the catalog; `ctx` is the context length to judge them by."""
    from localllm.plan import choices
    from localllm.plan.planner import Planner

    return choices.model_choices(Planner.here(options if ctx is None else replace(options, ctx=ctx)))


def default_model(options: EngineOptions) -> str:
    """The default model for a chat: the chat model used last, else the best local one, else the starter."""
    from localllm.plan import fit
    from localllm.plan.planner import Planner

    return fit.default_model(Planner.here(options))


def find(options: EngineOptions, name: str, *, offline: bool = False) -> str:
    """Resolve a name to the model's full name. Raises ModelNotFound, DoesNotFit, DownloadError."""
    from localllm.plan import fit
    from localllm.plan.planner import Planner

    return fit.resolve(name, Planner.here(options), offline=offline).name


def remember_model(name: str, *, chats: bool) -> None:
    """Record the model as the one used last, and whether it can chat."""
    from localllm import hub

    hub.remember_model(name, chats=chats)
