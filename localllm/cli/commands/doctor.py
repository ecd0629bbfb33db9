"""This machine: Check hardware, software and settings"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from localllm.cli import doctor_view
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import picked
from localllm.cli.frame.options import MaybeModel
from localllm.config import UserConfig
from localllm.doctor.advice import Advice, advice
from localllm.doctor.rules import MAX_LOG_BYTES, match_log, match_machine
from localllm.errors import ConfigError
from localllm.interface import Check
from localllm.terminal import clean_line

if TYPE_CHECKING:
    from localllm.doctor import Survey

FAILED = 11


def _engines() -> list[str]:
    """Completions for `--for`."""
    from localllm.doctor.engines import engine_names

    return engine_names()


def _checks() -> list[str]:
    """Completions for `--only`: groups of checks, then the checks."""
    from localllm.doctor import CHECKS

    return [*dict.fromkeys(name.partition(".")[0] for name in CHECKS), *CHECKS]


@command(
    "localllm doctor",
    "localllm doctor --deep",
    "localllm doctor qwen",
    "localllm doctor --log server.log",
    "localllm doctor --for vllm nvidia/Qwen3.6-27B-NVFP4",
    "localllm doctor --report > report.md",
    "localllm doctor --apply --dry-run",
    "localllm doctor --kernels sm_120",
)
def doctor(
    env: Env,
    model: MaybeModel = None,
    deep: Annotated[bool, Option("--deep", help="Also measure bandwidth, kernels and disk; 20 s or more.")] = False,
    log: Annotated[str | None, Option(metavar="FILE|-", help="Explain an error or log of any engine.")] = None,
    engine: Annotated[
        str | None,
        Option(
            "--for",
            metavar="ENGINE",
            help="Flags for vllm, sglang, tensorrt-llm or llama.cpp.",
            autocompletion=lambda incomplete: [name for name in _engines() if name.startswith(incomplete)],
        ),
    ] = None,
    report: Annotated[bool, Option("--report", help="Write Markdown for an issue, without names or secrets.")] = False,
    apply: Annotated[bool, Option("--apply", help="Offer to run each fix, asking first.")] = False,
    dry_run: Annotated[bool, Option("-n", "--dry-run", help="With --apply: only show the fixes.")] = False,
    only: Annotated[
        str | None,
        Option(
            metavar="ID,...",
            help="Only these checks or groups of checks.",
            autocompletion=lambda incomplete: [name for name in _checks() if name.startswith(incomplete)],
        ),
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Fail on warnings as well.")] = False,
    kernels: Annotated[
        bool, Option("--kernels", help="Kernels by op, for this GPU or a named one (sm_75 ... sm_121, cpu).")
    ] = False,
    listing: Annotated[bool, Option("--list", help="List the checks.")] = False,
) -> int:
    """Check hardware, software and settings; every finding comes with a fix. With a model, check that model instead.

    Exits 0 even with warnings, 11 on a failure. Without --deep it takes under two seconds and does not load torch.
    """
    from localllm import doctor as checks

    if kernels:
        return _kernels(env, model)
    wishes = {"--log": log, "--for": engine, "--report": report, "--apply": apply, "--list": listing}
    wished = [name for name, value in wishes.items() if value]
    if len(wished) > 1:
        value = wishes[wished[0]]
        alone = wished[0] if value is True else f"{wished[0]} {clean_line(shlex.quote(str(value)))}"
        raise ConfigError(f"{' and '.join(wished)} cannot be combined", f"localllm doctor {alone}")
    if dry_run and not apply:
        raise ConfigError("--dry-run needs --apply", "localllm doctor --apply --dry-run")
    if report and env.console.as_json:
        raise ConfigError("--report writes Markdown, --json writes JSON: choose one", "localllm doctor --report")
    if listing:
        env.console.emit("checks/1", {"checks": [{"id": i, "group": checks.GROUP_OF[i]} for i in checks.CHECKS]})
        env.console.line("\n".join(checks.CHECKS))
        return 0
    named = [name for name in (only or "").split(",") if name]
    measured = [n for n in named if deep and n in checks.MEASURED]
    rest = [n for n in named if n not in measured]
    ids = checks.wanted(rest) if rest or not named else []
    survey = checks.Survey(settings=env.options.config, offline=bool(env.options.offline))
    if engine is not None:
        return _for(env, engine, model, survey)
    if log is not None:
        return _log(env, log, survey)
    if apply:
        return _apply(env, checks.running(ids, survey), survey, dry_run)
    quick = _model_checks(env, model, survey) if model else checks.running(ids, survey)
    coming = chain(quick, _deep(env, survey, measured) if deep else ())
    found: list[Check] = []
    if report:
        from localllm.doctor.markdown import report_markdown

        found += coming
        env.console.answer(report_markdown(found, survey, match_machine(survey)))
    elif env.console.as_json:
        found += coming
        env.console.write_json(checks.document(found, survey, match_machine(survey), _advice(env, survey)))
    else:
        width = max(len(name) for name in (*ids, *(measured or checks.MEASURED if deep else ())))
        shown = doctor_view.Findings(env.console, width)
        for check in coming:
            found.append(check)
            shown.add(check)
        whole = not only and not model
        doctor_view.ending(
            env.console, found, match_machine(survey) if whole else [], _advice(env, survey) if whole else []
        )
    counts = checks.summary(found)
    return FAILED if counts["fail"] or (strict and counts["warn"]) else 0


def _advice(env: Env, survey: Survey) -> list[Advice]:
    """Advise by the defaults when the settings cannot be read: `config.valid` reports that, and no finding is lost."""
    try:
        config = env.config
    except ConfigError:
        config = UserConfig()
    return advice(survey, config)


def _model_checks(env: Env, name: str, survey: Survey) -> Iterator[Check]:
    from localllm.doctor.model import model_checks, resolve_quietly
    from localllm.plan.planner import Planner

    planner = Planner.here(env.config.engine, survey.machine)
    target = env.config.aliases.get(name, name)
    return model_checks(resolve_quietly(target, planner, env.config), planner)


def _deep(env: Env, survey: Survey, only: list[str]) -> Iterator[Check]:
    """Measure, naming each measurement as it starts. Ctrl+C ends the run and keeps the results so far."""
    from localllm.doctor.probes import deep_checks, probes

    console = env.console
    total, done = len(probes(survey, only)), 0

    def tell(what: str) -> None:
        nonlocal done
        done += 1
        console.say(f"measuring {done}/{total}: {what}")

    yield from deep_checks(survey, tell, only)


def _kernels(env: Env, card: str | None) -> int:
    from localllm.device import machine
    from localllm.doctor.kernel_table import rows_of, wanted_capability

    console = env.console
    capability = wanted_capability(card, machine())
    rows = rows_of(capability, lambda done, of: console.say(f"compiling {done + 1}/{of}") if done < of else None)
    if console.emit("kernels/1", {"capability": capability, "kernels": rows}):
        return 0
    if capability == 0:
        console.table(("OP", "KERNEL", "WHY NOT ANOTHER"), [(r["op"], r["impl"], r["reason"]) for r in rows])
        return 0
    columns = ("OP", "KERNEL", "SHARED", "REGISTERS", "SPILLS", "MATRIX", "")
    numbers = ("shared_bytes", "registers", "spill_bytes")
    cells = [(r["op"], r["impl"], *(f"{r[n]:,}" for n in numbers), r["mma"], r["reason"]) for r in rows]
    console.table(columns, cells, right=columns[2:5])
    missing = sum(bool(row["reason"]) for row in rows)
    console.say(f"sm_{capability}: {len(rows)} kernels{f', {missing} of them unavailable' if missing else ''}")
    return 0


def _log(env: Env, source: str, survey: Survey) -> int:
    text = read_log(source)
    found = match_log(text, survey)
    if not env.console.emit("diagnosis/1", {"source": source, "matches": list(map(doctor_view.match_json, found))}):
        doctor_view.diagnosis(env.console, found, len(text.splitlines()))
    return 0 if found else FAILED


def read_log(source: str) -> str:
    """Read an error message or log from a file, or from stdin for "-", without terminal escapes and redrawn lines.

    Raises ConfigError when it cannot be read or is empty.
    """
    if source == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError(
                "--log - reads from stdin, but it is a terminal", "vllm serve 2>&1 | localllm doctor --log -"
            )
        data = sys.stdin.buffer.read()
    else:
        try:
            with Path(source).expanduser().open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - MAX_LOG_BYTES))
                data = file.read()
        except OSError as error:
            raise ConfigError(
                f"--log: {source} cannot be read: {error.strerror}", "pass a log file, or - for stdin"
            ) from None
    text = data[-MAX_LOG_BYTES:].decode(errors="replace")
    text = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)", "", text)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise ConfigError("--log: the text is empty", "localllm doctor --log server.log")
    return text


def _for(env: Env, engine: str, model: str | None, survey: Survey) -> int:
    from localllm.doctor.engines import launch

    found = launch(engine, env.config.aliases.get(model, model) if model else None, survey)
    env.console.emit("launch/1", doctor_view.launch_json(found))
    doctor_view.launch(env.console, found, match_machine(survey))
    return 0


def _apply(env: Env, checks: Iterable[Check], survey: Survey, dry_run: bool) -> int:
    from localllm.doctor import repair

    console = env.console
    found = repair.actions(checks, survey)
    settings = [one for one in found if one.kind == "setting"]
    diff = repair.settings_diff(settings, env.options.config) if settings else []
    done = []
    doctor_view.actions(console, found, diff)
    if settings and not dry_run and console.confirm("Change the settings file?", default=False):
        repair.apply_settings(settings, env.options.config)
        done += [{"check": one.check_id, "command": one.command, "code": 0} for one in settings]
    for one in found:
        if one.kind not in ("command", "root") or dry_run:
            continue
        if one.kind == "root" and env.options.yes and os.geteuid():
            console.say(f"skipped because it needs root: {one.command}")
            continue
        if not console.confirm(f"Run `{one.command}`?", default=False):
            continue
        code = repair.run(one)
        done.append({"check": one.check_id, "command": one.command, "code": code})
        console.say(f"{one.command}: {'done' if code == 0 else f'exited with code {code}'}")
    listed = [picked(one, "title command kind") | {"check": one.check_id} for one in found]
    console.emit("repair/1", {"dry_run": dry_run, "actions": listed, "diff": diff, "done": done})
    return FAILED if any(one["code"] for one in done) else 0
