"""Conditions of rules and flags on a machine, as they stand in TOML: `capability = [120, 121]`, `gpus = 2`, ...

A table holds when all of its keys do. An empty table holds everywhere.

    capability       pairs of compute capabilities, from and to: [86, 89, 120, 121]; any card within a pair
    capability_missing  whether there is no card at all
    card             a regular expression on the card's name
    memory_gib       pair: video memory of the largest card, from and up to
    gpus             at least so many cards
    unified          whether CPU and GPU share their memory
    wsl, display     whether inside WSL; whether a display is attached to a card
    iommu            whether one is on
    package          any of these is installed: "vllm", "vllm<0.9"
    without          none of these is installed
    program          any of these is on PATH
    torch_cuda, driver_cuda, toolkit, ptxas     versions: "<12.9"; one that is not known does not match
    variable         a variable is set: "NAME", or "NAME=regular expression"; NAME may be an expression too
    variable_missing a variable is not set
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from packaging.specifiers import SpecifierSet

from localllm.device.host import version_key
from localllm.terminal import GIB

from .finding import Survey


def unmet(table: Mapping[str, Any], survey: Survey) -> list[str]:
    """The keys of a table that do not hold here. Raises KeyError for an unknown key."""
    return [key for key, value in table.items() if not _TESTS[key](value, survey)]


def holds(table: Mapping[str, Any], survey: Survey) -> bool:
    """Whether all of a table's keys hold here."""
    return not unmet(table, survey)


def within(pairs: list[int], capability: int) -> bool:
    """Whether a compute capability lies in one of the pairs [from, to, from, to, ...]."""
    return any(low <= capability <= high for low, high in zip(pairs[::2], pairs[1::2], strict=True))


def matches(version: str, wanted: str) -> bool:
    """Whether a version is in a specifier; "" is in none."""
    return bool(version_key(version)) and SpecifierSet(wanted).contains(version.split("+")[0], prereleases=True)


def _package(wanted: list[str], survey: Survey) -> bool:
    for text in wanted:
        name, specifier = re.fullmatch(r"([\w.-]+?)([<>=!~].*)?", text).groups()  # type: ignore[union-attr]
        has = survey.host.packages.get(name)
        if has and (not specifier or matches(has, specifier)):
            return True
    return False


def _memory(pair: list[float], survey: Survey) -> bool:
    largest = max((gpu.total_bytes for gpu in survey.machine.gpus), default=0) / GIB
    return pair[0] <= largest < pair[1]


def _variable(wanted: str, survey: Survey) -> bool:
    name, _, value = wanted.partition("=")
    return any(
        re.fullmatch(name, has) and (not value or re.search(value, text)) for has, text in survey.host.variables.items()
    )


_TESTS: dict[str, Callable[[Any, Survey], bool]] = {
    "capability": lambda pairs, s: any(within(pairs, gpu.capability) for gpu in s.machine.gpus),
    "capability_missing": lambda wanted, s: (not s.machine.gpus) is wanted,
    "card": lambda pattern, s: any(re.search(pattern, gpu.name, re.IGNORECASE) for gpu in s.machine.gpus),
    "memory_gib": _memory,
    "gpus": lambda least, s: len(s.machine.gpus) >= least,
    "unified": lambda wanted, s: any(gpu.unified for gpu in s.machine.gpus) is wanted,
    "wsl": lambda wanted, s: bool(s.machine.wsl) is wanted,
    "display": lambda wanted, s: any(gpu.display for gpu in s.machine.gpus) is wanted,
    "iommu": lambda wanted, s: s.host.iommu is wanted,
    "package": _package,
    "without": lambda names, s: not _package(names, s),
    "program": lambda names, s: any(name in s.host.programs for name in names),
    "torch_cuda": lambda wanted, s: matches(s.machine.torch_cuda, wanted),
    "driver_cuda": lambda wanted, s: matches(s.machine.driver_cuda, wanted),
    "toolkit": lambda wanted, s: matches(s.host.toolkit, wanted),
    "ptxas": lambda wanted, s: matches(s.host.ptxas, wanted),
    "variable": _variable,
    "variable_missing": lambda name, s: name not in s.host.variables,
}
KEYS = frozenset(_TESTS)  # all keys there are
