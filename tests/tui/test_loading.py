"""The loading card says what earlier loads took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.widgets import ProgressBar

from localllm.conversation import load_times
from localllm.request import LoadProgress
from localllm.tui.widgets.loading import LoadCard

from .conftest import chat


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    return tmp_path / "state" / "load-times.json"


def test_the_median_of_the_last_loads_is_expected(file: Path) -> None:
    assert load_times.expected_s("a") is None
    for seconds in (100.0, 1.0, 2.0, 30.0, 4.0, 5.0):
        load_times.add("a", seconds)
    load_times.add("b", 9.0)
    assert load_times.expected_s("a") == 4.0 and load_times.expected_s("b") == 9.0  # the first one is forgotten
    assert len(json.loads(file.read_text())["a"]) == load_times.KEPT
    for number in range(250):
        load_times.add(f"model {number}", 1.0)
    assert load_times.expected_s("a") is None and len(json.loads(file.read_text())) == 200


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "x"}', '{"a": [null]}', '{"a": [-1]}', '{"a": []}', "\x00"])
def test_a_damaged_file_expects_nothing_and_is_written_anew(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    assert load_times.expected_s("a") is None
    load_times.add("a", 2.0)
    assert load_times.expected_s("a") == 2.0


def test_a_folder_that_cannot_be_written_is_no_failure(file: Path) -> None:
    file.parent.write_text("")
    load_times.add("a", 1.0)


@pytest.mark.slow
async def test_the_second_load_says_how_long_it_may_take(file: Path) -> None:
    async with chat(load_s=0.1) as running:
        await running.ready()
        await running.until(lambda: load_times.expected_s("fake") and not running.screen.query(LoadCard))
    load_times.add("fake-slow", 42.0)
    async with chat(model="fake-slow") as running:
        await running.until(lambda: "of about 42 s" in running.text("#load-title"))
        assert "Loading fake-slow · 0." in running.text("#load-title")


async def test_bytes_are_said_as_such(file: Path) -> None:
    async with chat(model="fake-slow") as running:
        await running.until(lambda: running.screen.query(LoadCard))
        card = running.screen.query_one(LoadCard)
        card.update(LoadProgress("weights", 63_327_744, 96_576_768))
        assert card.current() == "weights 60.4 MiB of 92.1 MiB"
        card.update(LoadProgress("kv", 3, 8))
        assert card.current() == "KV cache 3/8"


@pytest.mark.slow
async def test_a_download_has_a_bar_and_loading_has_none(file: Path) -> None:
    async with chat(model="fake-slow", load_s=60) as running:
        await running.until(lambda: running.screen.query(LoadCard))
        card = running.screen.query_one(LoadCard)
        assert not card.query(ProgressBar), "nothing of it is made for a model that is here"
        await running.until(lambda: "starting up" in running.text("#load-line"))
        running.backend.close()  # its next phase would take the bar away
        for done in (10 << 20, 30 << 20):
            card.update(LoadProgress("download", done, 120 << 20))
        await running.until(lambda: "25%" in "\n".join(running.drawn))
        assert card.query_one(ProgressBar).percentage == 0.25
        card.update(LoadProgress("weights", 1, 8))
        await running.until(lambda: "25%" not in "\n".join(running.drawn))
