"""The loading card says what earlier loads took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localllm.conversation.load_times import KEPT, LoadTimes
from localllm.tui.widgets.loading import LoadCard

from .conftest import chat


def test_the_median_of_the_last_loads_is_expected(tmp_path: Path) -> None:
    file = tmp_path / "new" / "times.json"
    times = LoadTimes(file)
    assert times.expected("a") is None
    for seconds in (100.0, 1.0, 2.0, 30.0, 4.0, 5.0):
        times.add("a", seconds)
    times.add("b", 9.0)
    assert times.expected("a") == 4.0 and times.expected("b") == 9.0  # the first one is forgotten
    assert len(json.loads(file.read_text())["a"]) == KEPT
    for number in range(250):
        times.add(f"model {number}", 1.0)
    assert times.expected("a") is None and len(json.loads(file.read_text())) == 200


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "x"}', '{"a": [null]}', '{"a": [-1]}', '{"a": []}', "\x00"])
def test_a_damaged_file_expects_nothing_and_is_written_anew(tmp_path: Path, text: str) -> None:
    file = tmp_path / "times.json"
    file.write_text(text)
    times = LoadTimes(file)
    assert times.expected("a") is None
    times.add("a", 2.0)
    assert times.expected("a") == 2.0


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    LoadTimes(tmp_path / "file" / "times.json").add("a", 1.0)


async def test_the_second_load_says_how_long_it_may_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    async with chat(load_s=0.1) as running:
        await running.ready()
        await running.until(lambda: LoadTimes().expected("fake") and not running.screen.query(LoadCard))
    LoadTimes().add("fake-slow", 42.0)
    async with chat(model="fake-slow") as running:
        await running.until(lambda: "of about 42 s" in running.text("#load-title"))
        assert "Loading fake-slow · 0." in running.text("#load-title")
