"""Checks of this machine, returned as data for the `doctor` command. Quick checks take under 2 s and load no torch.

A check is a function from a `Survey` to one `interface.Check`. Every warning and failure has a `fix`: a command or a
step to take. There is one module per group. Check ids are stable, because people use them in scripts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, get_args

from localllm._version import __version__
from localllm.errors import ConfigError, LocalLLMError, did_you_mean, nearest
from localllm.interface import Check
from localllm.terminal import counted

from . import gpu, hardware, settings, software, storage, terminal
from .finding import CheckFunction, Status, Survey, fail
from .repair import kind_of

if TYPE_CHECKING:
    from .advice import Advice
    from .rules import Match

__all__ = ["CHECKS", "GROUP_OF", "Survey", "document", "run_checks", "running", "summary", "verdict", "wanted"]

log = logging.getLogger(__name__)

_TABLES = (gpu.CHECKS, hardware.CHECKS, software.CHECKS, settings.CHECKS, storage.CHECKS, terminal.CHECKS)
# all quick checks by id, in display order
CHECKS: dict[str, CheckFunction] = {check_id: run for table in _TABLES for check_id, run in table.items()}
# id -> hardware, software, storage, terminal
GROUP_OF: dict[str, str] = {check_id: table.group for table in _TABLES for check_id in table}


def run_checks(only: Collection[str] = (), survey: Survey | None = None) -> list[Check]:
    """Run all quick checks, or those named by id (`gpu.mem`) or by the prefix of a group (`gpu`).

    Raises ConfigError for an unknown name. A check that raises counts as failed, and its traceback is logged.
    """
    return list(running(wanted(only), survey or Survey()))


def running(ids: Iterable[str], survey: Survey) -> Iterator[Check]:
    """Run checks one by one, yielding each result as soon as it is known."""
    for check_id in ids:
        start = time.perf_counter()
        try:
            found = CHECKS[check_id](survey)
        except LocalLLMError as error:
            found = fail(error.message, fix=error.hint)
        except Exception as error:
            log.exception("check %s crashed", check_id)
            found = fail(f"this check crashed: {type(error).__name__}", fix="localllm doctor -vv")
        yield replace(found, id=check_id, group=GROUP_OF[check_id], ms=(time.perf_counter() - start) * 1000)


# measurements that --deep adds, where the hardware has them
MEASURED = (
    "bw.ram",
    "disk.read",
    "gemm.cpu",
    "bw.vram",
    "gemm.tflops",
    "bw.h2d",
    "p2p.copy",
    "ranks.link",
    "kernel.selftest",
)


def wanted(only: Collection[str] = ()) -> list[str]:
    """Expand names of checks and groups to check ids; all ids without names. Raises ConfigError for an unknown name."""
    for name in only:
        if name in MEASURED:
            raise ConfigError(f"{name} is a measurement, which needs --deep", f"localllm doctor --deep --only {name}")
        if name not in CHECKS and not any(check_id.startswith(f"{name}.") for check_id in CHECKS):
            meant = did_you_mean(nearest(name, CHECKS))
            raise ConfigError(f"unknown check {name!r}{meant}", "localllm doctor --list")
    groups = tuple(f"{name}." for name in only if name not in CHECKS)
    return [i for i in CHECKS if not only or i in only or i.startswith(groups)]


def summary(checks: Iterable[Check]) -> dict[str, int]:
    """Number of checks by status."""
    found = [check.status for check in checks]
    return {status: found.count(status) for status in get_args(Status)}


def verdict(checks: Iterable[Check]) -> str:
    """The summary line of all checks."""
    counts = summary(checks)
    problems = f"{counted(counts['warn'], 'warning')}, {counted(counts['fail'], 'failure')}"
    return f"{counted(sum(counts.values()), 'check')}: {counts['ok']} ok, {problems}, {counts['skip']} skipped"


def document(
    checks: Iterable[Check], survey: Survey, matches: Iterable[Match] = (), advised: Iterable[Advice] = ()
) -> dict[str, Any]:
    """The JSON document of `doctor --json`, schema localllm.doctor/1."""
    checks = list(checks)
    return {
        "schema": "localllm.doctor/1",
        "version": __version__,
        "checks": [_as_json(check) for check in checks],
        "summary": summary(checks),
        "rules": [{"id": m.rule.id, "title": m.rule.title, "confidence": m.rule.confidence} for m in matches],
        "advice": [asdict(one) for one in advised],
        "machine": asdict(survey.machine),
        "host": asdict(survey.host),
    }


def _as_json(check: Check) -> dict[str, Any]:
    kind = kind_of(check.fix) if check.fix else "step"
    fix = {
        "cmd": check.fix,
        "needs_root": check.fix.startswith("sudo "),
        "safe": kind in ("setting", "command", "shell"),
    }
    return asdict(check) | {"fix": fix if check.fix else None, "data": dict(check.data), "ms": round(check.ms, 1)}
