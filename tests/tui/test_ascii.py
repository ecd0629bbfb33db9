"""Terminals whose locale is not UTF-8: our marks in ASCII, every line as wide as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color

from localllm.backend.script import ANSWERS
from localllm.tui.ascii import Encodable, plain

from .conftest import chat
from .test_terminal import Terminal, open_terminal  # noqa: F401


@pytest.mark.parametrize(
    ("char", "shown"), [("✓", "+"), ("…", "."), ("╭", "+"), ("│", "|"), ("é", "e"), ("日", "??"), ("😀", "??")]
)
def test_a_character_becomes_one_as_wide(char: str, shown: str) -> None:
    assert plain(char) == shown and cell_len(shown) == cell_len(char)


@pytest.mark.parametrize("text", ["e\u0301a", "日本語", "\U0001f469\u200d\U0001f467 family", "ﬁ ½ ™", "\u2800⠋ ┌─┐"])
@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1", "euc_jp"])
def test_any_text_keeps_its_width_and_can_be_written(text: str, encoding: str) -> None:
    line = Encodable(encoding).apply([Segment(text)], Color(0, 0, 0))
    shown = "".join(segment.text for segment in line)
    assert shown.encode(encoding) and cell_len(shown) == cell_len(text)


async def test_what_the_encoding_has_stays() -> None:
    async with chat(encoding="iso8859-1") as running:
        await running.ready()
        running.backend.answers = ["caf\u00e9 · na\u00efve ✓"]
        await running.ask("words")
        assert any("café · naïve +" in line for line in running.drawn)


@pytest.mark.slow
async def test_the_whole_screen_is_ascii_and_says_the_same() -> None:
    async with chat(encoding="ascii") as running:
        await running.ready()
        await running.ask("!md")
        await running.pilot.press("f4")
        await running.pilot.pause()
        for key in ("", "ctrl+o"):
            if key:
                await running.pilot.press(key)
                await running.until(lambda: any("Models" in line for line in running.drawn))
            lines = running.drawn
            assert all(line.isascii() for line in lines), [line for line in lines if not line.isascii()]
            assert {cell_len(line) for line in lines} == {118}
            if key:
                await running.pilot.press("escape")
        assert running.answers[0].answer.source == ANSWERS["!md"]  # what is copied and saved is what was said


@pytest.mark.slow
def test_the_locale_c_gets_ascii_bytes(open_terminal: Callable[..., Terminal]) -> None:  # noqa: F811
    one = open_terminal("chat", "fake", env={"LC_ALL": "C", "LOCALLLM_UI_NOTIFY": "never"})
    one.has("commands")
    one.send("!md\r")
    one.has("The end, and a fence")
    one.send("\x03\x03")
    assert one.end() == 0
    left = one.raw.index(b"\x1b[?1049l")  # what follows is said after the full screen
    assert one.raw[:left].isascii()
