"""Saved benches of this machine, for the planner: a measured model is marked so, and its pace corrects the others'.

`localllm bench` writes them below the data folder; what another machine measured, or cannot be read, is passed over.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm import paths
from localllm.plan.planner import Plan, bytes_s_of

if TYPE_CHECKING:
    from localllm.device import MachineFacts
    from localllm.models.architectures.facts import ModelFacts

MAX_FILES = 200
MAX_FILE_BYTES = 1 << 20
MAX_TPS = 1e6
_DECODE = re.compile(r"tg\d+")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One bench: what was measured, where, and how fast it decoded for one person."""

    model: tuple[str, int, str, int]
    """architecture, parameters, stored format, stored bytes"""
    device: str
    """cpu, or the GPU's name"""
    tps: float
    bytes_s: float
    """weights read per second"""
    file: str = ""


class Benches:
    """Measurements of one machine, newest first. A `plan.Calibration`."""

    def __init__(self, measured: Iterable[Measurement] = ()) -> None:
        self.measured = tuple(measured)

    def bytes_s(self, facts: ModelFacts, device: str) -> float | None:
        """Weights read per second: the median of models stored alike, else of all."""
        there = [m for m in self.measured if m.device == device and m.bytes_s]
        alike = [m.bytes_s for m in there if m.model[2] == facts.stored_format] or [m.bytes_s for m in there]
        return statistics.median(alike) if alike else None

    def tps(self, facts: ModelFacts, device: str) -> float | None:
        """Tokens per second of this very model, as the newest bench has it."""
        wanted = model_key(facts)
        return next((m.tps for m in self.measured if m.device == device and m.model == wanted), None)

    def __bool__(self) -> bool:
        return bool(self.measured)


def model_key(facts: ModelFacts) -> tuple[str, int, str, int]:
    """What makes two files the same model for a bench."""
    return facts.architecture, facts.num_params, facts.stored_format, facts.weight_bytes


def subject(facts: ModelFacts, made: Plan, machine: MachineFacts) -> dict[str, Any]:
    """What a bench writes down about what it measured, so that `load` finds it again."""
    architecture, params, stored_format, stored_bytes = model_key(facts)
    return {
        "architecture": architecture,
        "params": params,
        "format": stored_format,
        "stored_bytes": stored_bytes,
        "layers": facts.num_layers,
        "read_bytes": made.read_bytes,
        "kv": made.kv,
        "ctx": made.ctx,
        "device": _device(made, machine),
        "cpu": machine.cpu.name,
        "cores": machine.cpu.cores_usable,
    }


def load(machine: MachineFacts, folder: Path | None = None) -> Benches:
    """The benches saved on this machine."""
    place = folder or paths.data_dir() / "bench"
    try:
        files = sorted((f for f in place.glob("*.json") if f.is_file()), key=lambda f: f.stat().st_mtime, reverse=True)
    except OSError:
        return Benches()
    found = (_read(file, machine) for file in files[:MAX_FILES])
    return Benches(one for one in found if one)


def _device(made: Plan, machine: MachineFacts) -> str:
    return "cpu" if made.device == "cpu" else machine.gpus[int(made.device.removeprefix("cuda:"))].name


def _read(file: Path, machine: MachineFacts) -> Measurement | None:
    try:
        saved = paths.read_json(file, MAX_FILE_BYTES)
        return _measurement(saved["subject"], saved["rows"], machine, file.name)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _measurement(
    what: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], machine: MachineFacts, file: str
) -> Measurement | None:
    device = str(what["device"])
    here = (what["cpu"], what["cores"]) == (machine.cpu.name, machine.cpu.cores_usable)
    if not (here if device == "cpu" else device in {gpu.name for gpu in machine.gpus}):
        return None
    tps = next((float(row["tps"]) for row in rows if _DECODE.fullmatch(str(row["test"]))), 0.0)
    if not 0 < tps < MAX_TPS:
        return None
    model = (str(what["architecture"]), int(what["params"]), str(what["format"]), int(what["stored_bytes"]))
    reached = bytes_s_of(tps, int(what["read_bytes"]), int(what["layers"]), device)
    return Measurement(model, device, tps, reached, file)
