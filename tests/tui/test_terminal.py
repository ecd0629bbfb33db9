"""What a terminal really gets: bytes through a pseudo-terminal and pyte; tmux and `script` where they are installed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyte
import pytest

from localllm.tui.chat.actions import LATE_S

LOCALLLM = [sys.executable, "-P", "-c", "from localllm.cli import main; main()"]
WAIT_S = 200


class Terminal:
    """The program behind a pseudo-terminal; what it draws is kept by pyte, its bytes in `raw`."""

    def __init__(self, *words: str, env: dict[str, str] | None = None, size: tuple[int, int] = (118, 34)) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        environ = os.environ | {"LOCALLLM_ENGINE": "fake:tps=300", "TERM": "xterm-256color"} | (env or {})
        self.process = subprocess.Popen(
            [*LOCALLLM, *words], stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True
        )
        os.close(slave)
        self.screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(self.screen.display)

    def read(self, seconds: float = 0.05) -> None:
        """Take in what was drawn."""
        while select.select([self._master], [], [], seconds)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            self.raw += data
            # pyte knows no private-mode reports and kitty keys: it would draw them
            self._stream.feed(data.replace(b"\x1b[>1u", b"").replace(b"\x1b[<u", b"").replace(b"\x1b[?2026$p", b""))

    def until(self, done: Callable[[], object]) -> None:
        """Wait for something on the screen."""
        end = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end, self.text
            self.read()

    def has(self, text: str) -> None:
        """Wait for a text on the screen."""
        self.until(lambda: text in self.text)

    def send(self, text: str) -> None:
        """Type."""
        os.write(self._master, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Another size of the window."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)
        self.process.send_signal(signal.SIGWINCH)

    def end(self) -> int:
        """Wait for the end of the process."""
        end = time.monotonic() + WAIT_S
        while self.process.poll() is None and time.monotonic() < end:
            self.read()
        self.read()
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """Whatever happened."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def make(*words: str, **rest: object) -> Terminal:
        opened.append(Terminal(*words, **rest))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_a_chat_on_a_terminal_is_saved_and_continued_after_a_kill(
    open_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    """Looks at the bytes: nothing that the model says is obeyed."""
    env = {"LOCALLLM_HOME": str(tmp_path)}
    first = open_terminal("chat", "fake", env=env)
    first.has("commands")
    first.send("!escape\r")
    first.has("[red]literal[/red]")
    first.has("tok/s ")
    drawn = first.raw.replace(b"\x1b]22;default\x07", b"")  # Textual's own: the shape of the pointer
    evil = (
        b"\x1b]52",
        b"\x1b]8;",
        b"\x1b]0;",
        b"\x1b[6n",
        b"\x1bP",
        b"\x07",
        b"\xc2\x9b",
        b"\x1b[2J over",
        "\u202e".encode(),
    )
    for bad in evil:
        assert bad not in drawn, bad
    first.send("long\r")
    first.has("esc stop")
    first.has("Sentence number 9")
    first.until(lambda: any(b"Sentence number 9" in file.read_bytes() for file in tmp_path.rglob("*.db*")))
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second = open_terminal("chat", "fake", "-c", env=env)
    second.has("interrupted when the program exited")
    assert "Sentence number" in second.text
    second.send("\x03\x03")
    assert second.end() == 0
    assert "Saved" in second.text and "Continue: localllm chat -c" in second.text
    assert b"\x1b[?1049l" in second.raw


@pytest.mark.slow  # without a terminal both are in test_chat.py
def test_no_color_means_no_colour_and_resizing_breaks_nothing(open_terminal: Callable[..., Terminal]) -> None:
    """Nothing is drawn in colour, and nothing breaks while the window changes its size again and again."""
    terminal = open_terminal("chat", "fake", env={"NO_COLOR": "1", "COLORTERM": "truecolor", "LINES": "50"})
    terminal.has("commands")
    terminal.send("!md\r")
    terminal.has("left open")
    for columns, rows in ((60, 20), (20, 5), (118, 34), (39, 40), (80, 24)) * 4:
        terminal.resize(columns, rows)
        terminal.read(0.01)
    terminal.has("ctx")
    assert not re.search(rb"\x1b\[[0-9;]*\b(?:3[0-8]|4[0-8])\b[0-9;]*m", terminal.raw)
    terminal.resize(20, 5)
    terminal.has("too small")
    terminal.send("\x04")
    terminal.send("\x11")  # ctrl+q
    assert terminal.end() == 0


def test_an_editor_and_a_large_paste(open_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'from the editor' > \"$1\"\n")
    editor.chmod(0o755)
    terminal = open_terminal("chat", "fake", env={"EDITOR": str(editor), "VISUAL": ""})
    terminal.has("commands")
    terminal.send("\x07")
    terminal.has("from the editor")
    terminal.send("\x03")
    terminal.until(lambda: "from the editor" not in terminal.text)
    terminal.send("one\x1b\rtwo\x1b[200~ three\x1b\rfour\x1b[201~")  # Alt+Enter, and the same bytes in a paste
    terminal.until(lambda: re.search(r"│ one\s+│\s+│ two three\s+│\s+│ four\s", terminal.text))
    terminal.send("\x03")
    terminal.until(lambda: "four" not in terminal.text)
    terminal.send("\x1b[200~" + "\n".join(f"line {n} of a paste" for n in range(2000)) + "\x1b[201~")
    terminal.has("line 1999 of a paste")
    terminal.send("\x03")
    terminal.has("cleared")


def test_it_ends_with_sighup_and_leaves_no_process(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("chat", "fake")
    terminal.has("commands")
    terminal.process.send_signal(signal.SIGHUP)
    terminal.end()


@pytest.mark.slow
def test_the_first_screen_without_a_model(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    terminal.has("New chat with")
    terminal.has("fake-download")
    terminal.send("\r")
    terminal.has("fake kernels")
    terminal.send("\x11")
    assert terminal.end() == 0


# --- with the programs people use ------------------------------------------------------------------------------------


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Callable[..., str]]:
    program = shutil.which("tmux")
    if program is None:
        pytest.skip("tmux is not installed")
    base = [program, "-L", f"localllm-{os.getpid()}", "-f", "/dev/null"]
    env = os.environ | {"LOCALLLM_ENGINE": "fake:tps=300", "LOCALLLM_HOME": str(tmp_path), "TERM": "xterm-256color"}

    def call(*words: str) -> str:
        return subprocess.run([*base, *words], capture_output=True, text=True, env=env, timeout=WAIT_S).stdout

    call("new-session", "-d", "-s", "t", "-x", "118", "-y", "34", "bash --norc")
    yield call
    call("kill-server")


def has(tmux: Callable[..., str], text: str) -> str:
    """Wait for a text in the pane."""
    end = time.monotonic() + WAIT_S
    while text not in (seen := tmux("capture-pane", "-p", "-t", "t")):
        assert time.monotonic() < end, seen
        time.sleep(0.05)
    return seen


def test_tmux_sees_the_chat_stopped_resized_suspended_and_left(tmux: Callable[..., str], tmp_path: Path) -> None:
    def keys(*words: str) -> None:
        tmux("send-keys", "-t", "t", *words)

    import shlex

    keys(shlex.join([*LOCALLLM, "chat", "fake"]), "Enter")
    has(tmux, "send ·")
    keys("hello", "Enter")
    has(tmux, "tok/s  ·")
    keys("long", "Enter")
    has(tmux, "Sentence number 3")
    keys("Escape")
    has(tmux, "stopped by you")
    tmux("resize-window", "-t", "t", "-x", "70", "-y", "24")
    has(tmux, "ctx")
    keys("!fd2", "Enter")
    has(tmux, "↓ 1 ")
    time.sleep(LATE_S)  # until then Esc is taken for one that came too late to stop the answer
    keys("Escape")
    has(tmux, "answer again")
    keys("C-z")  # stopped, then brought back
    has(tmux, "Stopped")
    keys("fg", "Enter")
    has(tmux, "answer again")
    keys("i")
    has(tmux, "F1 help")
    keys("C-c", "C-c")
    seen = has(tmux, "Continue: localllm chat -c")
    assert "CORRUPT" not in seen
    assert "CORRUPT" in (tmp_path / "state/log/localllm.log").read_text()


@pytest.mark.slow
def test_a_second_terminal_in_between_loses_nothing(tmp_path: Path) -> None:
    """A second terminal in between, as ssh makes one; and what a stream costs a slow line, scaled down."""
    program = shutil.which("script")
    if program is None:
        pytest.skip("`script` is not installed")
    log = tmp_path / "typescript"
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 34, 118, 0, 0))
    env = os.environ | {"LOCALLLM_ENGINE": "fake:tps=200", "TERM": "xterm-256color", "LOCALLLM_HOME": str(tmp_path)}
    import shlex

    process = subprocess.Popen(
        [program, "-qfc", shlex.join([*LOCALLLM, "chat", "fake"]), str(log)],
        stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + WAIT_S
        while text not in seen:
            assert time.monotonic() < end, seen[-2000:]
            if select.select([master], [], [], 0.05)[0]:
                seen += os.read(master, 65536)

    try:
        until(b"commands")
        os.write(master, b"long\r")
        until(b"esc stop")
        before, began = log.stat().st_size, time.monotonic()
        while time.monotonic() - began < 4:
            if select.select([master], [], [], 0.05)[0]:
                seen += os.read(master, 65536)
        rate = (log.stat().st_size - before) / (time.monotonic() - began)
        assert rate * 60 < 20_000_000  # ten times the line of 2 MB a minute
        os.write(master, b"\x03\x03")
        until(b"Continue: localllm chat -c")
    finally:
        process.kill()
        process.wait()
        os.close(master)
