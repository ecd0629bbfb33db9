"""Tools of an MCP server in the line mode and in `run`: what is asked, what runs, what is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("mcp")

from localllm.conversation.storage import restored
from localllm.history.store import History

from .conftest import LOCALLLM, Invoke, valid
from .test_chat import Line

ROGUE = Path(__file__).parents[1] / "chat" / "mcp" / "rogue_server.py"


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": {"rogue": {"command": sys.executable, "args": [str(ROGUE)]}}}))
    return file


@pytest.mark.slow
def test_every_call_is_asked_for_until_it_is_allowed(tmp_path: Path, servers: Path) -> None:
    line = Line(tmp_path, "--plain", "--mcp", str(servers))
    line.wait_for("/tools lists them, and every call needs your approval")
    assert "skipping the tool list_schema" in line.seen + line.errors.read_text()
    line.send('!call echo {"text": "one two"}' + "\n")
    line.wait_for('call  echo  {"text": "one two"}')
    line.wait_for("run it?")
    line.send("maybe" + "\n")
    line.wait_for("run it?", times=2)
    line.send("a" + "\n")
    line.wait_for("→ one two")
    line.send('!call echo {"text": "!call long {}"}' + "\n")
    line.wait_for("run it?", times=3)
    assert line.seen.count("call  echo") + line.errors.read_text().count("call  echo") == 2, "allowed: not asked again"
    line.send("v" + "\n")
    line.wait_for("✗ the user refused this call")
    line.wait_for("the user refused this call", times=2)  # what the scripted model makes of it
    line.send("!call long {}\n/tools" + "\n")
    line.wait_for("✗ the user does not allow this tool")
    line.wait_for("echo  (rogue, always runs)")
    line.send('!call echo {"text": "!call nosuch"}' + "\n")
    line.wait_for("✗ unknown tool nosuch")
    line.send("/quit\n")
    assert line.end() == 0
    with History() as history:  # calls and results are there for the next time
        chat = history.find("last")
        talk = restored(chat, history.messages(chat.id))
    first, *_, last = talk.exchanges
    assert (first.text, [c.result for c in first.rounds[0].calls]) == ("one two", ["one two"])
    assert talk.messages(last)[-1] == {
        "role": "tool",
        "tool_call_id": "call_0",
        "name": "nosuch",
        "content": "unknown tool nosuch",
    }
    assert talk.messages(last)[1]["tool_calls"][0]["function"]["arguments"] == '{"text": "one two"}'


def test_run_calls_only_what_was_allowed(invoke: Invoke, servers: Path) -> None:
    asked = """!call echo {"text": "!call long {}"}"""
    result = invoke("run", "fake", asked, "--mcp", str(servers), "--yes-tools", "echo", "--json")
    assert result.exit_code == 0, result.stderr
    made = valid(result.stdout, "run-1")["output"][0]
    assert [(one["name"], one["result"], one["failed"]) for one in made["tool_calls"]] == [
        ("echo", "!call long {}", False),
        ("long", "unknown tool long", True),
    ]
    assert made["text"] == "unknown tool long"
    assert "call  echo" in result.stderr
    result = invoke("run", "fake", "!call fail {}", "--mcp", str(servers), "--yes-tools", "fail", "--json", "--stream")
    events = [valid(line, "events-1") for line in result.stdout.splitlines()[:-1]]
    shown = [one for one in events if one["event"] == "tool_result"]
    assert [(one["name"], one["result"], one["failed"]) for one in shown] == [("fail", "no such file", True)]
    result = invoke("run", "fake", "!call fail {}", "--mcp", str(servers), "--yes-tools", "fail")
    assert (result.exit_code, result.stdout) == (0, "no such file\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mcp", "FILE"], "--mcp needs --yes-tools"),
        (["--yes-tools", "echo"], "--yes-tools needs MCP servers"),
        (["--mcp", "FILE", "--yes-tools", "echo", "-n", "2"], "-n and --yes-tools"),
        (["--mcp", "FILE", "--yes-tools", "nosuch"], "unknown tool"),
        (["--mcp", "/no/such/file", "--yes-tools", "echo"], "cannot be read"),
    ],
)
def test_run_without_a_tool_that_may_be_called(invoke: Invoke, servers: Path, words: list[str], says: str) -> None:
    result = invoke("run", "fake", "hello", *(str(servers) if word == "FILE" else word for word in words))
    assert result.exit_code == 2 and says in result.stderr


def test_a_wrong_server_in_the_settings_leaves_the_others(invoke: Invoke, tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text(
        f"[mcp.servers.rogue]\ncommand = {sys.executable!r}\nargs = [{str(ROGUE)!r}]\n[mcp.servers.bad]\nargs = 3\n"
    )
    result = invoke("--config", str(settings), "run", "fake", '!call echo {"text": "hi"}', "--yes-tools", "echo")
    assert (result.exit_code, result.stdout) == (0, "hi\n"), result.stderr
    assert "bad: args must be a list of strings; skipping this server" in result.stderr


@pytest.mark.parametrize(
    ("times", "words"),
    [(1, ["--json"]), pytest.param(1, [], marks=pytest.mark.slow), pytest.param(2, [], marks=pytest.mark.slow)],
)
def test_ctrl_c_ends_run_and_its_tool(tmp_path: Path, servers: Path, times: int, words: list[str]) -> None:
    asked = ["!call hang {}", "--mcp", str(servers), "--yes-tools", "hang", *words]
    said = tmp_path / "stderr"
    with said.open("wb") as errors:
        child = subprocess.Popen(
            [*LOCALLLM, "run", "fake", *asked], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            env=dict(os.environ) | {"LOCALLLM_ENGINE": "fake:tps=0:load=0"},
        )  # fmt: skip
    while b"call  hang" not in said.read_bytes():
        assert child.poll() is None
        time.sleep(0.01)
    (tool,) = psutil.Process(child.pid).children()
    child.send_signal(signal.SIGINT)
    while times > 1 and child.poll() is None:  # as somebody does who is impatient
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    if words:
        assert valid(out.decode(), "error-1")["error"]["exit"] == 130
    else:
        assert out == b"" and (times > 1 or b"stopped" in said.read_bytes())
    psutil.wait_procs([tool], timeout=20)
    assert not tool.is_running()


@pytest.mark.slow
def test_ctrl_c_while_a_server_says_nothing_leaves_none_behind(tmp_path: Path, servers: Path) -> None:
    servers.write_text(servers.read_text().replace('rogue_server.py"', 'rogue_server.py", "SILENT"'))
    child = subprocess.Popen(
        [*LOCALLLM, "run", "fake", "hi", "--mcp", str(servers), "--yes-tools", "hang"], stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=dict(os.environ) | {"LOCALLLM_ENGINE": "fake:tps=0:load=0"},
    )  # fmt: skip
    while not (tools := psutil.Process(child.pid).children()):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130
    psutil.wait_procs(tools, timeout=20)
    assert not any(tool.is_running() for tool in tools)


@pytest.mark.slow
def test_ctrl_c_ends_a_call_that_hangs_and_not_the_chat(tmp_path: Path, servers: Path) -> None:
    line = Line(tmp_path, "--plain", "--mcp", str(servers))
    line.wait_for("> ")
    line.send("!call hang {}\n")
    line.wait_for("run it?")
    line.send("y\n")
    line.wait_for("y\r\n")  # between two prompts, so that it is the call that ends
    time.sleep(1)
    line.child.send_signal(signal.SIGINT)
    line.wait_for("> ", times=2)
    line.send("still here\n")
    line.wait_for("still here", times=2)
    line.send("/quit\n")
    assert line.end() == 0
    with History() as history:
        chat = history.find("last")
        talk = restored(chat, history.messages(chat.id))
    assert [one.user for one in talk.exchanges] == ["!call hang {}", "still here"]
