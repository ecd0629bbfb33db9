"""`run`: what goes where, in which form, with which code."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from localllm.backend.script import ANSWERS
from localllm.backend.scripted import FakeBackend
from localllm.cli.commands import COMMANDS

from .conftest import LOCALLLM, Invoke, process, valid, validator


def test_the_answer_alone_is_on_stdout(invoke: Invoke) -> None:
    result = invoke("run", "fake", "hello", "there", "--stats", "--trace")
    assert re.search(r"\[start \d+\.\d\d s, .*first token \d\.\d\d s, total \d+\.\d\d s\]", result.stderr)
    assert result.stdout == "hello there\n"
    assert "[4 tokens, " in result.stderr and "tok/s" in result.stderr
    one = invoke("run", "fake", "hi", "--stats").stderr
    assert "[1 token, TTFT" in one  # which has no pace


def test_json_is_valid_and_alone(invoke: Invoke) -> None:
    result = invoke("run", "fake", "hi", "--json", "--temp", "0.5", "--seed", "7", "--stop", "###")
    value = valid(result.stdout, "run-1")
    assert value["output"][0]["text"] == "hi"
    assert value["params"]["temperature"] == 0.5
    assert value["params"]["seed"] == 7
    assert value["params"]["stop"] == ["###"]


def test_stdin_comes_first(invoke: Invoke) -> None:
    assert invoke("run", "fake", "x", stdin="hi\n").stdout == "hi\n\nx\n"
    assert invoke("run", "fake", "-", stdin="only this\n").stdout == "only this\n"


@pytest.mark.parametrize("words", [("-",), (), ("",), ("  ",)])
def test_nothing_to_say_exits_2(invoke: Invoke, words: tuple[str, ...]) -> None:
    result = invoke("run", "fake", *words, stdin="")
    assert result.exit_code == 2
    assert "no prompt" in result.stderr


def test_files_stand_between_stdin_and_prompt(invoke: Invoke, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_bytes(b"from a file \xff\n")
    assert invoke("run", "fake", "x", "-f", str(note), stdin="a").stdout == "a\n\nfrom a file \ufffd\n\nx\n"
    assert invoke("run", "fake", "x", "-f", str(tmp_path / "none")).exit_code == 2


def test_a_folder_goes_before_the_prompt_as_far_as_it_fits(invoke: Invoke, tmp_path: Path) -> None:
    for name in ("pumps", "valves"):
        (tmp_path / f"{name}.txt").write_text(f"About {name}. " + "filler " * 150)
    (tmp_path / "page.html").write_text("<h1>Pipes</h1><script>x</script>")
    result = invoke("run", "fake", "And the valves?", "-f", str(tmp_path), "-f", str(tmp_path / "page.html"))
    assert result.exit_code == 0 and "About pumps" in result.stdout and "# Pipes" in result.stdout
    assert result.stdout.endswith("\n\nAnd the valves?\n") and "317 tokens, 32k free" in result.stderr
    result = invoke("run", "fake-small", "And the valves?", "-f", str(tmp_path))
    assert result.exit_code == 9, "64 tokens have no room for it"
    assert "312 tokens, 37 free" in result.stderr


def test_a_picture_goes_with_the_prompt(invoke: Invoke, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    words = "run", "fake", "what is it?", "--json"
    alone, told, cut = (
        json.loads(invoke(*words, *more).stdout)
        for more in ((), ("-a", str(tmp_path / "a.png")), ("-a", str(tmp_path / "a.png"), "--truncate", "head"))
    )
    prompts = [one["usage"]["prompt"] for one in (alone, told, cut)]
    assert prompts == [prompts[0], prompts[0] + 16, prompts[0] + 16]
    piped = invoke("chat", "fake", "-a", str(tmp_path / "a.png"), stdin="hello")
    assert piped.stdout == "hello\n" and "a.png: 16 tokens" in piped.stderr
    refused = invoke("run", "fake-base", "what is it?", "-a", str(tmp_path / "a.png"))
    assert refused.exit_code == 2 and "a.png is an image, and fake-base reads text only" in refused.stderr


def test_system_may_come_from_a_file(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("be brief")
    assert invoke("run", "fake", "x", "-s", f"@{tmp_path / 's.txt'}").exit_code == 0
    assert invoke("run", "fake", "x", "-s", f"@{tmp_path / 'none'}").exit_code == 2


def test_samples_take_following_seeds(invoke: Invoke) -> None:
    result = invoke("run", "fake", "hi", "-n", "3", "--json", "--seed", "5")
    assert [one["text"] for one in valid(result.stdout, "run-1")["output"]] == ["hi"] * 3
    assert invoke("run", "fake", "hi", "-n", "2").stdout == "hi\n\n---\n\nhi\n"


def test_thinking_is_left_out_off_a_terminal(invoke: Invoke) -> None:
    assert invoke("run", "fake", "!think").stdout == "The answer is 42.\n"
    assert invoke("run", "fake", "!think", "--show-thinking").stdout.startswith("First I look")
    assert valid(invoke("run", "fake", "!think", "--json").stdout, "run-1")["output"][0]["reasoning"].startswith(
        "First"
    )


def test_strict_exits_10_when_cut(invoke: Invoke) -> None:
    result = invoke("run", "fake", "long", "--max-tokens", "5", "--strict")
    assert result.exit_code == 10
    assert invoke("run", "fake", "long", "--max-tokens", "5").exit_code == 0
    for more in (["--strict"], ["--schema", '{"type": "string"}']):
        result = invoke("run", "fake", "long", "--max-tokens", "5", "--json", *more)
        assert result.exit_code == 10 and "was truncated at 5 tokens" in result.stderr
        assert valid(result.stdout, "run-1")["output"][0]["stop"] == "length"
    full = invoke("run", "fake-small", "long", "--ctx", "64", "--strict")  # no --max-tokens could make room
    assert full.exit_code == 10 and "context window" in full.stderr and "--max-tokens" not in full.stderr
    assert "truncated at 1 token " in invoke("run", "fake", "long", "--max-tokens", "1", "--strict").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--preset", "nope"), "try   `localllm config set presets.nope.temperature 0.2` creates it"),
        (("-c",), "no chat has been saved yet"),
        (
            ("--stop", ""),
            "stop must be strings of at least one character, not an empty string   [E202]\n  try   choose ",
        ),
        (("--temp", "abc"), "invalid value for '--temp' / '--temperature': it must be a valid number, not abc   ["),
        (("--temp", ""), "it must be a valid number, not ''   ["),
        (("-n", "0"), "invalid value for '-n': it must be greater than or equal to 1, not 0   ["),
        (
            ("--grammar", "/dev/null"),
            "--grammar: /dev/null is empty   [E201]\n  try   write a Lark or GBNF grammar into it",
        ),
    ],
)
def test_what_cannot_be_is_said_in_words(invoke: Invoke, empty_home: Path, words: tuple[str, ...], said: str) -> None:
    assert said in invoke("run", "fake", "hi", *words).stderr


def test_a_base_model_completes_text(invoke: Invoke) -> None:
    assert invoke("run", "fake-base", "Once upon a time").exit_code == 0


def test_stream_events(invoke: Invoke) -> None:
    result = invoke("run", "fake-download", "one two", "--json", "--stream", "--progress", "none")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    for line in lines:
        validator("events-1").validate(line)
    done = [line["done"] for line in lines if line["event"] == "download"]
    assert done == sorted(done)
    assert "".join(line["text"] for line in lines if line["event"] == "token") == "one two"
    assert [line["event"] for line in lines if line["event"] in ("ready", "done")] == ["ready", "done"]
    assert lines[-1]["event"] == "done"
    times = [line["t"] for line in lines]
    assert times == sorted(times)


def test_progress_json_is_on_stderr(invoke: Invoke) -> None:
    result = invoke("run", "fake-download", "hi", "--progress", "json")
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    for line in lines:
        validator("events-1").validate(line)
    assert result.stdout == "hi\n"


@pytest.mark.parametrize(
    ("model", "prompt", "code", "number"),
    [
        ("fake-missing", "x", 3, "E301"),
        ("fake-gated", "x", 4, "E401"),
        ("fake-huge", "x", 5, "E501"),
        ("fake", "!oom", 5, "E502"),
        ("fake", "!full", 9, "E901"),
        ("fake", "!error", 1, "E101"),
        ("fake-crash", "x", 1, "E101"),
    ],
)
def test_failures_have_codes_and_commands(invoke: Invoke, model: str, prompt: str, code: int, number: str) -> None:
    result = invoke("run", model, prompt, "--json")
    assert result.exit_code == code
    assert f"[{number}]" in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 9  # a line of progress, and at most eight
    error = valid(result.stdout, "error-1")["error"]
    assert (error["code"], error["exit"]) == (number, code)
    if code in (3, 5, 9) and error["fixes"]:
        for fix in error["fixes"]:
            words = fix["cmd"].split()
            assert words[0] != "localllm" or words[1] in [name for name, *_ in COMMANDS]
            if words[0] == "localllm":
                assert invoke(*words[1:2], "-h").exit_code == 0


def test_what_a_terminal_gets_is_harmless() -> None:
    """Run behind a real pseudo-terminal: none of the bytes the model sent may be obeyed."""
    import os
    import pty

    pid, fd = pty.fork()
    if pid == 0:
        os.environ["LOCALLLM_ENGINE"] = "fake:tps=0:load=0"
        os.environ["NO_COLOR"] = "1"
        os.execv(LOCALLLM[0], [*LOCALLLM, "run", "fake", "!escape", "--progress", "none"])
    data = b""
    try:
        while piece := os.read(fd, 65536):
            data += piece
    except OSError:
        pass  # the other side is closed
    os.waitpid(pid, 0)
    os.close(fd)
    text = data.decode()
    assert "over" in text and "end" in text
    for bad in ("\x1b", "\x07", "\x9b", "\u202e"):
        assert bad not in text
    assert text.count("\r") == text.count("\r\n")  # the terminal's own line ends
    assert text.count("\u0301") <= 16
    assert "[red]literal[/red]" in text and "[link=file:///etc/passwd]" in text


def test_a_pipe_gets_the_text_verbatim() -> None:
    assert process("run", "fake", "!escape").stdout.decode() == ANSWERS["!escape"] + "\n"


def test_markdown_goes_through_a_pipe_untouched(invoke: Invoke) -> None:
    assert invoke("run", "fake", "!md").stdout == ANSWERS["!md"]


def test_a_closed_pipe_is_quiet() -> None:
    import os

    env = dict(os.environ) | {"LOCALLLM_ENGINE": "fake:tps=500:load=0"}
    child = subprocess.Popen(
        [*LOCALLLM, "run", "fake", "long", "--stream"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL, env=env,
    )  # fmt: skip
    assert child.stdout and child.stderr
    child.stdout.read(1)
    child.stdout.close()
    errors = child.stderr.read()
    assert child.wait(30) == 141
    assert b"Traceback" not in errors and b"Exception" not in errors
    child.stderr.close()


@pytest.mark.parametrize("words", [("--version",), ("ls", "-h"), ()])
def test_help_for_a_closed_pipe_is_quiet(words: tuple[str, ...]) -> None:
    import os

    read, write = os.pipe()
    os.close(read)
    result = process(*words, stdout=write)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_at_once(number: signal.Signals, code: int) -> None:
    import os

    env = dict(os.environ) | {"LOCALLLM_ENGINE": "fake:tps=50:load=0"}
    child = subprocess.Popen(
        [*LOCALLLM, "run", "fake", "long", "--stream"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL, env=env,
    )  # fmt: skip
    assert child.stdout
    child.stdout.read(8)
    start = time.monotonic()
    child.send_signal(number)
    out, errors = child.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert child.returncode == code
    assert b"Traceback" not in errors
    if number == signal.SIGINT:
        assert b"stopped" in errors


# --- bound, cut, extracted, kept -------------------------------------------------------------------------------------


def test_the_code_block_of_an_answer(invoke: Invoke) -> None:
    code = "def double(x):\n    return [2 * x]  # [red]not markup[/red]\n"
    assert invoke("run", "fake", "!md", "-x").stdout == code
    assert invoke("run", "fake", "!md", "--extract-lang", "Python").stdout == code
    assert valid(invoke("run", "fake", "!md", "-x", "--json").stdout, "run-1")["output"][0]["text"] == code.rstrip("\n")
    for words in (("hi", "-x"), ("!md", "--extract-lang", "rust")):
        missing = invoke("run", "fake", *words)
        assert (missing.exit_code, missing.stdout) == (10, "")
        assert "code block" in missing.stderr
    assert invoke("run", "fake", "!md", "-x", "--stream").exit_code == 2


@pytest.mark.parametrize("side", ["head", "middle"])
def test_what_is_too_long_is_cut_when_allowed(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    sent: list[str] = []
    send = FakeBackend.send

    def noted(backend: FakeBackend, messages: Any, *more: Any, **named: Any) -> int:
        sent.append(messages[-1]["content"])
        return send(backend, messages, *more, **named)

    monkeypatch.setattr(FakeBackend, "send", noted)
    lines = "\n".join(str(n) for n in range(400))
    refused = invoke("run", "fake-small", "the end", stdin=lines)
    assert refused.exit_code == 9
    result = invoke("run", "fake-small", "the end", "--truncate", side, stdin=lines)
    assert result.exit_code == 0
    assert "characters left out" in sent[-1] and sent[-1].endswith("the end")
    assert sent[-1].startswith("0\n1\n") == (side == "middle")
    assert "the prompt was truncated from 402 to" in result.stderr
    whole = invoke("run", "fake", "the end", "--truncate", side, stdin="short")
    assert whole.stdout == "short\n\nthe end\n" and "truncated" not in whole.stderr


def test_instructions_that_leave_no_room_are_said(invoke: Invoke) -> None:
    result = invoke("run", "fake-small", "the end", "-s", "word " * 100, "--truncate", "head")
    assert result.exit_code == 9
    assert "--system" in result.stderr


def test_cut_text_counts_no_more_than_the_room() -> None:
    from localllm.cli.question import shortened
    from localllm.request import Message

    def count(text: str) -> int:
        return len(text.split())

    for words in (10, 499, 500, 5_000, 100_000):
        messages = [Message(role="system", content="be brief"), Message(role="user", content="word " * words)]
        for side in ("head", "middle"):
            cut, before, after = shortened(messages, 800, 100, side, count)
            assert before == words
            assert after == count(cut[-1]["content"]) <= 800 - 100 - 100 - 6 - 2
            assert cut[0] == messages[0]
            assert (cut[-1] == messages[-1]) is (words <= 592)
            if words > 592:
                assert after > 500  # most of the room is used
    many = [Message(role="user", content="hi")] * 40
    *_, after = shortened([*many, Message(role="user", content="word " * 5_000)], 800, 100, "head", count, 32)
    assert 0 < after + 40 + 5 * 41 + 32 <= 800 - 100  # with what ChatML adds to each, and a picture


def test_a_bound_answer(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type": "object"}')
    (tmp_path / "g.lark").write_text('start: "yes" | "no"')
    assert invoke("run", "fake", "x", "--schema", str(tmp_path / "s.json")).exit_code == 0
    assert invoke("run", "fake", "x", "--grammar", str(tmp_path / "g.lark")).exit_code == 0
    for words in (
        ("--schema", "{"), ("--schema", "[1]"), ("--schema", str(tmp_path / "none")), ("--grammar", str(tmp_path)),
        ("--schema", "{}", "--grammar", str(tmp_path / "g.lark")),
    ):  # fmt: skip
        assert invoke("run", "fake", "x", *words).exit_code == 2
    cut = invoke("run", "fake", "long", "--schema", "{}", "--max-tokens", "5")
    assert cut.exit_code == 10  # half of a JSON text is none


def test_constraints_reach_the_engine(tmp_path: Path) -> None:
    from localllm.cli.question import constraint_of
    from localllm.request import Constraint

    (tmp_path / "g").write_text("root ::= [0-9]+")
    assert constraint_of('{"type": "null"}', None) == Constraint("json_schema", {"type": "null"}, param="--schema")
    assert constraint_of(None, tmp_path / "g") == Constraint("grammar", "root ::= [0-9]+", param="--grammar")
    assert constraint_of(None, None) is None


def test_a_run_can_be_kept_and_gone_on_with(invoke: Invoke, empty_home: Path) -> None:
    assert invoke("run", "fake", "nothing kept").exit_code == 0
    assert invoke("run", "fake", "x", "-c").exit_code == 3  # so there is nothing to go on with
    first = invoke("run", "fake", "one", "--log", "-s", "be brief")
    assert first.stdout == "one\n" and "localllm logs show" in first.stderr
    more = valid(invoke("run", "fake", "two", "-c", "--json", "-n", "2").stdout, "run-1")
    assert more["usage"]["prompt"] > 2  # what was said before went along
    assert invoke("run", "fake", "three", "-c", "--no-log").exit_code == 0
    chats = json.loads(invoke("logs", "list", "--json").stdout)["chats"]
    assert len(chats) == 1
    shown = json.loads(invoke("logs", "show", "last", "--json").stdout)["chat"]
    texts = [message["content"] for message in shown["messages"]]
    assert sorted(texts) == ["one", "one", "two", "two", "two"]  # two answers to the second question


@pytest.mark.parametrize("content", [b"\x7fELF\x00\x01", b"%PDF-1.7 text"])
def test_a_binary_file_is_refused(invoke: Invoke, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "thing").write_bytes(content)
    done = invoke("run", "fake", "hi", "-f", str(tmp_path / "thing"))
    assert done.exit_code == 2 and "thing is not text" in done.stderr


def test_with_progress_json_stderr_is_json_alone(invoke: Invoke, tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text("nonsense = 1\n")
    done = invoke("run", "fake", "hi", "--stats", "--log", "--progress", "json", "--config", str(settings))
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert {event["event"] for event in events} >= {"warning", "note", "ready"}
    for event in events:
        validator("events-1").validate(event)
    failed = invoke("run", "fake", "hi", "--truncate", "often", "--progress", "json")
    (event,) = [json.loads(line) for line in failed.stderr.splitlines()]
    validator("events-1").validate(event)
    assert (event["event"], event["code"]) == ("error", "E201")


def test_kernels_are_for_verbose_runs() -> None:
    from localllm.boot.boot import kernel_words
    from localllm.interface import Facts

    line = "m · Q4_1 · cpu × 2 threads · ctx 8,192 · matmuls c_int16, attention c · profile pending"
    assert Facts(run_summary=line).brief == "m · Q4_1 · cpu × 2 threads · ctx 8,192"
    assert Facts(run_summary=f"{line} · via http://x", url="http://x").brief.endswith("ctx 8,192 · via http://x")
    mixed = kernel_words({"qkv": "c_int16", "lm_head": "c_float32", "attention": "c"})
    assert Facts(run_summary=f"m · ctx 8,192 · {mixed} · profile pending").brief == "m · ctx 8,192"
    assert Facts(run_summary="m · via http://x", url="http://x").brief == "m · via http://x"
