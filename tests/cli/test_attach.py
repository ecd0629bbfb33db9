"""`run` and `chat` use a running server that has or can load the model. The server here says what ours says."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner, Result

from localllm.cli.frame.command import Env, Options
from localllm.cli.names import Choice
from localllm.cli.start import Start
from localllm.config import UserConfig
from localllm.device.processes import Running
from localllm.interface import ChatBackend, Failed
from localllm.request import LoadProgress

from .conftest import Invoke, valid

SAMPLING = {"temperature": [0.6, "card of Tiny"], "top_k": [20, "card of Tiny"]}


class Server(BaseHTTPRequestHandler):
    """A model `tiny` that is loaded when it is asked for, and `base`, which has no chat template."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, dict[str, Any]]] = []
    loaded: set[str] = set()
    refusal = ""
    file = ""  # the path of `tiny`, when it was started with one

    def log_message(self, *words: object) -> None:
        """Quiet."""

    def _json(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _row(self, name: str) -> dict[str, Any]:
        on = name in self.loaded
        meta = {"loaded": on, "chat": name != "base", "quant": "Q4_1", "sampling": SAMPLING if on else {}}
        return {"id": name, "owned_by": "localllm", "max_model_len": 512 if on else 8192, "meta": meta}

    def do_GET(self) -> None:
        rows = [self._row("tiny"), self._row("base")]
        one = next((row for row in rows if self.path == f"/v1/models/{row['id']}"), None)
        if self.file and self.path == f"/v1/models/{quote(self.file)}":
            one = {**rows[0], "id": self.file, "root": "tiny"}
        told = {"truth_line": "tiny · Q4_1", "device": "cpu", "warnings": ["warm"]}
        answers: dict[str, Any] = {
            "/health": {"status": "ok"}, "/v1/models": {"data": rows},
            "/localllm/ps": {"models": [{"model": name, **told} for name in self.loaded], "decode_tps": {"tiny": 83.0}},
        }  # fmt: skip
        found = one or answers.get(self.path)
        self._json(200 if found else 404, found or {"error": {"message": "no", "code": None}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, body))
        if self.path == "/tokenize":
            self.loaded.add(body["model"])
            self._json(200, {"count": len(body["prompt"])})
            return
        if self.refusal:
            self._json(400, {"error": {"message": "no answer fits", "code": self.refusal}})
            return
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        piece = {"text": "there was"} if self.path == "/v1/completions" else {"delta": {"content": "Hello"}}
        timings = {"prompt_per_second": 500.0, "predicted_per_second": 90.0}
        for chunk in (
            {"choices": [{"index": 0, **piece}]},
            {"choices": [{"index": 0, "finish_reason": "stop"}], "timings": timings},
            {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}},
        ):
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    """It runs, and it is the only one of ours that runs."""
    Server.asked, Server.loaded, Server.refusal, Server.file = [], set(), "", ""
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    one = Running(1, "serve", f"http://127.0.0.1:{listening.server_address[1]}", (), 0.0, "token")
    monkeypatch.setattr("localllm.device.processes.running", lambda: [one])
    monkeypatch.delenv("LOCALLLM_ENGINE", raising=False)
    yield Server
    listening.shutdown()
    listening.server_close()
    thread.join()


def run(*words: str, stdin: str = "") -> Result:
    from localllm.cli.frame.program import app

    return CliRunner().invoke(app, list(words), input=stdin)


def test_run_uses_the_server_and_says_so(server: type[Server]) -> None:
    done = run("run", "tiny", "hi", "--stats")
    assert done.exit_code == 0 and done.stdout == "Hello\n"
    assert "using tiny at http://127.0.0.1:" in done.stderr and "warning: warm" in done.stderr
    assert "90.0 tok/s" in done.stderr and "tiny · Q4_1 · via http" in done.stderr
    assert "temperature 0.6, top_k 20 (card of Tiny)" in done.stderr
    assert [path for path, _ in server.asked] == ["/tokenize", "/v1/chat/completions"]


def test_everything_that_run_takes_reaches_the_server(server: type[Server], tmp_path: Path) -> None:
    told = ("--temp", "0.5", "--seed", "7", "-n", "2", "--stop", "END", "--max-tokens", "9", "--think", "low")
    done = run("run", "tiny", "hi", *told, "--schema", '{"type": "integer"}', "-s", "Be brief.", "--json")
    assert json.loads(done.stdout)["quant"] == "Q4_1"
    value = valid(done.stdout, "run-1")
    assert [one["text"] for one in value["output"]] == ["Hello", "Hello"]
    assert value["device"] == "cpu" and value["params"]["ctx"] == 512
    assert (value["params"]["temperature"], value["params"]["top_k"], value["params"]["seed"]) == (0.5, 20, 7)
    bodies = [body for path, body in server.asked if path == "/v1/chat/completions"]
    assert sorted(body["seed"] for body in bodies) == [7, 8]
    body = bodies[0]
    assert body["structured_outputs"] == {"json": {"type": "integer"}} and body["stop"] == ["END"]
    assert body["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."} and body["max_tokens"] == 9
    grammar = tmp_path / "g.gbnf"
    grammar.write_text('root ::= "a"')
    run("run", "tiny", "hi", "--grammar", str(grammar))
    assert server.asked[-1][1]["structured_outputs"] == {"grammar": 'root ::= "a"'}


def test_a_base_model_continues_the_text(server: type[Server]) -> None:
    done = run("run", "base", "Once upon a time")
    assert done.stdout == "there was\n"
    path, body = server.asked[-1]
    assert path == "/v1/completions" and body["prompt"] == "Once upon a time" and "messages" not in body


def test_an_answer_that_no_constraint_allows_exits_10(server: type[Server]) -> None:
    server.refusal = "constraint_unmet"
    assert run("run", "tiny", "hi", "--schema", "{}").exit_code == 10


def test_what_is_piped_into_chat_is_answered_by_the_server(server: type[Server]) -> None:
    done = run("chat", "tiny", stdin="hi")
    assert done.stdout == "Hello\n" and "using tiny at" in done.stderr


@pytest.mark.parametrize(
    "words", [("--ctx", "512"), ("--kv", "int8"), ("--threads", "1"), ("--device", "cpu"), ("--attach-to", "off")]
)
def test_flags_that_say_how_to_load_load_it_here(server: type[Server], words: tuple[str, ...]) -> None:
    done = run("run", "tiny", "hi", *words, "--offline", "--no-input")
    assert done.exit_code == 3 and "using" not in done.stderr and not server.asked


def test_a_temperature_that_no_server_takes_is_taken_here(server: type[Server]) -> None:
    done = run("run", "tiny", "hi", "--temp", "3", "--offline", "--no-input")
    assert "servers accept temperatures up to 2: running the model here" in done.stderr and not server.asked


def test_a_name_of_the_users_own_is_not_the_servers(server: type[Server], tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text('[aliases]\ntiny = "org/other"\n')
    from localllm.cli.attach import can_be_named
    from localllm.config import load_config

    assert not can_be_named(load_config(path=settings), "tiny")
    assert not can_be_named(load_config(), str(settings)) and can_be_named(load_config(), "tiny")


def test_presets_and_thinking_reach_a_run(invoke: Invoke, tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text(
        'sampling.temperature = 0.9\n[presets.strict]\nsystem = "Be brief."\ntemperature = 0.1\ntop_k = 5\n'
    )
    words = ("run", "fake", "hi", "--preset", "strict", "--top-k", "7", "--json", "--config", str(settings))
    params = valid(invoke(*words).stdout, "run-1")["params"]
    assert (params["temperature"], params["top_k"]) == (0.1, 7)
    assert invoke(*words[:4], "gone", *words[5:]).exit_code == 2
    assert invoke("run", "fake", "hi", "--think", "hard").exit_code == 2


def test_a_service_that_waits_is_woken(server: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli import attach
    from localllm.cli.background import Service
    from localllm.device import processes

    (one,) = processes.running()
    monkeypatch.setattr("localllm.device.processes.running", list)
    waiting = Service("systemd", int(one.url.rpartition(":")[2]))
    monkeypatch.setattr(attach, "installed", lambda: waiting)
    monkeypatch.setattr(attach, "wake", lambda found: one if found is waiting else None)
    assert attach.find_server("auto", ("tiny",)) == (one.url, "token", "tiny")
    assert attach.find_server("auto", ("gone",)) is None
    monkeypatch.setattr(attach, "wake", lambda found: None)
    assert attach.find_server("auto", ("tiny",)) is None


def opened(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[str, ChatBackend]:
    """The backend of a chat in full screen with its first model, and what was said meanwhile."""
    from localllm.cli.commands import chat
    from localllm.cli.start import backend_of, session_of

    made: list[ChatBackend] = []

    def screen(env: Env, config: UserConfig, start: Start) -> int:
        made.append(backend_of(env, config, start))
        session_of(env, config, start, made[0])
        return 0

    monkeypatch.setattr(chat, "full_screen", screen)
    monkeypatch.setenv("TEXTUAL_DRIVER", "none")  # as in a browser's tab: no terminal is asked for
    done = run("chat", *words)
    assert made, done.output
    return done.output, made[0]


def started(backend: ChatBackend, model: str) -> list[str]:
    """What a start says until the model is ready or has failed."""
    backend.start(model)
    said: list[str] = []
    end = time.monotonic() + 20
    while time.monotonic() < end:
        events = backend.events()
        event = events.popleft() if events else None
        said += [event.detail] if isinstance(event, LoadProgress) else []
        if isinstance(event, Failed) or (isinstance(event, LoadProgress) and event.name == "ready"):
            return [*said, event.message if isinstance(event, Failed) else "ready"]
        time.sleep(0.002)
    raise AssertionError(said)


def test_every_model_of_a_chat_goes_where_it_is(server: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    output, backend = opened(monkeypatch, "tiny", "--offline")
    assert "using tiny at" in output
    for _ in range(2):  # at the start of the chat, and with /model
        said = started(backend, "tiny")
        assert any(line.startswith("using tiny at http://127.0.0.1:") for line in said) and said[-1] == "ready"
        assert backend.facts().url and backend.facts().decode_tps == 83.0, "as the server has measured it"
    assert "gone" in started(backend, "gone")[-1] and not backend.facts().url, "this process looks for it"
    backend.close()


@pytest.mark.parametrize("words", [("--ctx", "512"), ("--attach-to", "off"), ("--serve", "0")])
def test_a_chat_that_keeps_its_model_keeps_the_next(
    server: type[Server], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("localllm.cli.names.choose", lambda *_: Choice("gone", "gone"))
    _, backend = opened(monkeypatch, "gone", *words, "--offline")
    said = started(backend, "tiny")
    assert not any("using" in line for line in said) and not server.asked
    backend.close()


def test_a_file_is_found_by_its_path_and_saved_with_it(
    server: type[Server], monkeypatch: pytest.MonkeyPatch, empty_home: Path, tmp_path: Path
) -> None:
    """Another file may have the same name, and the name alone does not find it again."""
    from localllm.cli.start import session_of
    from localllm.history.store import History

    file = tmp_path / "my models" / "tiny"
    file.mkdir(parents=True)
    monkeypatch.setattr("localllm.cli.names.choose", lambda *_: Choice(str(file), "tiny"))
    done = run("run", str(file), "hi")
    assert done.exit_code and "using tiny" not in done.stderr and not server.asked
    server.file = str(file)
    done = run("run", str(file), "hi", "--log")
    assert done.exit_code == 0 and "using tiny at" in done.stderr and server.asked[-1][1]["model"] == "tiny"
    with History() as history:
        assert history.chats(1)[0].model == str(file)
    starts: list[Start] = []
    monkeypatch.setattr("localllm.cli.commands.chat.full_screen", lambda env, config, start: starts.append(start) or 0)
    monkeypatch.setenv("TEXTUAL_DRIVER", "none")
    run("chat", str(file))
    assert starts[0].attached is not None and starts[0].attached.model == "tiny"
    made = session_of(Env(Options()), UserConfig(), starts[0], None)  # type: ignore[arg-type]
    assert made.model == str(file)


def test_asking_a_server_imports_little() -> None:
    heavy = (
        "httpx",
        "pydantic",
        "torch",
        "numpy",
        "localllm.conversation.tree",
        "localllm.chat.mcp",
        "localllm.hub",
        "rich",
    )
    modules = "localllm.cli.frame.program, localllm.cli.commands.run, localllm.backend.over_http"
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
