"""The models a server offers and how it loads them: models on this machine as `ServedModel`s."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import InvalidRequest, LocalLLMError
from localllm.server.served_model import ServedModel, container_of

from .names import Choice

if TYPE_CHECKING:
    from localllm.config import EngineOptions, UserConfig
    from localllm.device import MachineFacts
    from localllm.hub import LocalModel
    from localllm.llm.llm import LLM
    from localllm.plan.plan import Plan
    from localllm.request import OnProgress


def local_offers() -> list[ServedModel]:
    """Every model on this machine that this version can run."""
    from localllm import hub

    return [_offer(model) for model in hub.list_local() if model.supported and not model.broken]


def named_offers(choices: Sequence[Choice], aliases: Sequence[str]) -> list[ServedModel]:
    """The models that were named; the aliases belong to the first."""
    from localllm import hub

    known = {model.name: model for model in hub.list_local()}
    offers = []
    for number, choice in enumerate(choices):
        extra = tuple(alias for alias in dict.fromkeys(aliases) if alias != choice.shown) if number == 0 else ()
        model = known.get(choice.name) or _described(choice.name)
        offer = _offer(model) if model is not None else ServedModel(choice.shown, choice.name)
        also = (choice.name, *offer.also)  # with path and revision: what commands on this machine ask for
        offers.append(replace(offer, name=choice.shown, source=choice.name, aliases=extra, also=also))
    return offers


def _described(name: str) -> LocalModel | None:
    """Describe a model that is named by path or revision."""
    from localllm import hub
    from localllm.hub.names import parse_name

    path = Path(name).expanduser()
    if not path.exists():
        found = hub.local.find(parse_name(name))
        return hub.local.describe(found[0]) if found else None
    size = path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.glob("*.safetensors"))
    return hub.local.describe(hub.LocalModel(name, path, "folder", size_bytes=size))


def _offer(model: LocalModel) -> ServedModel:
    try:
        modified = model.path.stat().st_mtime
    except OSError:
        modified = 0.0
    facts = model.facts
    return ServedModel(
        model.name, model.name, (), model.size_bytes, model.params, model.format, model.architecture,
        model.max_context, model.chat, model.license, modified, container_of(model.path), _also(model),
        facts is not None and bool(facts.pooling), facts is not None and facts.vision is not None,
        partial(_template, model.path),
    )  # fmt: skip


def _template(path: Path) -> str:
    """The chat template in a model's files; "" when there is none, or it is unreadable."""
    from localllm.models.architectures import open_model
    from localllm.tokenizer.files import load_tokenizer

    try:
        with open_model(path) as checkpoint:
            return load_tokenizer(checkpoint).chat_template or ""
    except LocalLLMError:
        return ""


def _also(model: LocalModel) -> tuple[str, ...]:
    """Its names for Ollama's clients: llama3.2:3b, or qwen3:4b for the catalog's qwen3-4b."""
    from localllm.hub import catalog

    if model.is_foreign:
        called = dict.fromkeys((model.base.partition("/")[2], model.short))  # with and without hf.co in front
        tagged = tuple(f"{name}:{model.quant}" if model.quant else name for name in called)
        return (*tagged, *called) if model.quant == "latest" else tagged
    names = {c.name for c in catalog.candidates() if c.spec.casefold() == model.name.casefold()}
    other = (f"hf.co/{model.name}",) if model.source == "hub" else ()
    return (*other, *(name for one in sorted(names) for name in (one, ":".join(one.rsplit("-", 1)))))


class HubLibrary:
    """Adds and removes models on this machine, for `serve --ollama`."""

    def __init__(self, config: UserConfig, *, offline: bool = False) -> None:
        self._config, self._offline = config, offline

    def pull(self, name: str, progress: OnProgress, cancel: threading.Event) -> None:
        """Download a model; returns at once if it is here or in another program's store. HTTP never names a path."""
        from localllm import hub
        from localllm.hub.names import parse_name
        from localllm.plan import fit
        from localllm.plan.planner import Planner

        parse_name(name)
        resolved = fit.resolve(name, Planner.here(self._config.engine), offline=self._offline, config=self._config)
        if resolved.kind == "path":
            raise InvalidRequest("a model to pull must be a name, not a path", param="model")
        if resolved.path is None:
            hub.download(resolved, progress=progress, cancel=cancel)

    def remove(self, name: str) -> None:
        from localllm import hub

        hub.remove(_ours(name, "rm").name)

    def copy(self, source: str, target: str) -> None:
        from localllm import hub

        hub.copy(_ours(source, "cp").name, target)


def _ours(name: str, verb: str) -> LocalModel:
    """One of our own models; another program's model is refused with that program's command."""
    from localllm import hub

    found = hub.exact(name)
    if found.is_foreign:
        error = found.refusal(verb)
        raise InvalidRequest(f"{error.message}: {error.hint}", error.hint)
    return found


class HubLoader:
    """Plans and loads models that are on this machine.

    adapted   id of the model that gets the adapters in the options
    """

    def __init__(self, options: EngineOptions, adapted: str = "") -> None:
        self._options, self._adapted = options, adapted

    def _of(self, model: ServedModel) -> EngineOptions:
        if model.name == self._adapted:
            return self._options
        return replace(self._options, adapters=(), mmproj="off" if self._options.mmproj == "off" else "auto")

    def plan(self, model: ServedModel, machine: MachineFacts) -> Plan:
        from localllm import hub
        from localllm.models.architectures import open_model
        from localllm.plan import fit
        from localllm.plan.planner import Planner

        resolved = hub.resolve(model.source, offline=True)
        assert resolved.path is not None, "offline, a name is a local model or an error"
        options = self._of(model)
        with open_model(resolved.path, options.mmproj) as checkpoint:
            planner = fit.with_draft(Planner.here(options, machine))
            planner = fit.with_drafter_beside(planner, checkpoint.facts, checkpoint.path)
            return planner.plan_within(checkpoint.facts, checkpoint.path)

    def load(self, model: ServedModel, machine: MachineFacts, on_progress: OnProgress, cancel: threading.Event) -> LLM:
        """Load a model with the context of its plan."""
        from localllm import hub
        from localllm.llm.llm import LLM

        options = self._of(model)
        if isinstance(options.ctx, int):
            options = replace(options, ctx=self.plan(model, machine).ctx)
        llm = LLM(model.source, options, offline=True, machine=machine, on_progress=on_progress, cancel=cancel)
        hub.remember_model(model.source, chats=llm.has_chat_template)
        llm.keeps_pace, llm.keeps_weights = True, False  # shutdown waits for unfinished writes
        return llm
