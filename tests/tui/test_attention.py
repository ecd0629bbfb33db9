"""Whoever looks at another window is called when an answer ends, and nothing a model says is obeyed by the terminal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from localllm.backend.script import ANSWERS
from localllm.conversation.attention import BELL, RESTORE_TITLE, SAVE_TITLE, Attention

from .test_terminal import Terminal, open_terminal  # noqa: F401

AWAY, BACK = "\x1b[O", "\x1b[I"


@pytest.fixture(autouse=True)
def no_tmux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMUX", raising=False)


@pytest.mark.parametrize(
    ("when", "in_front", "calls"),
    [("never", False, 0), ("unfocused", True, 0), ("unfocused", False, 2), ("always", True, 1), ("always", False, 2)],
)
def test_who_is_called_when(when: str, in_front: bool, calls: int) -> None:
    written: list[str] = []
    attention = Attention(when, written.append)
    attention.look(in_front)
    attention.call("Build notes", "the answer is ready")
    assert len(written) == calls
    if calls:
        assert written[0] == BELL + "\x1b]9;localllm: the answer is ready · Build notes" + BELL
    attention.look(True)
    assert (RESTORE_TITLE in written) is (calls == 2)


def test_the_title_is_saved_once_and_restored_once() -> None:
    written: list[str] = []
    attention = Attention("unfocused", written.append)
    attention.look(False)
    for _ in range(3):
        attention.call("", "the answer is ready")
    attention.end()
    attention.look(True)
    assert "".join(written).count(SAVE_TITLE) == "".join(written).count(RESTORE_TITLE) == 1


def test_a_title_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    for tmux in ("", "/tmp/tmux"):
        monkeypatch.setenv("TMUX", tmux)
        written: list[str] = []
        attention = Attention("always", written.append)
        attention.look(False)
        attention.call("4;1;50" + ANSWERS["!escape"], "the answer is ready")
        text = "".join(written).replace("\x1bPtmux;", "").replace("\x1b\x1b]", "\x1b]").replace("\x1b\\", "")
        text = text.removeprefix(BELL).replace(SAVE_TITLE, "")
        osc_9, osc_2, rest = text.split(BELL)
        assert osc_9.startswith("\x1b]9;localllm: ") and osc_2.startswith("\x1b]2;localllm: ") and not rest
        assert all(char.isprintable() for char in osc_9[1:] + osc_2[1:])


@pytest.mark.slow
def test_on_a_terminal_the_title_comes_back(open_terminal: Callable[..., Terminal]) -> None:  # noqa: F811
    one = open_terminal("chat", "fake")
    one.has("commands")
    one.send("first\r")
    one.has("tok/s ")
    assert b"\x1b]9;" not in one.raw and b"\x1b]2;" not in one.raw  # in front: silence
    one.send(AWAY)
    one.read(0.5)  # in one piece with a letter behind it, this would be another key
    one.send("!escape\r")
    said = b"\x1b]9;localllm: the answer is ready"
    one.until(lambda: one.raw.count(said) == 1 and b"\x1b]2;localllm: " in one.raw)
    assert RESTORE_TITLE.encode() not in one.raw
    one.send(BACK)
    one.until(lambda: one.raw.count(RESTORE_TITLE.encode()) == 1)
    one.send(AWAY)
    one.read(0.5)  # in one piece with a letter behind it, this would be another key
    one.send("again\r")
    one.until(lambda: one.raw.count(said) == 2)
    one.send("\x03\x03")
    assert one.end() == 0
    assert one.raw.count(RESTORE_TITLE.encode()) == 2
    for bad in (b"\x1b]52", b"\x1b]0;", b"\x1bP", b"\x1b[6n"):
        assert bad not in one.raw
