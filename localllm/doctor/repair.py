"""`doctor --apply`: applies the fixes that can be automated (settings, packages), one at a time, after confirmation.

Fixes for the user's own shell (`export`, `unset`) and manual steps are only shown.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Literal, get_args

from localllm.config import settings_file
from localllm.interface import Check

from .finding import Survey

Kind = Literal["setting", "command", "root", "shell", "step"]
# How to apply a fix that starts with one of these, in the order of application. All other fixes are manual steps.
BEGINNINGS: dict[Kind, tuple[str, ...]] = {
    "setting": ("localllm config set ",),
    "command": ("pip install ",),
    "root": (
        "sudo apt-get install ", "sudo dnf install ", "sudo pacman -S ", "sudo nvidia-smi -i ", "sudo cpupower ",
        "sudo rmmod nvidia_uvm ", "apt-get install ", "dnf install ", "pacman -S ",
    ),
    "shell": ("export ", "unset ", "ulimit ", "echo ", "hf auth ", "localllm "),
}  # fmt: skip
COMMAND_S = 1800


@dataclass(frozen=True, slots=True)
class Action:
    """One fix."""

    check_id: str
    title: str  # the problem
    command: str
    # setting and command can be run; root needs sudo; shell is for the user's own shell; step is manual
    kind: Kind


def actions(checks: Iterable[Check], survey: Survey) -> list[Action]:
    """The fixes for all warnings and failures, those that can be run first."""
    found = [Action(c.id, c.title, c.fix, kind_of(c.fix)) for c in checks if c.fix and c.status in ("warn", "fail")]
    if any(one.check_id == "compiler" and one.kind == "root" for one in found) and not survey.machine.compiler:
        found.insert(0, Action("compiler", "no C compiler", "pip install ziglang", "command"))
    return sorted(found, key=lambda one: get_args(Kind).index(one.kind))


def kind_of(fix: str) -> Kind:
    """How a fix can be applied."""
    return next((kind for kind, beginnings in BEGINNINGS.items() if fix.startswith(beginnings)), "step")


def settings_diff(chosen: Iterable[Action], file: Path | None = None) -> list[str]:
    """The change to the settings file as a unified diff. Nothing is written."""
    import tempfile

    place = file or settings_file()
    before = place.read_text(encoding="utf-8") if place.is_file() else ""
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / "config.toml"
        trial.write_text(before, encoding="utf-8")
        apply_settings(chosen, trial)
        after = trial.read_text(encoding="utf-8")
    return list(unified_diff(before.splitlines(), after.splitlines(), str(place), str(place), lineterm=""))


def apply_settings(chosen: Iterable[Action], file: Path | None = None) -> None:
    """Write the settings. Raises ConfigError as `config set` does."""
    from localllm.config import set_key

    for one in chosen:
        _, _, _, key, value = shlex.split(one.command)
        set_key(key, value, file)


def run(action: Action) -> int:
    """Run a command of kind "command" or "root" with its output on stderr. Returns its exit code, 124 on timeout."""
    code = 0
    for part in action.command.split(" && "):
        words = shlex.split(part)
        if words[0] == "pip":
            words = [sys.executable, "-m", *words]
        try:
            code = subprocess.run(words, stdout=sys.stderr, timeout=COMMAND_S, check=False).returncode
        except FileNotFoundError:
            code = 127
        except subprocess.TimeoutExpired:
            code = 124
        if code:
            break
    return code
