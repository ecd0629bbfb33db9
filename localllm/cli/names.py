"""From a typed name to a model that can be started: found here, or its download agreed to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.cli.frame.command import Env
from localllm.config import UserConfig
from localllm.errors import BadModelFile, ConfigError, LocalLLMError, ModelNotFound
from localllm.terminal import GIB, clean_line, gib

from .attach import Attached, can_be_named, fake_engine, find_server

if TYPE_CHECKING:
    from localllm.hub import Resolved
    from localllm.models.architectures import OpenModel
    from localllm.plan.plan import Plan


@dataclass(frozen=True)
class Choice:
    """A model that can be started."""

    name: str  # the backend's name for it
    shown: str  # the name shown to people
    revision: str | None = None
    quant: str | None = None
    here: str = ""  # its name on this machine, when a server has another

    @property
    def saved(self) -> str:
        """The name by which a saved chat finds it again."""
        return self.here or self.name


def choose(env: Env, config: UserConfig, name: str | None) -> Choice:
    """The model to run. None: the one in the settings, the chat model used last, a local one, the starter.

    Raises ModelNotFound when it is not here and may not be downloaded.
    """
    if fake_engine():
        return Choice(name or "fake", name or "fake", quant="Q4_1")
    wanted = known = name or config.model
    if not wanted:
        from localllm.llm.local_models import default_model

        known = default_model(config.engine)
    resolved = resolve(env, config, known)
    if resolved.path is None:
        agree(env, resolved, asked_for=bool(wanted))
    return choice_of(resolved)


def placed(
    env: Env, config: UserConfig, wish: str, model: str | None, resumed: str = ""
) -> tuple[Choice, Attached | None]:
    """The model of `run` or `chat`, and the server that runs it (printed); None when this process runs it.

    wish      --attach-to
    resumed   the model of the resumed chat
    """
    if wish not in ("auto", "off"):
        attached = find_server(wish, (model,) if model else ())
        return Choice(model or "", model or wish), attached
    if wish == "auto" and model and can_be_named(config, model) and (attached := find_server(wish, (model,))):
        choice = Choice(attached.model, model)  # the server knows it by this name: no lookup needed
    else:
        choice = _default_choice(env, config, model, resumed)
        attached = find_server(wish, (choice.name,))  # another file may have the same short name
        choice = choice if attached is None else Choice(attached.model, choice.shown, here=choice.name)
    if attached is not None:
        env.console.say(f"using {clean_line(choice.shown)} at {attached.url}")
    return choice, attached


def _default_choice(env: Env, config: UserConfig, name: str | None, resumed: str) -> Choice:
    """The requested model; else the resumed chat's, if it is still here; else the default one."""
    if name is None and resumed:
        try:
            return choose(env, config, resumed)
        except ModelNotFound:
            env.console.warn(
                f"{clean_line(resumed)}, this chat's model, is not on this machine; another one takes over"
            )
    return choose(env, config, name)


def resolve(env: Env, config: UserConfig, name: str, *, refresh: bool = False) -> Resolved:
    """Resolve a name on this machine. A local model is found without any request.

    A family's name is decided by the plan: its largest member that fits with 32k tokens of context, else with less.
    """
    from localllm import hub

    def judge() -> hub.Judgement:
        from localllm.plan import fit
        from localllm.plan.planner import Planner

        return fit.judgement(Planner.here(config.engine))

    return hub.resolve(name, judge=judge, offline=env.offline, config=config, refresh=refresh)


def local(env: Env, config: UserConfig, name: str, kind: type[LocalLLMError] = ConfigError) -> Resolved:
    """Resolve a model on this machine; raises `kind` for one that is not here."""
    resolved = resolve(env, config, name)
    if resolved.path is None:
        raise kind(f"{clean_line(resolved.name)} is not on this machine", f"localllm pull {clean_line(name)}")
    return resolved


def foreseen(env: Env, config: UserConfig, resolved: Resolved) -> Plan | None:
    """The plan for a model that is not here, from its catalog entry; None without one."""
    from localllm.hub import catalog
    from localllm.plan import fit
    from localllm.plan.planner import Planner

    entry = next((c for c in catalog.candidates() if c.spec.casefold() == resolved.name.casefold()), None)
    return fit.plan_of(entry, Planner.here(config.engine)) if entry is not None else None


def fit_line(made: Plan | None) -> str:
    """'memory weights 18.0 + KV 8.0 + work 1.6 = 27.6 GiB of 31.0 GiB with 32,768 tokens'; "" without a plan."""
    if made is None:
        return ""
    work = made.work_bytes + made.margin_bytes
    terms = f"weights {made.weight_bytes / GIB:.1f} + KV {made.kv_bytes / GIB:.1f} + work {work / GIB:.1f}"
    verdict = "" if made.fits else ": does not fit"
    return f"memory {terms} = {gib(made.need_bytes)} of {gib(made.have_bytes)} with {made.ctx:,} tokens{verdict}"


@contextmanager
def opened(resolved: Resolved, mmproj: str) -> Iterator[OpenModel]:
    """Open a local model's files (`mmproj` as in `open_model`); damage raises an error naming the repair command."""
    from localllm.checkpoint.mapped_file import label
    from localllm.models.architectures import open_model

    assert resolved.path is not None
    try:
        with open_model(resolved.path, mmproj) as checkpoint:
            yield checkpoint
    except BadModelFile as error:
        raise error.about(label(resolved.path), resolved.pulled_as) from error


def choice_of(resolved: Resolved) -> Choice:
    """The full name, valid in any folder, so that nothing is resolved twice; with the commit, if one was requested."""
    if resolved.kind == "path" and resolved.path is not None:
        from localllm.hub.selection import quant_label

        file = resolved.path.name
        return Choice(str(resolved.path.absolute()), clean_line(file), quant=quant_label(file) or None)
    name = resolved.name
    if resolved.kind == "hub" and resolved.repo and "@" in resolved.asked and "@" not in name:
        name = f"{name}@{resolved.revision}"
    return Choice(name, clean_line(resolved.name), resolved.revision or None, resolved.quant or None)


def announce(env: Env, resolved: Resolved, made: Plan | None) -> None:
    """Say what a name resolved to and what would be downloaded."""
    lines = list(resolved.lines)
    if line := fit_line(made):
        lines.insert(2, f"  {line}")
    for line in lines:
        env.console.paragraph(f"  {clean_line(line)}" if line.startswith("  ") else clean_line(line))


def agree(env: Env, resolved: Resolved, *, asked_for: bool) -> None:
    """Say what would be downloaded, and ask. The starter model, which nobody named, is only announced."""
    console = env.console
    announce(env, resolved, foreseen(env, env.config, resolved))
    if not asked_for or env.options.yes:
        return
    asked = clean_line(resolved.asked)
    command = f"localllm pull {asked}"
    if not console.can_ask:
        raise ModelNotFound(
            f"{asked} is not on this machine", f"{command} -y", fixes=((f"{command} -y", "download it"),)
        )
    if not console.confirm("Download now?"):
        raise ModelNotFound(f"{asked} was not downloaded", command)
