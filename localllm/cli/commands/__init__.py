"""The commands. `NAME.py` holds the command NAME; the first line of that file is its group and its summary in `--help`.

To add a command, add a file. `ORDER` sets the order in `--help`; commands it does not name come last.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ORDER = (
    "chat", "run", "logs", "serve", "ps", "stop", "batch", "connect", "pull", "ls", "catalog", "show", "rm", "quantize",
    "eval", "doctor", "plan", "bench", "tune", "config",
)  # fmt: skip
ALIASES = {"list": "ls", "fit": "plan"}


class Listed(NamedTuple):
    """A command as `--help` lists it."""

    name: str
    group: str
    summary: str


def _listed() -> tuple[Listed, ...]:
    """List every command without importing any of them."""
    found = []
    for path in Path(__file__).parent.glob("[a-z]*.py"):
        with path.open(encoding="utf-8") as file:
            group, _, summary = file.readline().strip().strip('"').partition(": ")
        found.append(Listed(path.stem, group, summary))
    ranks = {name: rank for rank, name in enumerate(ORDER)}
    return tuple(sorted(found, key=lambda one: (ranks.get(one.name, len(ranks)), one.name)))


COMMANDS = _listed()
