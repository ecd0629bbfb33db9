"""How a check says what it found."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any, Literal

from localllm.device import MachineFacts
from localllm.request import Check

CheckFunction = Callable[[MachineFacts], Check]
Status = Literal["ok", "warn", "fail", "skip"]
GIB = 1 << 30
MIB = 1 << 20

HARDWARE, SOFTWARE, STORAGE, TERMINAL = "hardware", "software", "storage", "terminal"


def found(check_id: str, group: str, status: Status, title: str, detail: str = "", fix: str = "", **data: Any) -> Check:
    """A finding; `fix` is a command that can be pasted."""
    return Check(check_id, group, status, title, detail, fix, data)


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / MIB:.0f} MiB"


def install(apt: str, dnf: str = "", pacman: str = "") -> str:
    """The command that installs a system package here: names per package manager, the first one found counts."""
    root = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("apt-get"):
        return f"{root}apt-get install -y {apt}"
    if shutil.which("dnf"):
        return f"{root}dnf install -y {dnf or apt}"
    if shutil.which("pacman"):
        return f"{root}pacman -S --noconfirm {pacman or dnf or apt}"
    return f"{root}apt-get install -y {apt}"
