"""Checks of this machine as data: `run_checks` takes under two seconds and loads no torch; the command prints them.

A check is a function from the machine's facts to one `request.Check`. Every warning and failure carries a command in
`fix`. One module per group; ids are stable, because people put them into scripts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from typing import Any

from localllm._version import __version__
from localllm.device import MachineFacts, machine
from localllm.errors import ConfigError, LocalLLMError
from localllm.request import Check

from . import hardware, settings, software, storage, terminal
from .finding import CheckFunction

__all__ = ["CHECKS", "report", "run_checks", "summary", "verdict"]

log = logging.getLogger(__name__)

CHECKS: dict[str, CheckFunction] = {
    **hardware.CHECKS,
    **software.CHECKS,
    **settings.CHECKS,
    **storage.CHECKS,
    **terminal.CHECKS,
}
"""All quick checks by id, in the order they are shown."""


def run_checks(only: Collection[str] = (), facts: MachineFacts | None = None) -> list[Check]:
    """Run the quick checks, or those named by id, or by the part before the dot where that is no id (`gpu`).

    Raises ConfigError for a name that is no check. A check that breaks is a failed check, and its traceback is logged.
    """
    facts = facts or machine()
    return [_run(check_id, facts) for check_id in _wanted(only)]


def summary(checks: Iterable[Check]) -> dict[str, int]:
    """How many of each status."""
    counts = {"ok": 0, "warn": 0, "fail": 0, "skip": 0}
    for check in checks:
        counts[check.status] += 1
    return counts


def verdict(checks: Iterable[Check]) -> str:
    """One sentence about all of them."""
    counts = summary(checks)
    words = [
        f"{counts['ok']} ok",
        _count(counts["warn"], "warning"),
        _count(counts["fail"], "failure"),
        f"{counts['skip']} skipped",
    ]
    return f"{sum(counts.values())} checks: {', '.join(words)}"


def report(checks: Iterable[Check], facts: MachineFacts) -> dict[str, Any]:
    """The JSON document of `doctor --json`, schema localllm.doctor/1."""
    checks = list(checks)
    return {
        "schema": "localllm.doctor/1",
        "version": __version__,
        "checks": [_as_json(check) for check in checks],
        "summary": summary(checks),
        "advice": [],
        "machine": asdict(facts),
    }


def _as_json(check: Check) -> dict[str, Any]:
    needs_root = check.fix.startswith("sudo ")
    fix = {"cmd": check.fix, "needs_root": needs_root, "safe": not needs_root} if check.fix else None
    return asdict(check) | {"fix": fix, "data": dict(check.data), "ms": round(check.ms, 1)}


def _wanted(only: Collection[str]) -> list[str]:
    for name in only:
        if name not in CHECKS and not any(check_id.startswith(f"{name}.") for check_id in CHECKS):
            raise ConfigError(f"there is no check {name!r}", "localllm doctor --list")
    groups = tuple(f"{name}." for name in only if name not in CHECKS)
    return [i for i in CHECKS if not only or i in only or i.startswith(groups)]


def _run(check_id: str, facts: MachineFacts) -> Check:
    start = time.perf_counter()
    group = check_id.split(".")[0]
    try:
        found = CHECKS[check_id](facts)
    except LocalLLMError as error:
        found = Check(check_id, group, "fail", error.message, fix=error.hint)
    except Exception as error:
        log.exception("check %s broke", check_id)
        found = Check(check_id, group, "fail", f"this check broke: {type(error).__name__}", fix="localllm doctor -vv")
    return replace(found, ms=(time.perf_counter() - start) * 1000)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
