"""What memory profiles of earlier starts have shown on this machine (no torch: the planner asks before it loads).

A profile holds for a model, a device with its driver, the versions of torch and ours, and the numbers of the plan. What
a plan took too much is remembered for the model and the device alone: the next plan counts it in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm import paths
from localllm._version import __version__
from localllm.terminal import GIB, gib

if TYPE_CHECKING:
    from localllm.device import MachineFacts
    from localllm.models.architectures.facts import ModelFacts
    from localllm.plan.plan import Plan

MAX_ENTRIES = 200
"""the oldest go first"""


class MemoryProfiles:
    """The file of profiles; one that cannot be read or written costs a repetition."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or paths.cache_dir() / "memory_profiles.json"
        self._entries: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
            entries = json.loads(self._file.read_text())["entries"]
            self._entries = {str(key): dict(value) for key, value in entries.items()}

    def excess_bytes(self, facts: ModelFacts, machine: MachineFacts, device: str) -> int:
        """What plans of this model took too much there; 0 when nothing is known."""
        found = self._entries.get(_key("excess", _model(facts), _place(machine, device)), {}).get("bytes", 0)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0

    def known(self, facts: ModelFacts, machine: MachineFacts, plan: Plan) -> Mapping[str, Any] | None:
        """What a profile of just this plan has shown."""
        return self._entries.get(_plan_key(facts, machine, plan))

    def keep(self, facts: ModelFacts, machine: MachineFacts, plan: Plan, shown: Mapping[str, Any]) -> None:
        """Remember a profile; `shown` has "held" and "text", and "excess_bytes" of one that did not hold."""
        if not shown["held"]:
            key = _key("excess", _model(facts), _place(machine, plan.device))
            before = self.excess_bytes(facts, machine, plan.device)
            self._put(key, {"bytes": before + int(shown["excess_bytes"])})
        self._put(_plan_key(facts, machine, plan), dict(shown))
        text = json.dumps({"entries": dict(list(self._entries.items())[-MAX_ENTRIES:])}, indent=1)
        with contextlib.suppress(OSError):
            paths.replace_file(self._file, text)

    def _put(self, key: str, value: dict[str, Any]) -> None:
        self._entries.pop(key, None)
        self._entries[key] = value


def words(shown: Mapping[str, Any]) -> str:
    """A profile in one line: what was taken, beside the plan or as the share above it."""
    terms = [pair for pair in shown.get("terms", {}).values() if isinstance(pair, list) and len(pair) == 2]
    planned, taken, text = sum(pair[0] for pair in terms), sum(pair[1] for pair in terms), str(shown.get("text", ""))
    if not planned or not text.endswith(" planned"):  # memory ran out before the end
        return text
    verdict, said = ("profiled" if shown["held"] else "the plan did not hold"), f"{planned / GIB:.2f}"
    if f"{taken / GIB:.2f}" == said or taken < planned:
        return f"{verdict}: {gib(taken, 2)} of {said} planned"
    return f"{verdict}: {gib(taken, 2)}, {100 * (taken / planned - 1):.1f} % above the {said} planned"


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _model(facts: ModelFacts) -> tuple[object, ...]:
    return (facts.architecture, facts.name, facts.num_params, facts.weight_bytes, facts.stored_format)


def _place(machine: MachineFacts, device: str) -> tuple[object, ...]:
    number = device.removeprefix("cuda:")
    card = machine.gpus[int(number)] if device != "cpu" and number.isdigit() else None
    where = (card.name, card.total_bytes, machine.driver) if card is not None else (machine.cpu.name,)
    return (*where, machine.torch_version, machine.torch_cuda, __version__)


def _plan_key(facts: ModelFacts, machine: MachineFacts, plan: Plan) -> str:
    numbers = (plan.dtype, plan.kv, plan.quant, plan.ctx, plan.num_pages, plan.page_size, plan.max_parallel)
    return _key("profile", _model(facts), _place(machine, plan.device), numbers, plan.prefill_budget, plan.need_bytes)
