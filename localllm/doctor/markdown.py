"""`doctor --report`: the findings as Markdown for an issue report, without personal data."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections.abc import Iterable
from pathlib import Path

from localllm._version import __version__
from localllm.interface import Check
from localllm.paths import log_dir
from localllm.terminal import clean, clean_line

from .finding import Survey
from .rules import Match

SECRETS = re.compile(
    r"(hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|(?<=Bearer )\S+|(?<=://)[^/\s:@]+:[^/\s@]+(?=@))"
)
ADDRESSES = re.compile(r"\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}\b")
MARKS = {"ok": "ok", "warn": "**warning**", "fail": "**failure**", "skip": "–"}
CRASH_LINES = 40
LOG_BYTES = 1 << 20


def report_markdown(checks: Iterable[Check], survey: Survey, matches: Iterable[Match]) -> str:
    """The whole report, passed through `redact`."""
    machine, host = survey.machine, survey.host
    lines = [
        "# localllm doctor",
        "",
        f"localllm {__version__}, Python {host.python}, {machine.platform} {machine.arch}",
        "",
        "| check | | finding |",
        "| --- | --- | --- |",
    ]
    for check in checks:
        if check.status == "skip":
            continue
        text = check.title + (f" ({check.detail})" if check.detail else "") + (f" → `{check.fix}`" if check.fix else "")
        cell = clean_line(text.replace("|", "\\|"))
        lines.append(f"| `{check.id}` | {MARKS[check.status]} | {cell} |")
    lines += ["", "Packages: " + ", ".join(f"{name} {version}" for name, version in host.packages.items())]
    if host.variables:
        lines += ["", "Variables: " + ", ".join(f"`{n}={v}`" for n, v in sorted(host.variables.items()))]
    found = [f"* {m.rule.id} {m.rule.title}" for m in matches]
    if found:
        lines += ["", "Known problems:", "", *found]
    crash = last_crash()
    if crash:
        lines += ["", "Last crash in the log:", "", "```", *crash, "```"]
    return redact("\n".join(lines)) + "\n"


def last_crash(folder: Path | None = None) -> list[str]:
    """The last traceback in the log, with the line before it; at most `CRASH_LINES` lines."""
    try:
        with ((folder or log_dir()) / "localllm.log").open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    start = max((i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), default=-1)
    if start < 0:
        return []
    end = next((i for i in range(start + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
    taken = lines[max(0, start - 1) : end]
    return [
        clean(line) for line in (taken if len(taken) <= CRASH_LINES else [taken[0], "…", *taken[2 - CRASH_LINES :]])
    ]


def redact(text: str) -> str:
    """Remove secrets, the home folder, user and host names and network addresses from a text."""
    text = SECRETS.sub("[secret]", text)
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w-])", "~", text)
    text = re.sub(r"(?<![\w.-])/(home|Users)/[^/\s`'\"]+", "~", text)
    text = re.sub(r"(/(?:home|Users)/)[^/\s`'\"]+", r"\1[user]", text)  # elsewhere in a path: /net/home/ada
    host = (socket.gethostname() or platform.node()).split(".")[0]
    for name, instead in ((host, "[host]"), (_user(), "[user]")):
        if len(name) > 2:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return ADDRESSES.sub("[address]", text)


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        return ""
    return "" if name == "root" else name
