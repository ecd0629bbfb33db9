"""The pictures of the README are what the program draws. `make screenshots` draws them anew."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from .scenes import SCENES, words

assert set(SCENES) == {"chat", "engine", "models", "home"}
SCREENS = Path(__file__).resolve().parents[2] / "docs/screens"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["chat", "engine", *(pytest.param(n, marks=pytest.mark.slow) for n in ("models", "home"))]
)
async def test_the_picture_is_what_is_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        drawn = await SCENES[name](tmp_path / "chats.db")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "http" not in drawn.replace("http://www.w3.org", "")
    file = SCREENS / f"{name}.svg"
    if os.environ.get("UPDATE_SCREENS"):
        SCREENS.mkdir(parents=True, exist_ok=True)
        file.write_text(drawn)
    assert words(drawn) == words(file.read_text()), "make screenshots, then look at them"
