"""`chat` without a full screen: piped, in lines, and never hanging."""

from __future__ import annotations

import json
import os
import pty
import re
import readline
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from localllm.cli.names import choice_of
from localllm.history.store import History
from localllm.hub import Resolved

from .conftest import LOCALLLM, Invoke, process, valid


def test_piped_input_is_answered_once_and_alone_on_stdout(invoke: Invoke) -> None:
    result = invoke("chat", "fake", "--temp", "0", stdin="What is\nthis?\n")
    assert result.exit_code == 0
    assert result.stdout == "What is\nthis?\n"
    assert "like `localllm run`" in result.stderr


def test_piped_input_and_a_prompt_go_together(invoke: Invoke) -> None:
    assert invoke("chat", "fake", "second", stdin="first").stdout == "first\n\nsecond\n"


def test_piped_input_goes_on_with_a_chat(invoke: Invoke, empty_home: Path) -> None:
    assert invoke("chat", "-c", stdin="x").exit_code == 3
    assert invoke("run", "fake", "one", "--log", "-s", "be brief").exit_code == 0
    more = valid(invoke("chat", "-c", "--json", stdin="two").stdout, "run-1")
    assert more["usage"]["prompt"] > 2 and more["model"] == "fake"
    chat = json.loads(invoke("logs", "list", "--json").stdout)["chats"][0]["id"]
    assert invoke("chat", "--resume", chat[:6], "--no-save", stdin="three").stdout == "three\n"
    shown = json.loads(invoke("logs", "show", "last", "--json").stdout)["chat"]
    assert [message["content"] for message in shown["messages"]] == ["one", "one", "two", "two"]
    assert invoke("chat", "--resume", "nosuch", stdin="x").exit_code == 3
    both = invoke("chat", "-c", "--resume", chat[:6], stdin="x")
    assert both.exit_code == 2 and "-c continues the last chat and --resume the one you name" in both.stderr


def test_piped_input_follows_preset_and_think(invoke: Invoke, empty_home: Path) -> None:
    assert invoke("config", "set", "presets.exact.temperature", "0.125").exit_code == 0
    assert invoke("config", "set", "presets.exact.model", "fake-b").exit_code == 0
    answer = valid(invoke("chat", "--preset", "exact", "--json", stdin="x").stdout, "run-1")
    assert (answer["model"], answer["params"]["temperature"]) == ("fake-b", 0.125)
    assert invoke("chat", "--preset", "nosuch", stdin="x").exit_code == 2
    assert invoke("chat", "--think", "nosuch", stdin="x").exit_code == 2


def test_piped_input_cannot_agree_to_calls(invoke: Invoke) -> None:
    result = invoke("chat", "fake", "--mcp", "servers.json", stdin="x")
    assert result.exit_code == 2 and "--yes-tools" in result.stderr and not result.stdout


def test_nothing_on_stdin_exits_2(invoke: Invoke) -> None:
    assert invoke("chat", "fake", stdin="").exit_code == 2
    assert process("chat", "fake").returncode == 2


class Line:
    """A chat behind a pseudo-terminal for stdin and stdout; stderr is a file."""

    def __init__(
        self,
        tmp_path: Path,
        *words: str,
        env: dict[str, str] | None = None,
        stderr_tty: bool = False,
        model: str = "fake",
    ) -> None:
        self.errors = tmp_path / "stderr"
        self.terminal, other = pty.openpty()
        environ = dict(os.environ) | {"LOCALLLM_ENGINE": "fake:tps=0:load=0", "TERM": "xterm"} | (env or {})
        with self.errors.open("wb") as file:
            self.child = subprocess.Popen(
                [*LOCALLLM, "chat", model, *words], stdin=other, stdout=other, stderr=other if stderr_tty else file,
                env=environ, start_new_session=True,
            )  # fmt: skip
        os.close(other)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 20, times: int = 1) -> str:
        """Read until `text` was printed, so often."""
        end = time.monotonic() + seconds
        while (self.seen + self.errors.read_text()).count(text) < times:
            assert time.monotonic() < end, self.seen + self.errors.read_text()
            if select.select([self.terminal], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.terminal, 65536).decode(errors="replace")
                    self.seen = self.seen.replace("\x1b[?2004l\r", "")  # readline ends its wait for pasted text
                except OSError:  # the child closed the terminal: what it said last is already in the file
                    assert text in self.seen + self.errors.read_text(), self.seen + self.errors.read_text()
        return self.seen

    def send(self, text: str) -> None:
        """Type."""
        os.write(self.terminal, text.encode())

    def end(self) -> int:
        """Wait for the process."""
        code = self.child.wait(20)
        os.close(self.terminal)
        return code


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    """stderr is no terminal, so line mode is chosen by itself."""
    started = Line(tmp_path)
    yield started
    if started.child.poll() is None:
        started.child.kill()
        started.child.wait()


def test_line_mode_answers_commands_and_ends_at_ctrl_d(line: Line) -> None:
    line.wait_for("/help for commands")
    line.wait_for("> ")
    line.send("hello you\n")
    line.wait_for("tok/s")
    line.send("/set temp 0.3\n")
    line.wait_for("temperature = 0.3")
    line.send("/nope\n")
    line.wait_for("unknown command /nope")
    line.send("//literal\n")
    line.wait_for("/literal\r\n")
    line.send("one\\\n")
    line.wait_for("... ")
    line.send("two\n")
    line.wait_for("one\r\ntwo\r\n")
    for _ in range(40):  # between two prompts the terminal is not ours, and the key may be lost
        if "3 turns" in line.errors.read_text():
            break
        line.send("\x04")
        time.sleep(0.3)
    assert line.end() == 0
    text = line.errors.read_text()
    assert "3 turns" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--serve"], "--serve needs a chat that runs its own model"),
        (["--serve", "--web"], "--serve needs a chat that runs its own model"),
        (["--serve", "--attach-to", "http://127.0.0.1:9"], "--serve needs a chat that runs its own model"),
    ],
)
def test_serve_needs_an_engine_of_this_chat(invoke: Invoke, words: list[str], says: str) -> None:
    result = invoke("chat", "fake", *words, stdin="hello")
    assert result.exit_code == 2 and says in result.stderr


def test_line_mode_goes_on_where_nothing_can_be_served(tmp_path: Path) -> None:
    one = Line(tmp_path, "--serve")
    one.wait_for("the scripted engine has no server")
    one.wait_for("> ")
    one.send("/serve 99999\n")
    one.wait_for("/serve must be followed by a port up to 65535 or off")
    one.send("/quit\n")
    assert one.end() == 0


@pytest.mark.slow
def test_line_mode_serves_its_own_model(tmp_path: Path) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
    import tiny_models

    path = tiny_models.tiny_gguf(tmp_path / "tiny.gguf", "Q8_0")
    one = Line(tmp_path, "--serve", "0", env={"LOCALLLM_ENGINE": ""}, model=str(path))
    one.wait_for("until the chat is closed", 60)
    url = re.search(r"http://127\.0\.0\.1:\d+/v1", one.errors.read_text())
    assert url is not None
    listed = httpx.get(f"{url[0]}/models", timeout=30, trust_env=False).json()
    assert [row["id"] for row in listed["data"]] == ["tiny.gguf"]
    one.send("/serve off\n")
    one.wait_for("stopped serving")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url[0]}/models", timeout=30, trust_env=False)
    one.send("/quit\n")
    assert one.end() == 0


def test_ctrl_c_stops_an_answer_and_twice_leaves(tmp_path: Path) -> None:
    chat = Line(tmp_path, env={"LOCALLLM_ENGINE": "fake:tps=50:load=0"})
    chat.wait_for("> ")
    chat.send("long\n")
    chat.wait_for("Sentence number 0")
    chat.child.send_signal(2)
    chat.wait_for("stopped by you")
    chat.wait_for("> ", times=2)
    press_ctrl_c(chat, "Ctrl+C again")
    press_ctrl_c(chat, "Continue:")
    assert chat.end() == 0


def press_ctrl_c(chat: Line, until: str) -> None:
    """Until `until` is said. input() sees a signal that comes between its prompt and its wait only with the next one,
    two at the same moment are one, as for a finger, and one too many would end a process that ends."""
    for _ in range(20):
        chat.child.send_signal(2)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            if until in chat.errors.read_text():
                return
            time.sleep(0.05)
    raise AssertionError(chat.errors.read_text())


def test_line_mode_saves_and_goes_on(tmp_path: Path) -> None:
    env = {"LOCALLLM_HOME": str(tmp_path / "home")}
    first = Line(tmp_path, env=env)
    first.wait_for("> ")
    for said, seen in (("hello\n", "tok/s"), ("/rename My talk\n", "renamed"), ("/regen\n", "↓"), ("/ctx\n", "free")):
        first.send(said)
        if seen != "↓":
            first.wait_for(seen)
    first.send("/frob\n/quit\n")
    first.wait_for("Saved “My talk”")
    assert first.end() == 0
    second = Line(tmp_path, "-c", env=env)
    second.wait_for("resumed “My talk”")
    second.send("/undo\n")
    second.wait_for("removed the last question")
    second.send("/quit\n")
    assert second.end() == 0


def test_a_failing_turn_does_not_end_the_chat(line: Line) -> None:
    line.wait_for("> ")
    line.send("!error\n")
    line.wait_for("[E101]")
    line.send("still here\n")
    line.wait_for("tok/s")
    line.send("/quit\n")
    assert line.end() == 0


def test_typed_sampling_goes_before_what_a_resumed_chat_had(tmp_path: Path) -> None:
    from localllm.cli.session import Sampling
    from localllm.cli.start import new_start
    from localllm.config import load_config
    from localllm.history.records import SavedChat
    from localllm.history.store import History

    settings = tmp_path / "config.toml"
    settings.write_text("[sampling]\ntemperature = 0.3\ntop_p = 0.5\n")
    kept = {"sampling": {"temperature": 0.9, "top_p": 0.8, "top_k": 7}}
    with History() as history:
        history.save(SavedChat("chat-of-typed-sampling", "kept", "m", "", kept), [])
    config = load_config(path=settings, flags={"sampling.temperature": 0.0})
    start = new_start(config, Sampling(config.sampling.given()), "", "chat-of-typed-sampling")
    assert start.sampling.given == {"temperature": 0.0, "top_p": 0.8, "top_k": 7}


def test_term_dumb_is_line_mode_on_a_terminal(tmp_path: Path) -> None:
    chat = Line(tmp_path, env={"TERM": "dumb"}, stderr_tty=True)
    chat.wait_for("/help for commands")
    chat.wait_for("> ")
    chat.send("/quit\n")
    assert chat.end() == 0
    assert "\x1b" not in chat.seen


def test_a_base_model_is_told_apart(tmp_path: Path) -> None:
    environ = dict(os.environ) | {"LOCALLLM_ENGINE": "fake:tps=0:load=0", "TERM": "dumb"}
    fd, other = pty.openpty()
    run = subprocess.run([*LOCALLLM, "chat", "fake-base"], stdin=other, capture_output=True, timeout=30, env=environ)
    os.close(other)
    os.close(fd)
    assert run.returncode == 2
    assert b"base model" in run.stderr and b"localllm run fake-base" in run.stderr


def test_a_model_named_by_a_path_has_a_name_for_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = choice_of(Resolved("./m.gguf", "./m.gguf", "path", Path("m.gguf")))
    assert (chosen.name, chosen.shown, chosen.quant) == (str(tmp_path / "m.gguf"), "m.gguf", None)
    assert choice_of(Resolved("./m-q4_k_m.gguf", "", "path", Path("m-q4_k_m.gguf"))).quant == "Q4_K_M"


@pytest.mark.skipif("libedit" in str(readline.__doc__), reason="libedit does not know pasted from typed text")
def test_pasted_lines_are_one_message_and_ctrl_c_drops_them_all(line: Line, tmp_path: Path) -> None:
    line.wait_for("\x1b[?2004h> ")  # this asks the terminal to mark pasted text
    line.send("\x1b[200~/nope\rtwo\r\x1b[201~")
    line.wait_for("two")
    time.sleep(0.3)  # while readline draws, Python takes no notice of a signal until the next key
    os.kill(line.child.pid, signal.SIGINT)
    line.wait_for("Ctrl+C again")
    line.wait_for("> ", times=2)
    line.send("\x1b[200~three\rfour\x1b[201~\r")
    line.wait_for("tok/s")
    assert "unknown command" not in line.errors.read_text()
    line.send(f"/export md {tmp_path}/out.md\n")
    line.wait_for("wrote ")
    assert "three\nfour" in (tmp_path / "out.md").read_text()
    line.send("/quit\n")
    assert line.end() == 0


def test_the_full_screen_opens_keeps_descriptor_2_off_it_and_leaves_a_clean_terminal(tmp_path: Path) -> None:
    import fcntl
    import struct
    import termios

    home = tmp_path / "home"
    chat = Line(tmp_path, env={"LOCALLLM_HOME": str(home)}, stderr_tty=True)
    fcntl.ioctl(chat.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 34, 118, 0, 0))
    chat.wait_for("for commands")
    assert "\x1b[?1049h" in chat.seen
    chat.send("hello\r")
    chat.wait_for("↑ 2")
    chat.send("!fd2\r")
    chat.wait_for("↑ 6")
    chat.send("\x04")
    chat.wait_for("Continue: localllm chat -c")
    assert chat.end() == 0
    assert "\x1b[?1049l" in chat.seen
    assert "CORRUPT" not in chat.seen
    assert "CORRUPT" in (home / "state/log/localllm.log").read_text()


def test_an_address_is_not_ignored_where_there_is_no_terminal(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from localllm.cli import main; main()",
        "chat",
        "--attach-to",
        "http://127.0.0.1:9",
    ]
    env = dict(os.environ) | {"LOCALLLM_HOME": str(tmp_path)}
    done = subprocess.run(command, input="hi", capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 8 and "no server answers at http://127.0.0.1:9" in done.stderr and not done.stdout


def test_documents_are_measured_before_they_are_sent(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<h1>Pipes</h1>")
    (tmp_path / "note.txt").write_text("a note")
    one = Line(tmp_path, "--plain", "--attach", str(tmp_path / "page.html"))
    one.wait_for("> ")
    one.send(f"what is @{tmp_path}/note.txt\n")
    one.wait_for("page.html, note.txt: ")
    one.wait_for("# Pipes")
    one.wait_for("a note")
    one.send("what is @no.txt\n")
    one.wait_for("no such file: no.txt; the name is sent as text")
    one.send("/quit\n")
    assert one.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_there_is_of_an_answer_is_kept_when_the_process_is_told_to_end(
    number: signal.Signals, tmp_path: Path
) -> None:
    env = {"LOCALLLM_ENGINE": "fake:tps=40:load=0", "LOCALLLM_HOME": str(tmp_path)}
    one = Line(tmp_path, "--plain", env=env)
    one.wait_for("> ")
    one.send("one two three " * 100 + "\n")
    one.wait_for("\none two three")
    os.kill(one.child.pid, number)
    assert one.end() == 128 + number
    with History(tmp_path / "data/chats.db") as history:
        question, answer = history.messages(history.find("last").id)
    assert (question.role, answer.role, answer.status) == ("user", "assistant", "partial")
    assert answer.content and question.content.startswith(answer.content) and answer.content != question.content
