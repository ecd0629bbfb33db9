"""A server as something to measure: streamed completions over real sockets, and servers that do not behave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from localllm.bench.endpoint import Endpoint
from localllm.errors import ConfigError, LocalLLMError


class Server(ThreadingHTTPServer):
    """Keeps the bodies it got; says what `answers` says."""

    daemon_threads = True
    refused: frozenset[str] = frozenset()
    models: Any = {"data": [{"id": "first"}, {"id": "second"}]}
    texts: tuple[str, ...] = ("a", "b", "c")
    usage: dict[str, int | None] | None = None
    failure = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        self._send(200, self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.refused & body.keys():
            self._send(400, {"error": "unknown field"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        events: list[Any] = [{"choices": [{"text": text}]} for text in self.server.texts]
        events += [{"choices": [], "usage": self.server.usage}] if self.server.usage else []
        events += [{"error": self.server.failure}] if self.server.failure else []
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_a_completion_is_timed_and_counted(server: Server, url: str) -> None:
    endpoint = Endpoint(url + "/v1/", key="secret")
    sample = endpoint.ask("words", 3)
    assert server.keys == ["Bearer secret"]
    assert (sample.output_tokens, sample.prompt_tokens) == (3, 0)
    assert 0 < sample.ttft_s <= sample.total_s and sample.tpot_s >= 0
    body = server.bodies[0]
    assert body["model"] == "first" and body["max_tokens"] == 3 and body["ignore_eos"] and body["stream"]
    server.usage = {"prompt_tokens": 9, "completion_tokens": 7}
    sample = endpoint.ask("words", 7)
    assert (sample.output_tokens, sample.prompt_tokens) == (7, 9)
    server.usage = {"prompt_tokens": None, "completion_tokens": None}
    assert endpoint.ask("words", 7).output_tokens == 3, "what came is counted"
    assert endpoint.versions() == {}
    server.models = {"version": "0.31"}
    assert endpoint.versions() == {"version": "0.31"}
    alone = endpoint.peak_rss_bytes()
    assert alone > 1 << 20, os.getpid()
    program = "x = b'x' * (50 << 20); print(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        assert endpoint.peak_rss_bytes() > alone + (40 << 20), "what computes may be a child of what listens"
    finally:
        child.kill()
        child.communicate()
    endpoint.close()


def test_fields_that_are_refused_are_left_out(server: Server, url: str) -> None:
    server.refused = frozenset({"stream_options"})
    endpoint = Endpoint(url, model="second")
    endpoint.ask("words", 3)
    endpoint.ask("words", 3)
    assert [set(body) & {"ignore_eos", "stream_options"} for body in server.bodies] == [
        {"ignore_eos", "stream_options"},
        {"stream_options"},
        set(),
        set(),
    ]
    server.refused = frozenset({"prompt"})
    with pytest.raises(LocalLLMError, match="status 400"):
        endpoint.ask("words", 3)
    endpoint.close()


def test_answers_that_are_none(server: Server, url: str) -> None:
    endpoint = Endpoint(url)
    server.failure = "out of pages"
    with pytest.raises(LocalLLMError, match="out of pages"):
        endpoint.ask("words", 3)
    server.failure, server.texts = "", ()
    with pytest.raises(LocalLLMError, match="no text"):
        endpoint.ask("words", 3)
    endpoint.close()
    for models in ({"data": []}, {"other": 1}, [1]):
        server.models = models
        with pytest.raises(ConfigError):
            Endpoint(url)
    with pytest.raises(ConfigError, match="does not answer /v1/models"):
        Endpoint("http://127.0.0.1:9")
    with pytest.raises(ConfigError):
        Endpoint("not a url")
