"""From what a user typed to a model that may be started: found here, or its download agreed to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localllm.config import UserConfig
from localllm.errors import ModelNotFound
from localllm.terminal import clean_line, gib

from .command import Env
from .session import fake_engine


@dataclass(frozen=True)
class Choice:
    """A model that may be started."""

    name: str
    """what is handed to the backend"""
    shown: str
    """for people"""
    revision: str | None = None
    quant: str | None = None
    resolved: Any = None


def choose(env: Env, config: UserConfig, name: str | None) -> Choice:
    """The model to run. None: the one in the settings, the one used last, a local one, the starter.

    Raises ModelNotFound when it is not here and may not be fetched.
    """
    if fake_engine():
        return Choice(name or "fake", name or "fake", quant="Q4_1")
    from localllm import hub

    wanted = name or config.model or hub.default_model()
    resolved = hub.resolve(wanted, offline=env.offline, config=config)
    if resolved.path is None:
        agree(env, resolved, wanted, asked_for=bool(name or config.model))
    return Choice(wanted, clean_line(resolved.repo or resolved.name), resolved.revision, resolved.quant, resolved)


def agree(env: Env, resolved: Any, wanted: str, *, asked_for: bool) -> None:
    """Say what would be downloaded, and ask. The starter, which nobody asked for by name, is only announced."""
    console = env.console
    for line in describe(resolved):
        console.say(line)
    if not asked_for or env.options.yes:
        return
    if not env.interactive:
        command = f"localllm pull {clean_line(wanted)} -y"
        raise ModelNotFound(f"{clean_line(wanted)} is not on this machine", command, fixes=((command, "download it"),))
    if not console.confirm("Download now?"):
        raise ModelNotFound(f"{clean_line(wanted)} was not downloaded", f"localllm pull {clean_line(wanted)}")


def describe(resolved: Any) -> list[str]:
    """What is about to be fetched: the pick and why, size, licence."""
    lines = [clean_line(resolved.reason)] if resolved.reason else []
    size = f"download {gib(resolved.download_bytes)}" if resolved.download_bytes else "download"
    lines.append(f"  {size} · licence: {clean_line(resolved.licence or '') or 'not stated'}")
    return lines
