"""Repacked weights that a model leaves for its next start: what `engine.packed_store` allows, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm import LLM, SamplingParams
from localllm.checkpoint.packed_file import automatic_limit, packed_dir
from localllm.kernels.cpu import build
from localllm.llm import kept
from localllm.request import LoadProgress

pytestmark = pytest.mark.skipif(build.library().lib is None, reason="no C compiler")
DISK = shutil.disk_usage("/")


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    """Every model counts as one, in a home of its own with 64 GiB free."""
    monkeypatch.setattr(kept, "LEAST_BYTES", 0)
    free(monkeypatch, 64 << 30)


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=num_bytes, used=0, free=num_bytes))


def use(path: Path, answers: bool = True, told: Callable[[LoadProgress], None] | None = None, **settings: int) -> bool:
    """Load, answer, close; whether the weights came from a file."""
    with LLM(path, ctx=64, on_progress=told, **settings) as llm:
        if answers:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
        assert not [warning for warning in llm.state().warnings if "repacked" in warning]
        packed = llm._kept._packed
        return packed is not None and not packed.writes and not packed._waiting and packed._data is not None


def test_the_second_start_finds_what_the_first_wrote(tiny_path: Path) -> None:
    assert automatic_limit() == (64 << 30) // 10
    assert not use(tiny_path)
    (file,) = packed_dir().iterdir()
    assert use(tiny_path)
    assert [*packed_dir().iterdir()] == [file]
    assert automatic_limit() > (64 << 30) // 10  # what is kept counts as free


@pytest.mark.parametrize("why", ["no answer", "0", "too little is free", "the disk does not tell"])
def test_nothing_is_written_and_nothing_said(why: str, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "too little is free":
        free(monkeypatch, 100 << 10)
    elif why == "the disk does not tell":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: (_ for _ in ()).throw(OSError("gone")))
    settings = {"packed_store": 0} if why == "0" else {}
    for _ in range(2):
        assert not use(tiny_path, answers=why != "no answer", **settings)
    assert not packed_dir().exists() or not [*packed_dir().iterdir()]


def test_a_file_that_is_there_is_read_when_the_disk_has_filled(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tiny_path)
    free(monkeypatch, 100 << 10)
    assert use(tiny_path)


def test_an_end_that_waits_for_the_file_is_told_once(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "TOLD_AFTER_S", 0.0)
    monkeypatch.setattr("localllm.engine.engine.Engine.when_idle", lambda *_, **__: None)  # no idle moment
    phases: list[str] = []
    use(tiny_path, told=lambda phase: phases.append(phase.name))
    assert phases.count("keep") == 1 and phases[-1] == "keep"
    assert use(tiny_path)
