"""A hub of our own as a child process, a cache of its own per test, and little patience."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm import hub
from localllm.hub import Patience
from localllm.request import LoadProgress

QUICK = Patience(connect_s=2, stall_s=0.5, answer_s=2, retries=5, backoff_s=0.01, max_wait_s=3)
CANARY = "hf_CANARYcanary0123456789"


class FakeHub:
    """The running hub: put repositories in, set a fault, read its log."""

    def __init__(self, folder: Path, port: int, pid: int) -> None:
        self.folder, self.pid = folder, pid
        self.url = f"http://127.0.0.1:{port}"

    def add(self, repo: str, files: dict[str, bytes], info: dict[str, Any] | None = None) -> str:
        """Make a repository (`org/name` or `org/name@revision`); returns its name."""
        for name, data in files.items():
            path = self.folder / repo / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if info is not None:
            (self.folder / repo / "__info.json").write_text(json.dumps(info))
        return repo

    def fault(self, mode: str = "", **more: Any) -> None:
        """Set a fault, or none; forget the log."""
        self._ask("/__fault", {"mode": mode, "forget": True} | more)

    def log(self) -> list[list[Any]]:
        """[method, path, Range, token came along, bytes sent] of what was asked since the last fault was set."""
        return self._ask("/__log")  # type: ignore[no-any-return]

    def files_asked(self) -> list[list[Any]]:
        """The log without listings."""
        return [row for row in self.log() if "/resolve/" in row[1]]

    def _ask(self, path: str, value: Any = None) -> Any:
        data = None if value is None else json.dumps(value).encode()
        with urllib.request.urlopen(self.url + path, data, timeout=10) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def hub_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("hub")
    server = Path(__file__).with_name("hub_server.py")
    child = subprocess.Popen([sys.executable, "-P", str(server), str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    yield FakeHub(folder, int(child.stdout.readline()), child.pid)
    child.kill()
    child.wait()
    child.stdout.close()


@pytest.fixture
def fake_hub(hub_process: FakeHub, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The hub, without a fault, as HF_ENDPOINT; an empty cache. The user has a token, which must never be shown."""
    monkeypatch.setenv("HF_ENDPOINT", hub_process.url)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    hub_process.fault()
    return hub_process


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that no two seeds share."""
    return random.Random(seed).randbytes(size)


def pull(name: str, events: list[LoadProgress] | None = None, **options: Any) -> Path:
    """Resolve and download with little patience."""
    resolved = hub.resolve(name, patience=QUICK, **options)
    seen = events if events is not None else []
    return hub.download(resolved, progress=seen.append, patience=QUICK, cancel=threading.Event())


def tree(folder: Path) -> set[str]:
    """Every file and folder below, but locks."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if ".locks" not in p.parts}
