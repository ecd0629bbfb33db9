"""Launch commands for other engines on this machine: command, flags and variables, each with a reason.

A recipe for exactly this model and GPU (recipes.toml) is used unchanged; otherwise the flags come from engines.toml.
Models that do not fit, or that the engine cannot read, are rejected. Nothing is run.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from localllm.device import GpuFacts
from localllm.errors import ConfigError, DeviceError, DoesNotFit, UnsupportedFormat, nearest
from localllm.hub import catalog
from localllm.paths import toml_beside
from localllm.terminal import gib

from .conditions import holds, matches
from .finding import Survey, sm
from .model_kind import ModelKind, asked_for, from_catalog
from .room import Room, best_of, reads, room_of
from .rules import Rule, rules

PARSERS = (
    "parses this model's reasoning and tool calls; without it, reasoning ends up in the answer and tool calls fail"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A command that its authors ran, for a model on a GPU with a version of an engine."""

    engine: str
    model: str  # a regular expression on the whole name
    card: str  # a regular expression on the GPU's name
    version: str
    date: str
    source: str
    flags: Sequence[str]
    env: str = ""
    note: str = ""
    gpus: int = 1

    def made_for(self, engine: str, model: str, survey: Survey) -> bool:
        """True if the recipe is for this model on this machine's GPUs."""
        cards = survey.machine.gpus
        there = len(cards) == self.gpus and all(re.search(self.card, gpu.name, re.IGNORECASE) for gpu in cards)
        return there and engine == self.engine and bool(re.fullmatch(self.model, model, re.IGNORECASE))


@dataclass(frozen=True, slots=True)
class Piece:
    """A flag or variable of a command, and its reason."""

    text: str  # as typed: a flag with its value, or NAME=value pairs
    why: str
    confidence: str
    source: str = ""
    unconfirmed: bool = False


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag or variable of another engine: an entry of flags.toml, which explains the fields."""

    engine: str
    name: str
    file: str
    since: str = ""
    until: str = ""
    seen: str = ""
    before: str = ""
    gone: bool = False
    now: str = ""
    change: str = ""


NAMES = re.compile(r"(?<![\w.-])(--?[a-zA-Z][\w-]*)|\b([A-Z][A-Z0-9]*_[A-Z0-9_]+)(?==)")


@functools.cache
def flag_table() -> dict[tuple[str, str], Flag]:
    """Known flags and variables by engine and name."""
    rows = (Flag(**row) for row in toml_beside(__file__, "flags.toml")["flag"])
    return {(row.engine, row.name): row for row in rows}


def names_in(text: str) -> list[str]:
    """The flags and variables in a command, ignoring JSON values."""
    return [flag or variable for flag, variable in NAMES.findall(re.sub(r"'\{.*?\}'", "", text))]


@dataclass(frozen=True, slots=True)
class Heard:
    """Common advice that is outdated or unfounded."""

    claim: str
    truth: str
    source: str
    engines: Sequence[str]
    when: Mapping[str, Any] = field(default_factory=dict)  # conditions on the machine


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch command for an engine, with its reasons."""

    engine: str
    title: str
    version: str
    model: ModelKind
    device: str  # the target machine, in words
    command: str
    env: tuple[Piece, ...]
    flags: tuple[Piece, ...]
    file: str  # contents of cfg.yml, if a flag refers to it
    build: tuple[Piece, ...]
    unconfirmed: tuple[Piece, ...]
    heard: tuple[Heard, ...]
    rules: tuple[Rule, ...]  # known problems that can happen on this machine
    recipe: Recipe | None = None
    room: Room | None = None  # None if the model's size is not known
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The shell lines: variables, then the command with one flag per line."""
        command = " \\\n  ".join([self.command, *(piece.text for piece in self.flags)])
        return [*(f"export {piece.text}" for piece in self.env), *command.split("\n")]

    @property
    def first_aid(self) -> list[tuple[Rule, str]]:
        """The first fix to try for each rule; rules whose fixes are all in the command are left out."""
        found = []
        for rule in self.rules:
            own = (fix.do for fix in rule.fixes if fix.engine in ("", self.engine) and not fix.unconfirmed)
            if first := next((do for do in own if not self._has(do)), ""):
                found.append((rule, first))
        return found

    def _has(self, do: str) -> bool:
        """True if the command already has these flags or variables, with the same value or a lower number."""
        text = f"{' '.join(self.lines)} "
        for part in re.split(r" (?=--)", do):
            flag, _, value = part.rpartition(" ")
            number = re.search(rf"{re.escape(flag)} ([\d.]+) ", text) if re.fullmatch(r"[\d.]+", value) else None
            if f"{part} " not in text and not (number and float(number[1]) <= float(value)):
                return False
        return True


def engine_names() -> list[str]:
    """The names of all supported engines."""
    return [engine["name"] for engine in _data()["engine"]]


def launch(engine: str, model: ModelKind | str | None, survey: Survey) -> Launch:
    """The best known command to start `engine` on this machine, for a model or its name; None picks a suitable model.

    Raises ConfigError for an unknown engine, DeviceError if it cannot run here, ModelNotFound for a name without files
    for this engine, UnsupportedFormat for a checkpoint it cannot read, and DoesNotFit.
    """
    found = _engine(engine, survey)
    name = found["name"]
    best = max(survey.machine.gpus, key=lambda gpu: gpu.total_bytes, default=None)
    asked = _model(found, model, survey)
    recipe = next((one for one in recipes() if one.made_for(name, asked.name, survey)), None)
    room = (
        None
        if not asked.size_bytes
        else _recipe_room(found, asked, survey)
        if recipe
        else room_of(found, asked, survey)
    )
    values = _values(asked, room, survey)
    heard = [Heard(**entry) for entry in _data()["heard"]]
    chosen = _chosen(name, asked, survey)
    sure = [entry for entry in chosen if not entry.get("unconfirmed")]
    doubtful = [entry for entry in chosen if entry.get("unconfirmed")]
    command = found["local"] if Path(asked.name).expanduser().exists() and "local" in found else found["command"]
    env, flags = _pieces(sure, "env", values), _pieces(sure, "flags", values)
    parser: Mapping[str, str] = next(
        (p for p in _data()["parser"] if re.search(p["name"], asked.name, re.IGNORECASE)), {}
    )
    if recipe:
        why = f"from the recipe of {recipe.date} for {found['title']} {recipe.version}"
        own = (Piece(recipe.env, why, "A", recipe.source),) if recipe.env else ()
        env = (*own, *(piece for piece in env if piece.text.split("=")[0] not in recipe.env))
        flags = tuple(Piece(text, why, "A", recipe.source) for text in recipe.flags)
    elif parser.get(name):
        flags = (*flags, Piece(parser[name], PARSERS, "B"))
    return Launch(
        engine=name,
        title=found["title"],
        version=recipe.version if recipe else found["version"],
        model=asked,
        device=_device(survey, best),
        command=command.replace("{model}", shlex.quote(asked.name)),
        env=env,
        flags=flags,
        file="" if recipe else next((entry["file"] for entry in sure if "file" in entry), ""),
        build=_pieces(sure, "build", values),
        unconfirmed=(*_pieces(doubtful, "env", values), *_pieces(doubtful, "flags", values)),
        heard=tuple(one for one in heard if name in one.engines and holds(one.when, survey)),
        rules=tuple(r for r in rules() if r.id in found["rules"] and holds(r.when, survey)),
        recipe=recipe,
        room=room,
        notes=tuple(_notes(found, asked, recipe, room, survey, [piece.text for piece in (*env, *flags)])),
    )


def _engine(engine: str, survey: Survey) -> dict[str, Any]:
    """The entry of engines.toml for an engine that can run here."""
    engines = {name: one for one in _data()["engine"] for name in (one["name"], *one.get("aliases", ()))}
    found = engines.get(engine.casefold())
    if found is None:
        near = nearest(engine.casefold(), engines)
        meant = engines[near]["name"] if near else "vllm"
        known = f"did you mean {meant}?" if near else f"supported: {', '.join(engine_names())}"
        raise ConfigError(f"unknown engine {engine!r}; {known}", f"localllm doctor --for {meant}")
    best = max(survey.machine.gpus, key=lambda gpu: gpu.total_bytes, default=None)
    if found["least"] and (best is None or best.capability < found["least"]):
        has = f"{best.name} has {best.capability / 10:.1f}" if best else "this machine has no NVIDIA GPU"
        need = f"compute capability {found['least'] / 10:.1f} or newer"
        raise DeviceError(f"{found['title']} needs {need}, but {has}", "localllm doctor --for llama.cpp")
    return dict(found)


def _model(engine: Mapping[str, Any], model: ModelKind | str | None, survey: Survey) -> ModelKind:
    """The model that the user means, checked to be one that the engine can read."""
    gguf = engine["name"] == "llama.cpp"
    capability = max((gpu.capability for gpu in survey.machine.gpus), default=0)

    def suited(pool: Sequence[catalog.Candidate]) -> ModelKind | None:
        graphs = [one for one in recipes() if "--enforce-eager" not in one.flags]  # eager mode is slow
        tried = [c.spec for c in pool if any(one.made_for(engine["name"], c.spec, survey) for one in graphs)]
        kinds = [kind for c in pool if reads(engine, kind := from_catalog(c), capability)]
        smallest = min(kinds, key=lambda kind: kind.size_bytes, default=None)
        return best_of(pool, engine, survey, tried) or smallest

    if model is None:
        pool = [c for c in catalog.members("qwen") if bool(c.quant) is gguf]
        return best_of(pool, engine, survey) and suited(pool) or ModelKind("MODEL", "dense", "bf16", method="none")
    asked = asked_for(model, gguf, suited) if isinstance(model, str) else model
    if not reads(engine, asked, capability):
        kind = f"{asked.method} checkpoints in {asked.format.upper()}" if asked.method != "gguf" else "GGUF files"
        other = "llama.cpp" if asked.method == "gguf" else "vllm"
        raise UnsupportedFormat(
            f"{engine['title']} cannot read {kind} on this GPU: {asked.name}",
            f"localllm doctor --for {other if other != engine['name'] else 'llama.cpp'} {asked.name}",
        )
    return asked


def _recipe_room(engine: Mapping[str, Any], model: ModelKind, survey: Survey) -> Room | None:
    """The estimate for a recipe; None if it says that the model does not fit, because its authors did run it."""
    try:
        return room_of(engine, model, survey)
    except DoesNotFit:
        return None


def _values(model: ModelKind, room: Room | None, survey: Survey) -> dict[str, str]:
    """Values for the placeholders in flags and reasons."""
    context = min(model.context or 32_768, 32_768) if room is None else room.ctx
    why = "a starting point, because the model's size is not known" if room is None else room.why
    if room and context == model.context:
        why = f"the model's maximum; {room.why}"
    return {
        "{tp}": str(len(survey.machine.gpus)), "{cores}": str(survey.machine.cpu.cores_usable), "{ctx}": str(context),
        "{ctxwhy}": why, "{share}": f"{room.share if room else 0.7:g}",
    }  # fmt: skip


def _notes(
    engine: Mapping[str, Any],
    model: ModelKind,
    recipe: Recipe | None,
    room: Room | None,
    survey: Survey,
    texts: Sequence[str],
) -> list[str]:
    """Notes to show with the command."""
    notes = [recipe.note] if recipe and recipe.note else []
    installed = survey.host.packages.get(engine["name"], "")
    if recipe and installed and not matches(installed, recipe.version):
        notes.append(f"{engine['title']} {installed} is installed, but the recipe needs {recipe.version}")
    for name in (name for text in texts for name in names_in(text)):
        row = flag_table().get((engine["name"], name))
        if row and row.since and installed and not matches(installed, f">={row.since}"):
            older = f", which calls it {row.before}" if row.before else ""
            notes.append(f"{name} needs {engine['title']} {row.since}, but {installed} is installed{older}")
    checked = engine.get("checked", "")
    if checked and installed and matches(installed, f">{checked}"):
        notes.append(
            f"the flags were checked against {engine['title']} {checked}; the installed {installed} may differ"
        )
    if room and room.in_ram:
        notes.append(f"{gib(room.in_ram, 1)} of the weights stay in RAM and run at the speed of the CPU")
    if engine["name"] == "vllm" and "gpt-oss" in model.name and any(g.capability == 121 for g in survey.machine.gpus):
        notes.append("on GB10, vLLM's MXFP4 kernels hung or took 118 GB (R33); llama.cpp runs MXFP4 natively")
    if room is None and not recipe:
        notes.append("the model's size is not known, so it may not fit")
    return notes


@functools.cache
def recipes() -> tuple[Recipe, ...]:
    """All recipes, in the order of the file."""
    return tuple(Recipe(**row) for row in toml_beside(__file__, "recipes.toml")["recipe"])


def _chosen(engine: str, model: ModelKind, survey: Survey) -> list[Mapping[str, Any]]:
    """The flag entries whose conditions hold, only the first one per slot."""
    chosen: list[Mapping[str, Any]] = []
    for entry in _data()["flag"]:
        taken = "slot" in entry and any(entry["slot"] == one.get("slot") for one in chosen)
        if entry["engine"] != engine or taken:
            continue
        if holds(entry.get("when", {}), survey) and suits(entry.get("model", {}), model):
            chosen.append(entry)
    return chosen


def suits(table: Mapping[str, Any], model: ModelKind) -> bool:
    """True if a model meets a table's conditions. Raises KeyError for an unknown key."""
    has = asdict(model)
    return all(
        re.search(wanted, model.name, re.IGNORECASE) if key == "name" else has[key] in wanted
        for key, wanted in table.items()
    )


def _pieces(entries: list[Mapping[str, Any]], key: str, values: Mapping[str, str]) -> tuple[Piece, ...]:
    found = []
    for entry in (entry for entry in entries if key in entry):
        text, why = entry[key], entry["why"]
        for name, value in values.items():
            text, why = text.replace(name, value), why.replace(name, value)
        more = {name: entry[name] for name in ("confidence", "source", "unconfirmed") if name in entry}
        found.append(Piece(text, why, **more))
    return tuple(found)


def _device(survey: Survey, best: GpuFacts | None) -> str:
    machine = survey.machine
    if best is None:
        return f"{machine.cpu.name}, {machine.cpu.cores_usable} cores, no GPU"
    count = f"{len(machine.gpus)} × " if len(machine.gpus) > 1 else ""
    return f"{count}{best.name}, {sm(best.capability)}, {gib(best.free_bytes, 1)} free"


@functools.cache
def _data() -> dict[str, Any]:
    return toml_beside(__file__, "engines.toml")
