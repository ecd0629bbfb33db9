"""Repacked weights that a model leaves for its next start: what `engine.packed_store` allows, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm import LLM, SamplingParams
from localllm.backend.in_process import InProcessBackend
from localllm.checkpoint.packed_file import packed_dir
from localllm.device.facts import DiskFacts
from localllm.engine.engine import Engine
from localllm.interface import Done, Failed
from localllm.kernels.cpu import build
from localllm.llm import kept
from localllm.llm.kept import automatic_limit
from localllm.request import LoadProgress, Message

pytestmark = pytest.mark.skipif(build.library().lib is None, reason="no C compiler")
FREE = 64 << 30
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    """Every model counts as one, in a home of its own with 64 GiB free."""
    monkeypatch.setattr(kept, "LEAST_BYTES", 0)
    disk(monkeypatch, FREE)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=FREE))


def disk(monkeypatch: pytest.MonkeyPatch, free: int, kind: str = "ssd", filesystem: str = "ext4") -> None:
    found = DiskFacts(str(packed_dir()), free, free, kind, filesystem)
    monkeypatch.setattr(kept, "disk_facts", lambda _: found)


def use(path: Path, answers: bool = True, told: Callable[[LoadProgress], None] | None = None, **settings: int) -> bool:
    """Load, answer, close; whether the weights came from a file."""
    with LLM(path, ctx=64, on_progress=told, **settings) as llm:
        if answers:
            llm.generate([[1, 2, 3]], SHORT)
        assert not [warning for warning in llm.state().warnings if "repacked" in warning]
        packed = llm._kept._packed
        return packed is not None and packed._data is not None


def names() -> set[str]:
    return {path.name for path in packed_dir().iterdir()} if packed_dir().exists() else set()


def no_idle_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "when_idle", lambda *_, **__: None)


def test_the_second_start_finds_what_the_first_wrote(tiny_path: Path) -> None:
    assert automatic_limit() == FREE // 10
    assert not use(tiny_path)
    (name,) = names()
    assert use(tiny_path)
    assert names() == {name}
    assert automatic_limit() > FREE // 10  # what is kept counts as free


@pytest.mark.parametrize(
    ("kind", "filesystem"), [("memory", "tmpfs"), ("network", "nfs4"), ("ssd", "overlay"), ("", "")]
)
def test_disks_where_nothing_is_kept_by_itself(kind: str, filesystem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, FREE if kind else 0, kind, filesystem)
    assert automatic_limit() == 0


@pytest.mark.parametrize("why", ["no answer", "0", "too little is free", "no folder"])
def test_nothing_is_written_and_nothing_said(why: str, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "too little is free":
        disk(monkeypatch, 100 << 10)
    elif why == "no folder":
        packed_dir().parent.mkdir(parents=True, exist_ok=True)
        packed_dir().touch()
    settings = {"packed_store": 0} if why == "0" else {}
    phases: list[LoadProgress] = []
    for _ in range(2):
        assert not use(tiny_path, answers=why != "no answer", told=phases.append, **settings)
    assert packed_dir().is_file() or not names()
    assert not [phase for phase in phases if phase.name == "keep"]


def test_a_file_that_is_there_is_read_when_the_disk_has_filled(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tiny_path)
    disk(monkeypatch, 1 << 10)
    assert use(tiny_path)


def test_what_somebody_asked_for_and_cannot_be_is_told(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_idle_moment(monkeypatch)
    phases: list[LoadProgress] = []
    use(tiny_path, told=phases.append, packed_store=1000)
    assert "the limit is 1,000" in phases[-1].detail and not names()

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    use(tiny_path, told=phases.append, packed_store=1 << 30)
    assert "the disk is full" in phases[-1].detail and not names()


def test_a_model_that_was_used_lately_keeps_its_file(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two models that are larger than the limit together would replace each other at every start."""
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_path.read_bytes())
    assert not use(tiny_path)
    (name,) = names()
    size = (packed_dir() / name).stat().st_size
    disk(monkeypatch, 10 * (size + size // 2) - size)  # room for one and a half
    assert not use(other)
    assert not use(other)
    assert use(tiny_path)
    assert names() == {name}
    os.utime(packed_dir() / name, (1, 1))
    assert not use(other)
    assert use(other)
    assert len(names()) == 1 and name not in names()


def test_who_loads_a_model_holds_nobody_up(tiny_path: Path) -> None:
    """The first may never answer: the lock is taken when there is something to write, and other files go then."""
    with LLM(tiny_path, ctx=64):
        assert not names()
        assert not use(tiny_path)
        assert len(names()) == 1


def test_a_folder_of_somebody_else_is_no_trouble(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tiny_path)
    real = os.open

    def refuse(path: str | Path, *rest: int, **more: int) -> int:
        if str(packed_dir()) in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert not use(tiny_path)
    monkeypatch.setattr(os, "open", real)
    broken = os.pread

    def pread(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", pread)
    assert not use(tiny_path)
    monkeypatch.setattr(os, "pread", broken)
    assert use(tiny_path)


def test_an_end_that_waits_for_the_file_is_told_once(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "TOLD_AFTER_S", 0.0)
    no_idle_moment(monkeypatch)
    phases: list[str] = []
    use(tiny_path, told=lambda phase: phases.append(phase.name))
    assert phases.count("keep") == 1 and phases[-1] == "keep"
    assert use(tiny_path)


def test_an_end_with_an_error_waits_for_nothing(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_idle_moment(monkeypatch)
    with pytest.raises(KeyboardInterrupt), LLM(tiny_path, ctx=64) as llm:
        llm.generate([[1, 2, 3]], SHORT)
        raise KeyboardInterrupt
    assert not names()


def chat(path: Path, on_keep: Callable[[str], None] | None) -> InProcessBackend:
    """A backend that has answered."""
    backend = InProcessBackend(lambda llm: SHORT, on_keep=on_keep, completes=True, ctx=64)
    backend.start(str(path))
    turn = backend.send([Message(role="user", content="abc")])
    while True:
        for event in [*backend.events()]:
            backend.events().popleft()
            assert not isinstance(event, Failed), event
            if isinstance(event, Done) and event.turn == turn:
                return backend
        time.sleep(0.01)


@pytest.mark.parametrize("waits", [True, False])
def test_a_chat_waits_where_it_was_told_to(waits: bool, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_idle_moment(monkeypatch)
    chat(tiny_path, (lambda trouble: None) if waits else None).close()
    assert bool(names()) is waits


def test_ctrl_c_ends_the_wait_and_nothing_else(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "TOLD_AFTER_S", 0.0)
    no_idle_moment(monkeypatch)

    def on_keep(trouble: str) -> None:
        assert not trouble
        time.sleep(0.5)  # until it waits: a signal right before would be seen after the wait alone
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        held = backend._keeping
        assert held is not None
        while held.keeps_weights:
            time.sleep(0.01)

    backend = chat(tiny_path, on_keep)
    backend.close()
    assert not names()
