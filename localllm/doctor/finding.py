"""Building blocks of checks: the survey of the machine, the registry of checks, and constructors of findings."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from localllm.device import GpuFacts, MachineFacts, machine
from localllm.device.host import HostFacts
from localllm.interface import Check

Status = Literal["ok", "warn", "fail", "skip"]

HARDWARE, SOFTWARE, STORAGE, TERMINAL, MODEL = "hardware", "software", "storage", "terminal", "model"


class Survey:
    """The facts that checks use: the machine, read at once, and its host, read meanwhile in a thread.

    machine, host   replace the real ones if given (tests, other commands)
    settings        --config; None for the user's own file
    offline         --offline: no network access
    """

    def __init__(
        self,
        machine_facts: MachineFacts | None = None,
        host_facts: HostFacts | None = None,
        *,
        settings: Path | None = None,
        offline: bool = False,
    ) -> None:
        self.machine, self.settings, self._offline = machine_facts or machine(), settings, offline
        self._host: Future[HostFacts] = Future()
        if host_facts is not None:
            self._host.set_result(host_facts)
        else:
            threading.Thread(target=self._read, name="host facts", daemon=True).start()

    @property
    def host(self) -> HostFacts:
        """The host facts; waits until they are read."""
        return self._host.result()

    def _read(self) -> None:
        try:
            self._host.set_result(read_host(self.machine.gpus, self.settings, self._offline))
        except BaseException as error:  # re-raised by `host`
            self._host.set_exception(error)


def read_host(gpus: Sequence[GpuFacts], settings: Path | None = None, offline: bool = False) -> HostFacts:
    """Read the host facts of this process, including the hub's reachability, the server port and failed GPUs."""
    from localllm import hub
    from localllm.config import load_config
    from localllm.device.host import host
    from localllm.device.trouble import trouble
    from localllm.errors import ConfigError
    from localllm.hub.cache import hub_dir

    try:
        config = load_config(path=settings)
        offline, port = offline or config.offline or hub.is_offline(), config.server.port or 8000
    except ConfigError:  # reported by `config.valid`
        offline, port = offline or hub.is_offline(), 8000
    try:
        address = "" if offline else proxy() or hub.endpoint()
    except ConfigError:  # reported by `hf.endpoint`
        address = ""
    capability = max((gpu.capability for gpu in gpus), default=0)
    facts = host(hub_dir(), address, port, capability=capability)
    return replace(facts, gpu_trouble=trouble(*(gpu.index for gpu in gpus)) if gpus else "")


def proxy() -> str:
    """The proxy for requests to the hub, without its user name and password."""
    from localllm import hub
    from localllm.hub.client import proxy_of

    return proxy_of(hub.endpoint())


CheckFunction = Callable[[Survey], Check]


class Checks(dict[str, CheckFunction]):
    """The checks of one group by id, in display order."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def add(
        self, check_id: str, needless: Callable[[Survey], str] = lambda survey: ""
    ) -> Callable[[CheckFunction], CheckFunction]:
        """Decorator that registers a check. If `needless` returns a reason, the check is skipped with it."""

        def take(check: CheckFunction) -> CheckFunction:
            self[check_id] = lambda survey: skip(why) if (why := needless(survey)) else check(survey)
            return check

        return take


def found(status: Status, title: str, detail: str = "", fix: str = "", **data: Any) -> Check:
    """A finding without id and group, which `running` fills in.

    fix   a command to paste, or a step to take
    """
    return Check("", "", status, title, detail, fix, data)


ok, warn, fail, skip = (partial(found, status) for status in get_args(Status))


def sm(capability: int) -> str:
    """A compute capability as compilers spell it: sm_90."""
    return f"sm_{capability}"


def install(apt: str, dnf: str = "", pacman: str = "") -> str:
    """The command that installs a system package with the first package manager found; names differ between them."""
    root = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("apt-get"):
        return f"{root}apt-get install -y {apt}"
    if shutil.which("dnf"):
        return f"{root}dnf install -y {dnf or apt}"
    if shutil.which("pacman"):
        return f"{root}pacman -S --noconfirm {pacman or dnf or apt}"
    return f"{root}apt-get install -y {apt}"
