"""A chat over a running server. The server here is twenty lines that answer as ours does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from localllm.backend.over_http import RemoteBackend
from localllm.conversation.answer import Answer, Call
from localllm.interface import ChatEvent, Delta, Done, Failed
from localllm.request import LoadProgress, ToolUse

METRICS = """\
# HELP vllm:num_requests_running x
vllm:num_requests_running{model_name="tiny"} 1.0
localllm:kv_pages_total{model_name="tiny"} 100.0
localllm:kv_pages_free{model_name="tiny"} 80.0
localllm:kv_pages_cached{model_name="tiny"} 30.0
vllm:prefix_cache_queries_total{model_name="tiny"} 50.0
vllm:prefix_cache_hits_total{model_name="tiny"} 20.0
vllm:generation_tokens_total{model_name="tiny"} 7.0
"""


class Fake(BaseHTTPRequestHandler):
    """What a server says; `asked` keeps what it was sent."""

    asked: list[dict[str, Any]] = []
    hung_up = threading.Event()
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        """Quiet."""

    def _json(self, status: int, value: object) -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """Models and metrics."""
        if self.headers.get("authorization") != "Bearer right-key":
            error = {"message": "no key", "type": "x", "param": None, "code": "invalid_api_key"}
            self._json(401, {"error": error})
        elif self.path == "/v1/models":
            meta = {"n_params": 5, "size": 6}
            self._json(200, {"data": [{"id": "tiny", "max_model_len": 4096, "meta": meta}, {"id": "other"}]})
        else:
            self._json(200, METRICS)

    def do_POST(self) -> None:
        """Tokenise, or stream an answer."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._json(200, {"count": 42})
            return
        self.asked.append(body)
        last = body["messages"][-1]["content"]
        if last == "long prompt":
            error = {"message": "41,022 > 4,096", "type": "x", "param": None, "code": "context_length_exceeded"}
            self._json(400, {"error": error})
            return
        if last == "queued":  # other servers send headers only once the request runs
            self.asked_for.wait(20)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}]
        deltas += [{"content": piece} for piece in ("Hel", "lo ", "é日")]
        if "tools" in body:
            functions = [{"name": "echo", "arguments": ""}, {"arguments": '{"a":'}, {"arguments": " 1}"}]
            calls = [{"index": 0, "id": "call_1", "function": one} for one in functions]
            deltas = [{"tool_calls": [call]} for call in calls]
        try:
            for delta in deltas:
                self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None})
            while last == "endless":
                self._event({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]})
                time.sleep(0.01)
            if last == "half":
                return
            if last == "break":
                self._event({"error": {"message": "the engine stopped"}})
                return
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b": ping\n\ndata: [DONE]\n\n")
        except OSError:
            self.hung_up.set()

    def _event(self, value: object) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Fake.asked, Fake.hung_up, Fake.asked_for = [], threading.Event(), threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def wait(backend: RemoteBackend, wanted: Callable[[ChatEvent], bool], seen: list[ChatEvent]) -> ChatEvent:
    """Drain until an event is the one."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        while backend.events():
            seen.append(backend.events().popleft())
            if wanted(seen[-1]):
                return seen[-1]
        time.sleep(0.01)
    raise AssertionError(seen)


def opened(url: str, model: str | None = None, **given: Any) -> RemoteBackend:
    """A backend that is ready."""
    backend = RemoteBackend(url + "/v1/", "right-key", given=lambda: given)
    backend.start(model)
    wait(backend, lambda e: isinstance(e, LoadProgress) and e.name == "ready", [])
    return backend


def test_calls_of_tools_over_http(url: str) -> None:
    backend = opened(url)
    tool = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object"}}}
    turn = backend.send([{"role": "user", "content": "call"}], None, None, ToolUse((tool,)))
    seen: list[ChatEvent] = []
    wait(backend, lambda e: isinstance(e, Done), seen)
    answer = Answer()
    for event in seen:
        if getattr(event, "turn", None) == turn:
            answer.add(event)
    assert answer.calls == [Call("call_1", "echo", '{"a": 1}')]
    assert (Fake.asked[0]["tools"], Fake.asked[0]["tool_choice"]) == ([tool], "auto")
    backend.close()


def test_a_turn_over_http(url: str) -> None:
    backend = opened(url, temperature=0.3)
    facts = backend.facts()
    assert (facts.model, facts.ctx, facts.url) == ("tiny", 4096, url)
    seen: list[ChatEvent] = []
    turn = backend.send([{"role": "user", "content": "hi"}], None, {"enable_thinking": False})
    done = wait(backend, lambda e: isinstance(e, Done), seen)
    assert isinstance(done, Done) and done.turn == turn and done.stop == "length"
    assert (done.usage.prompt_tokens, done.usage.cached_tokens, done.usage.completion_tokens) == (9, 2, 4)
    assert "".join(e.text for e in seen if isinstance(e, Delta) and e.kind == "content") == "Hello é日"
    assert "".join(e.text for e in seen if isinstance(e, Delta) and e.kind == "reasoning") == "hm"
    body = Fake.asked[0]
    assert body["temperature"] == 0.3 and body["chat_template_kwargs"] == {"enable_thinking": False}
    backend.send([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}])
    wait(backend, lambda e: isinstance(e, Done), seen)
    assert Fake.asked[1]["continue_final_message"] is True
    assert [row.name for row in backend.choices()] == ["tiny", "other"]
    assert backend.count_tokens("text") == 42
    backend.close()


def test_stopping_hangs_up(url: str) -> None:
    backend = opened(url)
    turn = backend.send([{"role": "user", "content": "endless"}])
    wait(backend, lambda e: isinstance(e, Delta), [])
    backend.stop(turn)
    done = wait(backend, lambda e: isinstance(e, Done), [])
    assert isinstance(done, Done) and done.stop == "abort"
    assert Fake.hung_up.wait(10)


def test_stopping_does_not_wait_for_the_server(url: str) -> None:
    backend = opened(url)
    turn = backend.send([{"role": "user", "content": "queued"}])
    while not Fake.asked:
        time.sleep(0.001)
    begin = time.monotonic()
    backend.stop(turn)
    done = wait(backend, lambda e: isinstance(e, Done), [])
    assert isinstance(done, Done) and done.stop == "abort" and time.monotonic() - begin < 10
    Fake.asked_for.set()


def test_a_turn_waits_until_it_is_known_what_is_served(url: str) -> None:
    backend = RemoteBackend(url, "right-key")
    backend.start("tiny")
    turn = backend.send([{"role": "user", "content": "hi"}])
    done = wait(backend, lambda e: isinstance(e, Done), [])
    assert isinstance(done, Done) and done.turn == turn and Fake.asked[0]["model"] == "tiny"
    backend.start("none")
    backend.send([{"role": "user", "content": "hi"}])
    failed = wait(backend, lambda e: isinstance(e, Failed) and e.turn >= 0, [])
    assert isinstance(failed, Failed) and "does not serve none" in failed.message


def test_numbers_of_the_server_are_shown(url: str) -> None:
    backend = opened(url)
    end = time.monotonic() + 20
    while backend.facts().pages_total != 100 and time.monotonic() < end:
        time.sleep(0.05)
    facts = backend.facts()
    assert (facts.pages_free, facts.pages_cached, facts.num_running, facts.num_output_tokens) == (50, 30, 1, 7)
    assert (facts.prefix_query_tokens, facts.prefix_hit_tokens) == (50, 20)
    backend.close()


@pytest.mark.parametrize(("prompt", "code"), [("long prompt", "E901"), ("break", "E801"), ("half", "E802")])
def test_what_the_server_refuses_is_a_failed_turn(url: str, prompt: str, code: str) -> None:
    backend = opened(url)
    backend.send([{"role": "user", "content": prompt}])
    failed = wait(backend, lambda e: isinstance(e, Failed), [])
    assert isinstance(failed, Failed) and failed.code == code


def test_a_wrong_key_a_wrong_model_and_no_server_fail_to_load(url: str) -> None:
    for backend, model, code in (
        (RemoteBackend(url, "wrong"), None, "E401"),
        (RemoteBackend(url, "right-key"), "nope", "E801"),
        (RemoteBackend("http://127.0.0.1:9"), None, "E801"),
        (RemoteBackend("http://["), None, "E801"),
    ):
        backend.start(model)
        failed = wait(backend, lambda e: isinstance(e, Failed), [])
        assert isinstance(failed, Failed) and (failed.turn, failed.code) == (-1, code) and failed.hint
        backend.close()


async def test_the_interface_says_where_it_is_computed(url: str) -> None:
    from localllm.conversation.session import Session
    from localllm.conversation.tree import Conversation
    from localllm.tui.app import ChatApp

    backend = RemoteBackend(url, "right-key", pid=48121)
    app = ChatApp(Session(backend, Conversation(), model="tiny"))
    async with app.run_test(size=(118, 34)) as pilot:
        end = time.monotonic() + 30
        while app.chat.phase != "ready" and time.monotonic() < end:
            await pilot.pause(0.05)
        await app.chat.submit("hi")
        talk = app.session.conversation
        while (not talk.exchanges or not talk.exchanges[0].stop) and time.monotonic() < end:
            await pilot.pause(0.05)
        assert talk.exchanges[0].text == "Hello é日"
        assert f"via {url} (pid 48121)" in str(app.chat.query_one("#model").render())  # type: ignore[attr-defined]
        assert f"via {url} (pid 48121)" in backend.facts().run_summary
    backend.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("asks", [True, False])
async def test_a_model_is_loaded_again_when_its_server_has_gone(server: ThreadingHTTPServer, asks: bool) -> None:
    from localllm.backend.placed import Place, PlacedBackend
    from localllm.backend.scripted import FakeBackend
    from localllm.conversation.session import Session
    from localllm.conversation.tree import Conversation
    from localllm.tui.app import ChatApp

    address = f"http://127.0.0.1:{server.server_address[1]}"
    places: list[Place | None] = [Place(RemoteBackend(address, "right-key"), "tiny", address), None]
    backend = PlacedBackend(FakeBackend(tps=0, load_s=0), lambda model: places.pop(0))
    app = ChatApp(Session(backend, Conversation(), model="fake"))
    async with app.run_test(size=(118, 34)) as pilot:

        async def until(done: Callable[[], object]) -> None:
            end = time.monotonic() + 30
            while not done():
                assert time.monotonic() < end
                await pilot.pause(0.02)

        def ready() -> bool:
            return app.chat.phase == "ready"

        await until(ready)
        await app.chat.submit("/model fake")
        assert len(places) == 1, "it is running"
        server.shutdown()
        server.server_close()
        if asks:
            await app.chat.submit("hi")
            await until(lambda: app.chat.phase == "failed")
            assert app.chat.query_one("Choices").display
        await app.chat.submit("/model fake")
        await until(ready)
        assert not places and backend.facts().run_summary == "fake · cpu · Q4_1 · KV bf16 · fake kernels"
        await app.chat.submit("here")
        await until(lambda: app.session.conversation.exchanges[-1].text == "here")
    backend.close()


def test_a_running_server_is_found_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli.attach import find_server, process_at
    from localllm.device.processes import Running
    from localllm.errors import ServerError

    one = Running(1, "serve", "http://127.0.0.1:8000", ("tiny",), 0.0, "token")
    monkeypatch.setattr("localllm.device.processes.running", lambda: [Running(2, "chat"), one])
    said = {"/health": {"status": "ok"}, "/v1/models/on%20disk": {"id": "on disk"}}
    monkeypatch.setattr("localllm.cli.attach.ask", lambda one, method, path: said.get(path))
    assert find_server("auto", ("on disk",)) == (one.url, "token", "on disk")
    assert find_server("auto", ("tiny", "org/tiny")) == (one.url, "token", "tiny")
    assert find_server("auto", ("other",)) is None
    assert find_server("auto", ()) == (one.url, "token", "")
    assert find_server("off", ("tiny",)) is None
    draining = {**said, "/health": None}
    monkeypatch.setattr("localllm.cli.attach.ask", lambda one, method, path: draining.get(path))
    assert find_server("auto", ("tiny",)) is None and find_server("auto", ("on disk",)) is None
    assert (process_at(one.url), process_at("http://127.0.0.1:9")) == (one.pid, 0)
    assert find_server("http://127.0.0.1:8000/v1", ()) == (one.url, "token", "")
    with pytest.raises(ServerError):
        find_server("nonsense", ())
