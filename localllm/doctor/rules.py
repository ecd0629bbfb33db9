"""Matches known problems (rules.toml) against this machine, and against an error message or log.

Without a log, only rules whose `here` table holds on this machine match. With one, every rule whose patterns are found
matches; rules that can happen on this machine come first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.paths import toml_beside
from localllm.terminal import clean_line, fit

from .conditions import holds, unmet
from .finding import Survey

MAX_LOG_BYTES = 4 << 20  # only the end of a longer log is read, because the failure is there
EXCERPT_CELLS = 160
CONFIDENCE = {
    "A": "confirmed by a maintainer or a merged change",
    "B": "several reporters, or a measured report",
    "C": "one source",
}


@dataclass(frozen=True, slots=True)
class Fix:
    """One fix of a rule."""

    do: str  # a command, a flag, or a step
    why: str
    engine: str = ""  # the engine that has the flag; "" for any
    root: bool = False
    unconfirmed: bool = False  # no code or report was found to back it


@dataclass(frozen=True, slots=True)
class Rule:
    """One known problem: an entry of rules.toml, which explains the fields."""

    id: str
    title: str
    patterns: Sequence[str]
    cause: str
    confidence: str
    sources: Sequence[str]
    fixes: Sequence[Fix]
    versions: str = ""
    near: Sequence[tuple[str, str, int]] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    here: Mapping[str, Any] | None = None
    unless: Sequence[str] = ()
    engines: Sequence[str] = ()  # the engines it concerns; if empty, those of its fixes

    @property
    def rank(self) -> tuple[bool, int]:
        """Sort key in file order: general rules (G1, ...) come after specific ones (R1, ...)."""
        return self.id[0] != "R", int(self.id[1:])


@dataclass(frozen=True, slots=True)
class Match:
    """A rule that matched."""

    rule: Rule
    applies: bool  # it can happen on this machine; the log may come from another one
    line: int = 0  # line of the log, counted from 1; 0 without a log
    excerpt: str = ""  # that line, without control characters
    count: int = 0  # number of its patterns found
    doubts: tuple[str, ...] = ()  # conditions that do not hold on this machine


@functools.cache
def rules() -> tuple[Rule, ...]:
    """All rules, in file order."""
    entries = toml_beside(__file__, "rules.toml")["rule"]
    fixes = [sorted((Fix(**fix) for fix in entry["fixes"]), key=lambda fix: fix.unconfirmed) for entry in entries]
    return tuple(Rule(**entry | {"fixes": own}) for entry, own in zip(entries, fixes, strict=True))


def match_machine(survey: Survey) -> list[Match]:
    """Known problems of the software installed on this machine."""
    return [
        Match(rule, True)
        for rule in rules()
        if rule.here is not None and holds(rule.when, survey) and holds(rule.here, survey)
    ]


def match_log(text: str, survey: Survey) -> list[Match]:
    """The rules whose patterns are found in a text, those that can happen on this machine and are best backed first."""
    found = [match for rule in rules() if (match := _match(rule, text, survey))]
    said = {match.rule.id for match in found if match.applies}
    found = [match for match in found if not said.intersection(match.rule.unless)]
    return sorted(found, key=lambda m: (not m.applies, m.rule.rank[0], -m.count, m.rule.confidence, m.rule.rank))


def _match(rule: Rule, text: str, survey: Survey) -> Match | None:
    hits = [hit.start() for pattern in rule.patterns if (hit := re.search(pattern, text, re.IGNORECASE))]
    hits += [at for pair in rule.near if (at := _near(*pair, text)) is not None]
    if not hits:
        return None
    first = min(hits)
    start = text.rfind("\n", 0, first) + 1
    end = text.find("\n", first)
    line = text[start : end if end >= 0 else len(text)]
    doubts = tuple(unmet(rule.when, survey))
    number = text.count("\n", 0, first) + 1
    return Match(rule, not doubts, number, fit(clean_line(line), EXCERPT_CELLS), len(hits), doubts)


def _near(one: str, other: str, reach: int, text: str) -> int | None:
    """Position of the first `other` within `reach` characters after a `one`, else None; a single pass over both."""
    ends = [hit.end() for hit in re.finditer(one, text, re.IGNORECASE)]
    at = 0
    for hit in re.finditer(other, text, re.IGNORECASE) if ends else ():
        while at + 1 < len(ends) and ends[at + 1] <= hit.start():
            at += 1
        if ends[at] <= hit.start() <= ends[at] + reach:
            return hit.start()
    return None


def url_of(source: str) -> str:
    """The address of a source such as owner/repo#12; other sources are returned unchanged."""
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", source)
    return f"https://github.com/{found[1]}/issues/{found[2]}" if found else source
