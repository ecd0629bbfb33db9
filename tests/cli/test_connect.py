"""`connect`: settings that other programs can read, whatever the model is called; addresses that are none."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import UnixStreamServer
from threading import Thread

import pytest
import yaml

from localllm.cli.commands.connect import APPS, Server
from localllm.cli.commands.connect import snippet as snippet_of
from localllm.device.processes import Record

from .conftest import Invoke, valid

NAMES = ("smollm2", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "it's a model.gguf", "1e3", "on", 'a"b\\c', "x: y # z", "модель")


class Handler(BaseHTTPRequestHandler):
    """Lists two models to who has the key; without one, at /open."""

    def do_GET(self) -> None:
        open_to_all = self.path == "/open/v1/models" or isinstance(self.server, UnixStreamServer)
        self.send_response(200 if open_to_all else 401)
        self.end_headers()
        rows = [{"id": "one", "max_model_len": 4096, "meta": {"n_ctx_train": 8192}}, {"id": "two"}]
        self.wfile.write(json.dumps({"data": rows}).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def on_socket(empty_home: Path) -> Iterator[str]:
    """The only running server: it listens on a Unix socket."""
    path = str(empty_home / "a b.sock")
    with UnixStreamServer(path, Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        record = Record("serve", f"unix:{path}")
        yield path
        record.remove()
        server.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_every_snippet_holds_the_name_as_it_is(name: str) -> None:
    def snippet(app: str, needs_key: bool = False) -> str:
        return snippet_of(APPS[app], Server("http://127.0.0.1:8000", name, 8192, needs_key))

    assert json.loads(snippet("opencode"))["model"] == f"localllm/{name}"
    models = json.loads(snippet("zed"))["language_models"]["openai_compatible"]["localllm"]["available_models"]
    assert models[0]["name"] == name
    (model,) = yaml.safe_load(snippet("continue"))["models"]
    assert (model["name"], model["model"], model["apiKey"]) == (name, name, "none")
    (row,) = yaml.safe_load(snippet("llm", needs_key=True))
    assert (row["model_id"], row["model_name"], row["api_key_name"]) == (name, name, "localllm")
    codex = tomllib.loads(snippet("codex"))
    assert (codex["model"], codex["model_context_window"], codex["web_search"]) == (name, 8192, "disabled")
    assert shlex.split(snippet("aider"))[-1] == f"openai/{name}"
    assert f"ANTHROPIC_MODEL={name}" in shlex.split(snippet("claude-code").replace("\\\n", ""))
    assert json.loads(shlex.split(snippet("curl", needs_key=True).replace("\\\n", ""))[-1])["model"] == name
    compile(snippet("python"), "snippet", "exec")
    (replicas,) = yaml.safe_load(snippet("ray"))["applications"]
    (same,) = yaml.safe_load(yaml.safe_load(snippet("kuberay"))["spec"]["serveConfigV2"])["applications"]
    assert (
        replicas["args"] == same["args"] and same["args"]["model"] == name and same["args"]["engine"] == {"ctx": 8192}
    )
    assert set(APPS) >= {"opencode", "continue", "open-webui", "llm", "aider", "claude-code", "zed"}


@pytest.mark.parametrize(
    "url",
    ["nonsense", "ftp://x", "http://", "http://[::1:8", "http://h:99999", "http://h:0", "http://a b", "http://h?x"],
)
def test_an_address_that_is_none_is_refused(invoke: Invoke, empty_home: Path, url: str) -> None:
    result = invoke("connect", "curl", "--url", url)
    assert result.exit_code == 2 and "must be an address" in result.stderr and not result.stdout


def test_what_a_named_server_offers_is_asked(invoke: Invoke, empty_home: Path, endpoint: str) -> None:
    found = valid(invoke("connect", "opencode", "--url", f"{endpoint}/open/v1/", "--json").stdout, "connect-1")
    settings = json.loads(found["snippet"])["provider"]["localllm"]
    assert found["model"] == "one" and settings["models"]["one"]["limit"]["context"] == 4096
    assert settings["options"] == {"baseURL": f"{endpoint}/open/v1"}
    assert found["models"] == ["one", "two"]
    said = invoke("connect", "zed", "--url", f"{endpoint}/open").stderr
    assert "# the server also offers two: --model NAME" in said
    small = invoke("connect", "claude-code", "--url", f"{endpoint}/open").stderr
    assert "about 20,000 tokens, and one holds at most 8,192: serve a model with a longer context" in small
    assert "--ctx 32k or more" in invoke("connect", "claude-code", "--url", f"{endpoint}/open", "--model", "two").stderr
    wrong = invoke("connect", "llm", "--url", f"{endpoint}/open", "--model", "three")
    assert wrong.exit_code == 0 and "does not offer three; it offers one, two" in wrong.stderr
    locked = invoke("connect", "python", "--url", endpoint)
    assert "YOUR-KEY" in locked.stdout and "with your key" in locked.stderr


def test_nothing_that_answers_is_said(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("connect", "curl", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 0 and "no server answers at http://127.0.0.1:1" in result.stderr
    config = empty_home / "config.toml"
    config.write_text('model = "mine"\n[server]\nhost = "0.0.0.0"\nport = 8321\n')
    result = invoke("connect", "llm", "--config", str(config))
    assert 'api_base: "http://127.0.0.1:8321/v1"' in result.stdout and "model_id: mine" in result.stdout
    assert "no server is running" in result.stderr
    assert set(valid(invoke("connect", "--json").stdout, "connect-1")["apps"]) == set(APPS)
    assert "did you mean aider" in invoke("connect", "adier").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "x"), "no app is named"),
        (("--url", "http://127.0.0.1:1"), "no app is named"),
        (("zed", "--copy"), "--copy needs a terminal"),
    ],
)
def test_a_flag_that_has_no_effect_is_refused(
    invoke: Invoke, empty_home: Path, words: tuple[str, ...], said: str
) -> None:
    result = invoke("connect", *words)
    assert result.exit_code == 2 and said in result.stderr and not result.stdout


def test_a_server_on_a_unix_socket_is_found(invoke: Invoke, on_socket: str) -> None:
    result = invoke("connect", "curl")
    words = shlex.split(result.stdout.replace("\\\n", ""))
    assert words[1:4] == ["--unix-socket", on_socket, "http://localhost/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "one" and "no server" not in result.stderr
    python = invoke("connect", "python", "--url", f"unix:{on_socket}").stdout
    compile(python, "snippet", "exec")
    assert f"uds={json.dumps(on_socket)}" in python
    result = invoke("connect", "llm")
    assert f"llm cannot use unix:{on_socket}, where a server runs" in result.stderr
    assert 'api_base: "http://127.0.0.1:8000/v1"' in result.stdout and "model_id: one" in result.stdout
    refused = invoke("connect", "llm", "--url", f"unix:{on_socket}")
    assert refused.exit_code == 2 and "start the server without --unix" in refused.stderr
