"""How another engine is started well on this machine: its command, flags and variables (engines.toml), with reasons.

Nothing is run. What nobody could confirm is told apart and comes last.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from localllm.device import GpuFacts
from localllm.errors import ConfigError, DeviceError
from localllm.paths import toml_beside
from localllm.terminal import gib

from .conditions import holds
from .finding import Survey, sm
from .model_kind import ModelKind, asked_for, suggested
from .rules import Rule, rules

# tokens per second that a model suggested for a CPU should reach: so many times its bytes are read in a second
CPU_TPS = 8
_CTX = re.compile(r"\{ctx:(\d+)\}")


@dataclass(frozen=True, slots=True)
class Piece:
    """One flag or variable, and why."""

    text: str  # as typed: a flag with its value, or NAME=value pairs
    why: str
    confidence: str
    source: str = ""
    unconfirmed: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """Advice that is out of date or that nothing backs."""

    claim: str
    truth: str
    source: str
    engines: Sequence[str]
    when: Mapping[str, Any] = field(default_factory=dict)  # a machine


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an engine."""

    engine: str
    title: str
    version: str
    model: ModelKind
    device: str  # what it is for, in words
    command: str
    env: tuple[Piece, ...]
    flags: tuple[Piece, ...]
    file: str  # contents of cfg.yml where a flag names it
    build: tuple[Piece, ...]
    unconfirmed: tuple[Piece, ...]
    heard: tuple[Heard, ...]
    rules: tuple[Rule, ...]  # what may go wrong here

    @property
    def lines(self) -> list[str]:
        """The shell lines: variables, then the command with a flag a line."""
        command = " \\\n  ".join([self.command, *(piece.text for piece in self.flags)])
        return [*(f"export {piece.text}" for piece in self.env), *command.split("\n")]


def engine_names() -> list[str]:
    """The engines there is advice for."""
    return [engine["name"] for engine in _data()["engine"]]


def launch(engine: str, model: ModelKind | str | None, survey: Survey) -> Launch:
    """The best known way to start `engine` here. Without a model, one that suits the card; a name as users give them.

    Raises ConfigError for an engine that is not known, DeviceError where it cannot run, ModelNotFound for a name that
    stands for nothing this engine reads.
    """
    engines = {name: one for one in _data()["engine"] for name in (one["name"], *one.get("aliases", ()))}
    found = engines.get(engine.casefold())
    if found is None:
        near = get_close_matches(engine.casefold(), engines, 1)
        meant = engines[near[0]]["name"] if near else "vllm"
        known = f"did you mean {meant}?" if near else f"there is some for {', '.join(engine_names())}"
        raise ConfigError(f"there is no advice for {engine!r}; {known}", f"localllm doctor --for {meant}")
    name = found["name"]
    gpus = survey.machine.gpus
    best = max(gpus, key=lambda gpu: gpu.total_bytes, default=None)
    if found["least"] and (best is None or best.capability < found["least"]):
        has = f"{best.name} has {best.capability / 10:.1f}" if best else "there is no NVIDIA GPU here"
        need = f"compute capability {found['least'] / 10:.1f} or newer"
        raise DeviceError(f"{found['title']} needs {need}: {has}", "localllm doctor --for llama.cpp")
    pace = int(survey.machine.cpu.bandwidth / CPU_TPS)
    room = best.free_bytes if best else min(survey.machine.ram_available_bytes, pace)
    capability = best.capability if best else 0
    gguf = name == "llama.cpp"
    if isinstance(model, str):
        model = asked_for(model, room, gguf, capability)
    asked = model or suggested(room, gguf, capability) or ModelKind("MODEL", "dense", "bf16")
    command = found["command"]
    if Path(asked.name).expanduser().exists():
        command = found.get("local", command)
    too_large = bool(gpus) and asked.size_bytes > 0.92 * room * len(gpus)
    chosen = _chosen(name, asked, too_large, survey)
    values = {"{tp}": str(len(gpus)), "{cores}": str(survey.machine.cpu.cores_usable)}
    heard = [Heard(**entry) for entry in _data()["heard"]]
    sure = [entry for entry in chosen if not entry.get("unconfirmed")]
    doubtful = [entry for entry in chosen if entry.get("unconfirmed")]
    return Launch(
        engine=name,
        title=found["title"],
        version=found["version"],
        model=asked,
        device=_device(survey, best),
        command=command.replace("{model}", shlex.quote(asked.name)),
        env=_pieces(sure, "env", values),
        flags=tuple(_within(piece, asked.context) for piece in _pieces(sure, "flags", values)),
        file=next((entry["file"] for entry in sure if "file" in entry), ""),
        build=_pieces(sure, "build", values),
        unconfirmed=(*_pieces(doubtful, "env", values), *_pieces(doubtful, "flags", values)),
        heard=tuple(one for one in heard if name in one.engines and holds(one.when, survey)),
        rules=tuple(r for r in rules() if r.id in found["rules"] and holds(r.when, survey)),
    )


def _chosen(engine: str, model: ModelKind, too_large: bool, survey: Survey) -> list[Mapping[str, Any]]:
    """The entries that hold; of each slot the first."""
    chosen: list[Mapping[str, Any]] = []
    for entry in _data()["flag"]:
        taken = "slot" in entry and any(entry["slot"] == one.get("slot") for one in chosen)
        if entry["engine"] != engine or taken:
            continue
        if holds(entry.get("when", {}), survey) and suits(entry.get("model", {}), model, too_large):
            chosen.append(entry)
    return chosen


def suits(table: Mapping[str, Any], model: ModelKind, too_large: bool = False) -> bool:
    """Whether a model is of the kind a table describes. Raises KeyError for an unknown key."""
    has = asdict(model) | {"too_large": too_large}
    return all(
        re.search(wanted, model.name, re.IGNORECASE) if key == "name" else has[key] in wanted
        for key, wanted in table.items()
    )


def _pieces(entries: list[Mapping[str, Any]], key: str, values: Mapping[str, str]) -> tuple[Piece, ...]:
    found = []
    for entry in (entry for entry in entries if key in entry):
        text = entry[key]
        for name, value in values.items():
            text = text.replace(name, value)
        more = {name: entry[name] for name in ("why", "confidence", "source", "unconfirmed") if name in entry}
        found.append(Piece(text, **more))
    return tuple(found)


def _within(piece: Piece, context: int) -> Piece:
    """`{ctx:N}` as N tokens, or as many as the model can have."""
    asked = _CTX.search(piece.text)
    if asked is None:
        return piece
    wanted = int(asked[1])
    tokens = min(wanted, context or wanted)
    piece = replace(piece, text=_CTX.sub(str(tokens), piece.text))
    if tokens == wanted:
        return piece
    return replace(piece, why=f"the model's own limit; {wanted} for one that can", confidence="A", source="")


def _device(survey: Survey, best: GpuFacts | None) -> str:
    machine = survey.machine
    if best is None:
        return f"{machine.cpu.name}, {machine.cpu.cores_usable} cores, no GPU"
    count = f"{len(machine.gpus)} × " if len(machine.gpus) > 1 else ""
    return f"{count}{best.name}, {sm(best.capability)}, {gib(best.free_bytes, 1)} free"


@functools.cache
def _data() -> dict[str, Any]:
    return toml_beside(__file__, "engines.toml")
