"""How `localllm doctor` looks: findings as they come, known problems, advice, flags for other engines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from localllm.cli.frame.console import Console, picked, wrapped
from localllm.doctor import MEASURED
from localllm.interface import Check
from localllm.terminal import clean, clean_line, counted

if TYPE_CHECKING:
    from localllm.doctor.advice import Advice
    from localllm.doctor.engines import Launch, Piece
    from localllm.doctor.repair import Action
    from localllm.doctor.rules import Match

MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("–", "dim")}
ALWAYS_SHOWN = ("gpu.present",)  # skipped checks shown even without -v: a missing GPU is worth a line
MIN_WIDTH, MAX_WIDTH = 30, 118
FIX_LINES = 4


class Findings:
    """Findings under the headings of their groups, shown as they come."""

    def __init__(self, console: Console, width: int) -> None:
        self._console = console
        self._width = width
        self._group = ""

    def add(self, check: Check) -> None:
        """Show a finding; skipped ones only with -v."""
        console = self._console
        if check.status == "skip" and not console.verbose and check.id not in ALWAYS_SHOWN:
            return
        group = "measured" if check.id in MEASURED else check.group
        if group != self._group:
            self._group = group
            console.heading(group.capitalize())
        mark, color = MARKS[check.status]
        head = f"  {console.style(mark, color)} {check.id.ljust(self._width)}  "
        text = clean_line(check.title) + (f"; {clean_line(check.detail)}" if check.detail else "")
        block(console, head, 6 + self._width, text)
        if check.fix:
            label = console.style("fix:", "dim")
            block(console, f"{' ' * (6 + self._width)}{label} ", 11 + self._width, clean_line(check.fix), wrap=False)


def block(console: Console, head: str, indent: int, text: str, wrap: bool = True) -> None:
    """Print text after a head of `indent` cells, wrapped to the terminal; commands are never wrapped."""
    columns = room(console)
    below = columns - indent < MIN_WIDTH  # too narrow for two columns: put the text below its head
    if below and wrap:
        indent = min(indent, 4)
    lines = wrapped(text, max(20, columns - indent))
    if not wrap or not lines:
        lines = [text]
    if below and not wrap:
        head = f"    {head.lstrip()}"
    if below and wrap and head.strip():
        console.line(head.rstrip())
        lines = ["", *lines]
    else:
        console.line(head + lines[0])
    for line in lines[1:]:
        console.line(" " * indent + line)


def room(console: Console) -> int:
    """Columns to fill. Off a terminal a finding stays on one line, so grep finds all of it."""
    if not console.out_tty and "COLUMNS" not in os.environ:
        return 10_000
    return min(MAX_WIDTH, shutil.get_terminal_size().columns - 1)


def ending(console: Console, found: Sequence[Check], known: Sequence[Match], advised: Sequence[Advice]) -> None:
    """Print known problems of installed software, advice, and the verdict."""
    from localllm.doctor import verdict

    _matches(console, "Known problems of the installed software", known)
    if advised:
        console.heading("Advice for this machine")
        width = max(len(one.id) for one in advised)
        for one in advised:
            block(console, f"    {one.id.ljust(width)}  ", width + 6, clean_line(one.text))
            if one.cmd:
                console.line(f"{' ' * (width + 6)}{clean_line(one.cmd)}")
    took = sum(check.ms for check in found) / 1000
    shown = f" · {took:.1f} s" if console.out_tty else ""
    console.line(f"{verdict(found)}{shown}")
    if console.out_tty and not console.quiet and not any(check.id == "bw.ram" for check in found):
        console.paragraph("--deep measures bandwidth, disk and kernels; -v shows what was skipped")


def diagnosis(console: Console, found: Sequence[Match], lines: int) -> None:
    """Explain the errors found in a log."""
    if not found:
        console.say(f"no known problem in {counted(lines, 'line')}")
        console.line("No known problem matches. Look at the first error in the log: it says more than the last.")
        return
    here = [match for match in found if match.applies]
    other = [match for match in found if not match.applies]
    for match in here:
        _match(console, match, fixes=99)
    _matches(console, "Known problems that do not apply to this machine", other, fixes=2 if here else 99)


def _matches(console: Console, title: str, found: Sequence[Match], fixes: int = FIX_LINES) -> None:
    if found:
        console.heading(title)
    for match in found:
        _match(console, match, fixes)


def _match(console: Console, match: Match, fixes: int) -> None:
    from localllm.doctor.rules import CONFIDENCE, url_of

    rule, fixes = match.rule, 99 if console.verbose else fixes
    console.line(f"  {console.style(rule.id, 'accent')} {console.style(rule.title, 'bold')}")
    if match.excerpt:
        block(console, f"     {console.style(f'line {match.line}:', 'dim')} ", 14, match.excerpt)
    block(console, "     ", 5, f"cause: {rule.cause}")
    if rule.versions:
        block(console, "     ", 5, f"seen:  {rule.versions}")
    for fix in rule.fixes[:fixes]:
        who = f"{fix.engine}: " if fix.engine else ""
        doubt = console.style("not confirmed: ", "yellow") if fix.unconfirmed else ""
        console.line(f"     {console.style('try', 'dim')}  {doubt}{who}{clean_line(fix.do)}")
        block(console, "          ", 10, fix.why)
    if len(rule.fixes) > fixes:
        console.line(f"     {len(rule.fixes) - fixes} more with -v")
    sources = ", ".join(url_of(s) if console.verbose else s for s in rule.sources[: 99 if console.verbose else 3])
    block(console, "     ", 5, f"{console.style(rule.confidence, 'dim')}: {CONFIDENCE[rule.confidence]} ({sources})")


def match_json(match: Match) -> dict[str, Any]:
    """A match as JSON."""
    fixes = [picked(fix, "do why root") | {"engine": fix.engine or None, "confirmed": not fix.unconfirmed}
             for fix in match.rule.fixes]  # fmt: skip
    fields = picked(match.rule, "id title cause versions confidence sources") | picked(match, "applies doubts")
    return fields | {"line": match.line or None, "excerpt": match.excerpt or None, "fixes": fixes}


def launch(console: Console, found: Launch, known: Sequence[Match]) -> None:
    """Print the command, its reasons, what may go wrong, and what is not confirmed."""
    head = f"{found.title} on {found.device}"
    console.heading(clean_line(head))
    console.line(f"  {clean_line(found.model.name)}: {found.model.words} (from {found.model.known_from})")
    if found.recipe:
        console.line(f"  a recipe for this model and GPU, {found.recipe.date}, {found.title} {found.version}")
        console.line(f"  {clean_line(found.recipe.source)}")
    else:
        console.line(f"  for {found.title} {found.version}; no recipe for this model and GPU")
    for note in (*([found.room.why] if found.room else ()), *found.notes):
        block(console, "  ", 2, clean_line(note))
    console.line()
    for line in [*(piece.text for piece in found.build), *found.lines]:
        console.line(f"  {clean(line)}")
    if found.file:
        console.line(f"  {console.style('cfg.yml:', 'dim')}")
        for line in found.file.splitlines():
            console.line(f"    {line}")
    console.line()
    reasons = {
        "Why": (*found.build, *found.env, *found.flags),
        "Not confirmed, and left out of the command": found.unconfirmed,
    }
    for title, pieces in reasons.items():
        if pieces or title == "Why":
            console.heading(title)
        for reason, alike in groupby(pieces, key=lambda p: (p.why, p.confidence, p.source)):
            for piece in alike:
                console.line(f"  {clean_line(piece.text)}")
            why, grade, source = reason
            block(console, "      ", 6, f"{why} [{grade}{f', {source}' if source else ''}]")
    if found.heard:
        console.heading("Often heard")
        for one in found.heard:
            block(console, "  ", 2, f"“{one.claim}”")
            block(console, "    ", 4, f"{one.truth} ({one.source})")
    if found.rules:
        console.heading("If something goes wrong")
        for rule, first in found.first_aid:
            block(console, f"  {rule.id.ljust(3)} ", 6, f"{rule.title}: {clean_line(first)}")
        console.line("  localllm doctor --log FILE explains an error")
    mine = [m for m in known if found.engine in (names := whose(m)) or not names]
    _matches(console, "Installed here", mine)


def whose(match: Match) -> set[str]:
    """The engines that a rule is about; empty for all of them."""
    return set(match.rule.engines) or {fix.engine for fix in match.rule.fixes if fix.engine}


def launch_json(found: Launch) -> dict[str, Any]:
    """The launch advice as JSON."""

    def pieces(listed: Iterable[Piece]) -> list[dict[str, Any]]:
        return [picked(piece, "text why confidence") | {"source": piece.source or None} for piece in listed]

    return picked(found, "engine device command") | {
        "engine_version": found.version,
        "model": picked(found.model, "name kind format method hybrid mtp known_from"),
        "recipe": picked(found.recipe, "model card gpus version date source") if found.recipe else None,
        "memory": picked(found.room, "have_bytes need_bytes ctx in_ram") if found.room else None,
        "notes": list(found.notes),
        "shell": found.lines,
        **{name: pieces(getattr(found, name)) for name in ("env", "flags", "build", "unconfirmed")},
        "file": found.file or None,
        "heard": [picked(heard, "claim truth source") for heard in found.heard],
        "rules": [picked(rule, "id title") for rule in found.rules],
    }


_KINDS = {
    "setting": "Changes to the settings file",
    "command": "Commands to run here",
    "root": "Commands that need root",
    "shell": "Commands for your own shell",
    "step": "Steps to do by hand",
}


def actions(console: Console, found: Sequence[Action], diff: Sequence[str]) -> None:
    """Print the fixes that are available."""
    if not found:
        console.line("Nothing to repair.")
        return
    for kind, title in _KINDS.items():
        listed = [one for one in found if one.kind == kind]
        if listed:
            console.heading(title)
        for one in listed:
            block(console, f"  {one.check_id}: ", len(one.check_id) + 4, clean_line(one.title))
            console.line(f"      {clean_line(one.command)}")
    for line in diff:
        color = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
        console.line("  " + console.style(clean(line), color))
