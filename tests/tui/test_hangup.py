"""A chat whose terminal goes away ends, with SIGHUP or without: it must not spin on a dead file descriptor."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.app import App

from localllm.backend.scripted import FakeBackend
from localllm.conversation.saver import Saver
from localllm.conversation.session import Session
from localllm.conversation.tree import Conversation
from localllm.history.store import History
from localllm.tui.app import ChatApp

COMMAND = [sys.executable, "-P", "-c", "from localllm.cli import main; main()", "chat", "fake"]
WAIT_S = 200


def session(sighup: str) -> Callable[[], None]:
    """What the child does before it starts; `none` leaves it without a controlling terminal."""

    def begin() -> None:
        os.setsid()
        if sighup != "none":
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if sighup == "ignored":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    return begin


def cases() -> Iterator[Any]:
    for flags in ((), ("--inline",), ("--plain",)):
        for sighup in ("none", "default", "ignored"):
            yield pytest.param(flags, sighup, marks=() if (flags, sighup) == ((), "none") else pytest.mark.slow)


@pytest.mark.parametrize(("flags", "sighup"), [*cases()])
def test_a_chat_ends_with_its_terminal_and_keeps_the_answer(
    flags: tuple[str, ...], sighup: str, tmp_path: Path
) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 34, 118, 0, 0))
    env = os.environ | {"LOCALLLM_ENGINE": "fake:tps=20", "TERM": "xterm-256color", "LOCALLLM_HOME": str(tmp_path)}
    process = subprocess.Popen(
        [*COMMAND, *flags, "long"], stdin=slave, stdout=slave, stderr=slave, env=env, preexec_fn=session(sighup)
    )
    os.close(slave)
    seen = b""
    end = time.monotonic() + WAIT_S
    while b"number" not in seen:
        assert time.monotonic() < end and process.poll() is None, seen[-2000:]
        if select.select([master], [], [], 0.1)[0]:
            seen += os.read(master, 65536)
    os.close(master)
    try:
        code = process.wait(WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert code == 129 or flags == ("--plain",)
    with History(tmp_path / "data/chats.db") as history:
        _, answer = history.messages(history.find("last").id)
    assert answer.content.startswith("Sentence") and answer.status in ("abort", "partial")


def test_an_interface_that_has_ended_hears_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers of the driver of Textual would draw: a SIGCONT while the model was given back ended in a traceback."""
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGTSTP, signal.SIGCONT)

    def run(self: App[None], **options: Any) -> None:
        for number in (signal.SIGTSTP, signal.SIGCONT):
            signal.signal(number, lambda *_: None)

    monkeypatch.setattr(App, "run", run)
    before = [signal.getsignal(number) for number in numbers]
    ChatApp(Session(FakeBackend(), Conversation(""), Saver(None), "fake", {})).run()
    assert [signal.getsignal(number) for number in numbers] == before
