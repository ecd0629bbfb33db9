"""Memory profiles saved by earlier starts on this machine (without torch: the planner reads them before it loads).

A profile is keyed by the model, the device and its driver, the versions of torch and localllm, and the plan's numbers.
A plan's excess is keyed by the model and the device only, and every later plan adds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from localllm import paths
from localllm._version import __version__
from localllm.device import MachineFacts
from localllm.models.architectures.facts import ModelFacts
from localllm.plan.plan import Plan
from localllm.terminal import gib

MAX_ENTRIES = 200  # the oldest are dropped first
MAX_FILE_BYTES = 4 << 20
MAX_BYTES = 1 << 50  # no machine has more memory: larger numbers come from a damaged file


TOLERANCE = {"cpu": 0.10, "cuda": 0.03}  # fraction by which the measured memory may exceed a plan that still holds


class Term(NamedTuple):
    """One term of the plan, planned and measured."""

    name: str
    planned_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Relative error of the plan; positive if more memory was used than planned."""
        return (self.measured_bytes - self.planned_bytes) / max(self.planned_bytes, 1)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory measured while running a plan's worst-case steps.

    kind      cpu | cuda
    failure   the step that ran out of memory, or ""
    rank      the rank that exceeded its plan the most; None for a single process
    """

    terms: tuple[Term, ...]
    kind: str
    seconds: float
    failure: str = ""
    rank: int | None = None

    @property
    def total(self) -> Term:
        return Term("all", sum(term.planned_bytes for term in self.terms), sum(t.measured_bytes for t in self.terms))

    @property
    def held(self) -> bool:
        """True if the measured memory stayed within the plan."""
        return not self.failure and self.total.error <= TOLERANCE[self.kind]

    @property
    def excess_bytes(self) -> int:
        """Bytes that the next plan has to add."""
        _, planned, taken = self.total
        return max(0, taken - planned, planned // 10 if self.failure else 0)

    def __str__(self) -> str:
        _, planned, taken = self.total
        verdict = "profiled" if self.held else "the plan did not hold"
        verdict += "" if self.rank is None else f", rank {self.rank}" if self.held else f" on rank {self.rank}"
        if self.failure:
            return f"{verdict}: {self.failure}"
        said = gib(planned, 2).removesuffix(" GiB")
        if taken < planned or gib(taken, 2) == gib(planned, 2):
            return f"{verdict}: {gib(taken, 2)} of {said} planned"
        return f"{verdict}: {gib(taken, 2)}, {100 * self.total.error:.1f} % above the {said} planned"


def farthest(profiles: Iterable[MemoryProfile]) -> MemoryProfile:
    """The decisive profile of several ranks: the largest shortfall, else the smallest headroom."""
    return max(profiles, key=lambda one: (not one.held, one.total.measured_bytes - one.total.planned_bytes))


def of_ranks(facts: ModelFacts, world: int, split: str) -> ModelFacts:
    """Facts that identify a divided model: equal for the whole model and for every rank's part."""
    name = f"{facts.name} {facts.hidden_size} in {world} by {split}"
    return replace(facts, name=name, num_params=0, weight_bytes=0)


class MemoryProfiles:
    """The file of saved profiles. If it cannot be read or written, the profile just runs again."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or paths.cache_dir() / "memory_profiles.json"
        entries = paths.read_json(self._file, MAX_FILE_BYTES).get("entries")
        self._entries: dict[str, Any] = entries if isinstance(entries, dict) else {}

    def excess_bytes(self, facts: ModelFacts, machine: MachineFacts, device: str) -> int:
        """Bytes by which earlier plans of this model fell short on this device; 0 when not known."""
        found = self._entries.get(_key("excess", facts, machine, device))
        return found if isinstance(found, int) and 0 < found < MAX_BYTES else 0

    def known(self, facts: ModelFacts, machine: MachineFacts, plan: Plan) -> MemoryProfile | None:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            found = dict(self._entries[_plan_key(facts, machine, plan)])
            terms = tuple(Term(*term) for term in found["terms"])
            is_sound = found["kind"] in TOLERANCE and all(abs(size) < MAX_BYTES for term in terms for size in term[1:])
            return MemoryProfile(**(found | {"terms": terms})) if is_sound else None
        return None

    def keep(self, facts: ModelFacts, machine: MachineFacts, plan: Plan, profile: MemoryProfile) -> None:
        """Save a profile, and the plan's excess if it did not hold."""
        new: dict[str, Any] = {_plan_key(facts, machine, plan): asdict(profile)}
        if not profile.held:
            before = self.excess_bytes(facts, machine, plan.device)
            new[_key("excess", facts, machine, plan.device)] = before + profile.excess_bytes
        kept = {key: value for key, value in self._entries.items() if key not in new} | new
        self._entries = dict(list(kept.items())[-MAX_ENTRIES:])
        text = json.dumps({"entries": self._entries}, indent=1)
        with contextlib.suppress(OSError):
            paths.replace_file(self._file, text)


def _key(what: str, facts: ModelFacts, machine: MachineFacts, device: str, *numbers: object) -> str:
    number = device.removeprefix("cuda:")
    card = machine.gpus[int(number)] if device != "cpu" and number.isdigit() else None
    total = 0 if card is None or card.unified else card.total_bytes  # unified: what is available now
    where = (card.name, total, machine.driver) if card is not None else (machine.cpu.name,)
    model = (facts.architecture, facts.name, facts.num_params, facts.weight_bytes, facts.stored_format)
    parts = (what, model, where, machine.torch_version, machine.torch_cuda, __version__, numbers)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _plan_key(facts: ModelFacts, machine: MachineFacts, plan: Plan) -> str:
    numbers = (plan.dtype, plan.kv, plan.quant, plan.ctx, plan.num_pages, plan.page_size, plan.max_parallel)
    return _key("profile", facts, machine, plan.device, numbers, plan.prefill_budget, plan.need_bytes)
