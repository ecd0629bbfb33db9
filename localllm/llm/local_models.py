"""The models of this machine, as a chat offers them: which there are, which is taken without a name."""

from __future__ import annotations

from dataclasses import replace

from localllm.config import EngineOptions
from localllm.interface import ModelChoice


def model_choices(options: EngineOptions, ctx: int | None = None) -> list[ModelChoice]:
    """The models on this machine, then those of the catalogue; `ctx` is the window to judge them by."""
    from localllm.plan import choices
    from localllm.plan.planner import Planner

    return choices.model_choices(Planner.here(options if ctx is None else replace(options, ctx=ctx)))


def default_model(options: EngineOptions) -> str:
    """The model a chat without a name gets: used last, else the best one here, else the starter."""
    from localllm.plan import fit
    from localllm.plan.planner import Planner

    return fit.default_model(Planner.here(options))


def find(options: EngineOptions, name: str, *, offline: bool = False) -> str:
    """The full name of the model that a name stands for. Raises ModelNotFound, DoesNotFit, DownloadError."""
    from localllm.plan import fit
    from localllm.plan.planner import Planner

    return fit.resolve(name, Planner.here(options), offline=offline).name


def remember_model(name: str) -> None:
    """The model that was used last."""
    from localllm import hub

    hub.remember_model(name)
