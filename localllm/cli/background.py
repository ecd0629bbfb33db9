"""The installed background service of this user, and how to start it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm import paths
from localllm.device.processes import Running, running

if TYPE_CHECKING:
    from subprocess import Popen

START_S = 40.0  # for a server to answer; it imports torch first
MAX_LOG_BYTES = 4 << 20


def service_file() -> Path:
    """Where the installed service is recorded."""
    return paths.state_dir() / "service.json"


@dataclass(frozen=True, slots=True)
class Service:
    """The installed service.

    kind   systemd | process
    pid    of the background process; 0 with systemd
    """

    kind: str
    port: int
    pid: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def server(self) -> Running | None:
        """Its process, while it runs."""
        return next((one for one in running() if one.kind == "serve" and one.url == self.url), None)


def log_file() -> Path:
    """The log of the background process; `.1` marks the previous one."""
    return paths.log_dir() / "service.log"


def cut_log(at_least: int = MAX_LOG_BYTES) -> None:
    """When this process's stderr is the service log and it has grown too long, copy it to `.1` and truncate it.

    The log must be open for appending, so that writing continues at the new end.
    """
    with contextlib.suppress(OSError):
        file, mine = log_file(), os.fstat(2)
        if mine.st_size < at_least or not os.path.samestat(mine, file.stat()):
            return
        shutil.copyfile(file, file.with_suffix(".log.1"))
        os.ftruncate(2, 0)


def installed() -> Service | None:
    """This user's service, if one is installed. A background process that has ended does not count."""
    told = paths.read_json(service_file())
    kind, port, pid = told.get("kind"), told.get("port"), told.get("pid", 0)
    if kind not in ("systemd", "process") or not isinstance(port, int) or not isinstance(pid, int):
        return None
    found = Service(kind, port, pid)
    if kind == "systemd":
        return found if all(path.is_file() for path in unit_files()) else None
    return found if any(one.pid == pid for one in running()) else None


def wake(found: Service) -> Running | None:
    """The service's running server, started by a connection under systemd. None when no server comes up."""
    server = found.server
    if server is not None or found.kind != "systemd":
        return server
    try:
        with socket.create_connection(("127.0.0.1", found.port), timeout=1):
            pass
    except OSError:
        return None
    return await_server(found, START_S)


def await_server(found: Service, seconds: float, process: Popen[bytes] | None = None) -> Running | None:
    """The service's server, as soon as it is registered; None on timeout or when `process` has ended."""
    deadline = time.monotonic() + seconds
    while (server := found.server) is None and time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            return None
        time.sleep(0.05)
    return server


def unit_files() -> tuple[Path, Path]:
    """Where systemd looks for the socket and service units."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
    return folder / "localllm.socket", folder / "localllm.service"
