"""Machine conditions of rules and flags, written in TOML as `capability = [120, 121]`, `gpus = 2`, ...

A table holds if all of its keys hold; an empty table always holds.

    capability       pairs [from, to, from, to, ...] of compute capabilities, inclusive: any GPU is within a pair
    capability_missing  true: there is no GPU
    card             a regular expression on a GPU's name
    memory_gib       [from, below]: GPU memory of the largest GPU
    gpus             minimum number of GPUs
    unified          CPU and GPU share memory
    wsl, display     running inside WSL; a display is attached to a GPU
    iommu            an IOMMU is on
    package          any of these is installed: "vllm", "vllm<0.9"
    without          none of these is installed
    program          any of these is on PATH
    torch_cuda, driver_cuda, toolkit, ptxas     versions: "<12.9"; an unknown version does not match
    variable         a variable is set: "NAME" or "NAME=regular expression"; NAME may be a regular expression as well
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
    """The keys of a table that do not hold on this machine. Raises KeyError for an unknown key."""
    return [key for key, value in table.items() if not _TESTS[key](value, survey)]


def holds(table: Mapping[str, Any], survey: Survey) -> bool:
    """True if all of a table's keys hold on this machine."""
    return not unmet(table, survey)


def within(pairs: list[int], capability: int) -> bool:
    """True if a compute capability lies in one of the pairs [from, to, from, to, ...]."""
    return any(low <= capability <= high for low, high in zip(pairs[::2], pairs[1::2], strict=True))


def matches(version: str, wanted: str) -> bool:
    """True if a version satisfies a specifier; "" satisfies none."""
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
KEYS = frozenset(_TESTS)  # all known keys
