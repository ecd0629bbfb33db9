"""Registry of running localllm processes: each keeps a small file, readable only by its owner, while it runs.

`localllm ps`, `stop` and commands that reuse a running server instead of loading a model again read it.
"""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from localllm import paths
from localllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Running:
    """One running localllm process."""

    pid: int
    kind: str  # serve | chat
    url: str = ""  # http://… or unix:/path; "" if it cannot be reached
    models: tuple[str, ...] = ()
    started: float = 0.0  # seconds since the epoch
    token: str = ""  # gives its owner access without an API key, including management of a server's models
    # start time of the process in clock ticks since boot, which tells it from a later process with the same id
    birth: int = 0
    device: str = ""  # device of a chat's own engine
    ctx: int = 0
    bytes: int = 0  # bytes of weights and KV cache

    @property
    def name(self) -> str:
        """The name of its file, such as serve-8000 or chat-4711."""
        tail = self.url.rsplit(":", 1)[-1]
        return f"{self.kind}-{tail if tail.isdigit() else self.pid}"


class Record:
    """This process's own file."""

    def __init__(self, kind: str, url: str = "", token: str = "") -> None:
        pid = os.getpid()
        self.running = Running(pid, kind, url, (), time.time(), token, _birth(pid) or 0)
        self._path = _folder() / f"{self.running.name}.json"
        self._write()

    def update(self, models: tuple[str, ...], **more: str | int) -> None:
        """Update the list of models; `more` are other fields that changed."""
        told = replace(self.running, models=models, **more)  # type: ignore[arg-type]
        if told != self.running:
            self.running = told
            self._write()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        paths.replace_file(self._path, json.dumps(asdict(self.running)), mode=0o600)


def running() -> list[Running]:
    """All running localllm processes, oldest first. Removes files of processes that were killed."""
    found = []
    try:
        files = sorted(_folder().glob("*.json"))
    except (OSError, ConfigError):
        return []
    for file in files:
        one = _read(file)
        if one is None or _birth(one.pid) != one.birth:
            file.unlink(missing_ok=True)
        else:
            found.append(one)
    return sorted(found, key=lambda r: r.started)


def _read(file: Path) -> Running | None:
    try:
        value = paths.read_json(file)
        if type(value["pid"]) is not int or type(value["birth"]) is not int or not 0 <= value["started"] < 1e11:
            return None
        return Running(**{**value, "models": tuple(value["models"])})
    except (TypeError, KeyError):
        return None


def _folder() -> Path:
    """The folder of these files, accessible only to this user. Raises ConfigError if another user owns it."""
    folder = paths.runtime_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.stat()
    if facts.st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user", "set XDG_RUNTIME_DIR to a folder of your own")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def _birth(pid: int) -> int | None:
    """Start time of a process in clock ticks; None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
