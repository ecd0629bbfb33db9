"""The model choices of a chat: the local models, and the default model."""

from __future__ import annotations

from dataclasses import replace

from localllm.config import EngineOptions
from localllm.interface import ModelChoice
from localllm.request import cannot_chat
from localllm.terminal import clean_line


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
    """Resolve a name to the full name of a model to chat with.

    Raises ModelNotFound, DoesNotFit, DownloadError; InvalidRequest for a local model that cannot chat, BadModelFile.
    """
    from localllm.models.architectures import open_model
    from localllm.plan import fit
    from localllm.plan.planner import Planner

    found = fit.resolve(name, Planner.here(options), offline=offline)
    if found.path is not None:
        with open_model(found.path, "off") as checkpoint:
            kind = checkpoint.facts.kind
        if kind in ("embedding model", "base model"):
            raise cannot_chat(clean_line(found.name), kind == "embedding model")
    return found.name


def remember_model(name: str, *, chats: bool) -> None:
    """Record the model as the one used last, and whether it can chat."""
    from localllm import hub

    hub.remember_model(name, chats=chats)
