"""How a check sees the machine, and how it says what it found."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from localllm.device import MachineFacts, machine
from localllm.device.host import HostFacts
from localllm.interface import Check

Status = Literal["ok", "warn", "fail", "skip"]

HARDWARE, SOFTWARE, STORAGE, TERMINAL, MODEL = "hardware", "software", "storage", "terminal", "model"


class Survey:
    """What checks look at: the machine at once, its surroundings read in a thread meanwhile.

    machine, host   given ones are taken as they are (tests, other commands)
    settings        --config; None for the user's own file
    offline         --offline: nothing is asked of the network
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
        """The surroundings; waits for them the first time."""
        return self._host.result()

    def _read(self) -> None:
        try:
            capability = max((gpu.capability for gpu in self.machine.gpus), default=0)
            self._host.set_result(read_host(capability, self.settings, self._offline))
        except BaseException as error:  # it is raised where the facts are needed
            self._host.set_exception(error)


def read_host(capability: int, settings: Path | None = None, offline: bool = False) -> HostFacts:
    """The surroundings of this process, its hub and its port."""
    from localllm import hub
    from localllm.config import load_config
    from localllm.device.host import host
    from localllm.errors import ConfigError
    from localllm.hub.cache import hub_dir

    try:
        config = load_config(path=settings)
        offline, port = offline or config.offline or hub.is_offline(), config.server.port or 8000
    except ConfigError:  # `config.valid` says so
        offline, port = offline or hub.is_offline(), 8000
    try:
        address = "" if offline else proxy() or hub.endpoint()
    except ConfigError:  # `hf.endpoint` says so
        address = ""
    return host(hub_dir(), address, port, capability=capability)


def proxy() -> str:
    """The proxy that requests to the hub go through, without the name and password in it."""
    from localllm import hub
    from localllm.hub.client import proxy_of

    return proxy_of(hub.endpoint())


CheckFunction = Callable[[Survey], Check]


class Checks(dict[str, CheckFunction]):
    """The checks of one group by id, in the order they are shown."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def add(
        self, check_id: str, needless: Callable[[Survey], str] = lambda survey: ""
    ) -> Callable[[CheckFunction], CheckFunction]:
        """Take up the function below, which is not called where `needless` says why."""

        def take(check: CheckFunction) -> CheckFunction:
            self[check_id] = lambda survey: skip(why) if (why := needless(survey)) else check(survey)
            return check

        return take


def found(status: Status, title: str, detail: str = "", fix: str = "", **data: Any) -> Check:
    """A finding, without the id and the group: whoever runs the check knows them.

    fix   a command that can be pasted, or the step to take
    """
    return Check("", "", status, title, detail, fix, data)


ok, warn, fail, skip = (partial(found, status) for status in get_args(Status))


def sm(capability: int) -> str:
    """A compute capability as compilers call it."""
    return f"sm_{capability}"


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
