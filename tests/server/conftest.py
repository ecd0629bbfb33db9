"""The application over a tiny random model: in process, and behind real connections."""

import asyncio
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))

from localllm import LLM
from localllm.server import AppOptions, Service, ServiceOptions, create_app
from localllm.server.openai.reading import read_chat
from localllm.server.openai.schemas import ChatRequest
from localllm.server.pool import ModelPool
from localllm.server.run import ServeOptions, bind, make_server

DOOR = os.environ.get("DOOR_URL", "")
"""Another endpoint, which those tests ask that need nothing but a client: tests/server/cluster runs them so."""
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def pytest_collection_modifyitems(config, items):
    if DOOR:
        fit, asking = {"client", "sdk", "claude", "url", "tiny_llm", "roomy"}, {"client", "claude", "url"}
        away = [one for one in items if not asking & set(one.fixturenames) or not _arguments(one) <= fit]
        config.hook.pytest_deselected(items=away)
        items[:] = [item for item in items if item not in away]


def _arguments(item):
    """The fixtures that a test names."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    return {name for name in inspect.signature(item.function).parameters if name not in given}


@pytest.fixture(scope="session")
def anthropic():
    """The SDK. It has 3,000 modules, so that only tests that use it import it."""
    return importlib.import_module("anthropic")


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    import tiny_models

    return tiny_models.tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", "Q8_0")


@pytest.fixture(scope="session")
def tiny_llm(tiny_path):
    with LLM(tiny_path, max_parallel=8, debug_invariants=True) as llm:
        yield llm


@pytest.fixture(scope="session")
def pool(tiny_llm):
    pool = ModelPool.holding(tiny_llm, ("tiny", "org/tiny"))
    pool.models()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def roomy_llm(tmp_path_factory):
    """The tiny model with room for the words that explain tools."""
    import tiny_models

    path = tiny_models.tiny_gguf(tmp_path_factory.mktemp("models") / "roomy.gguf", "Q8_0", context=8192)
    with LLM(path, max_parallel=8, ctx=4096, debug_invariants=True) as llm:
        yield llm


@pytest.fixture(scope="session")
def roomy_pool(roomy_llm):
    pool = ModelPool.holding(roomy_llm, ("tiny",))
    pool.models()
    yield pool
    pool.close()


@pytest.fixture
def make_service(pool):
    made = []

    def make(**options):
        made.append(Service(pool, ServiceOptions(**({"parallel": 8} | options))))
        return made[-1]

    yield make
    for service in made:
        service.close()


@pytest.fixture
def service(make_service):
    return make_service()


@pytest.fixture
def make_client(service):
    def make(of=None, **options):
        return client_of(create_app(of or service, AppOptions(**options)))

    return make


def client_of(app):
    """Who asks this application, or the other endpoint."""
    if DOOR:
        return httpx.AsyncClient(base_url=DOOR, timeout=120)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60)


@pytest.fixture
async def client(make_client):
    async with make_client() as client:
        yield client


def api_of(client):
    """Where OpenAI's SDK finds what the client asks."""
    return f"{str(client.base_url).rstrip('/')}/v1"


def ask(**fields):
    """A small chat request."""
    hello = [{"role": "user", "content": "hello there"}]
    return {"model": "tiny", "messages": hello, "max_tokens": 8, "temperature": 0, **fields}


async def opened(service, **fields):
    """The stream of a small chat request, opened as the route does it."""
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    asked = read_chat(ChatRequest.model_validate(ask(**fields)))
    return (await service.open(Request(scope), asked)).stream


def events(body):
    """The objects of an OpenAI stream."""
    lines = [line for line in body.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def named_events(body):
    """(name, object) of a stream with named events."""
    found = []
    for block in body.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def settled(llm, service, seconds=5.0):
    """Wait until nothing is under way; then every page must be free or only cached."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stats = llm.stats()
        if stats.num_running == stats.num_waiting == service.num_reserved == 0:
            assert stats.pages_free + stats.pages_cached == stats.pages_total
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still busy: {llm.stats()}, {service.num_reserved} reserved")


class Live:
    """A server on a real port, in a thread of this process."""

    def __init__(self, service, options):
        self.service = service
        self.port = 0
        self._options = options
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(20)

    async def _run(self):
        sock = bind(ServeOptions(port=0))
        self.port = sock.getsockname()[1]
        self.server = make_server(self.service, self._options)
        self.loop = asyncio.get_running_loop()
        self.loop.call_soon(self._started.set)
        await self.server.serve(sockets=[sock])

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def connect(self, timeout=10.0):
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def exchange(self, data, timeout=10.0):
        """Send bytes, and read until the server closes or nothing comes for a moment."""
        with self.connect(timeout) as sock:
            with suppress(ConnectionError):  # refused before all of it was sent
                sock.sendall(data)
            return read_all(sock)

    def raw(self, method, target, *headers, body=b""):
        """(status, bytes) of one request written by hand."""
        lines = [f"{method} {target} HTTP/1.1", *headers, "Connection: close", "", ""]
        answer = self.exchange("\r\n".join(lines).encode("latin-1") + body)
        return status_of(answer), answer

    def stop(self):
        self.server.should_exit = True
        self._thread.join(10)
        self.service.close()


def status_of(answer):
    """The status of a raw answer; 0 when the connection was closed without one."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def read_all(sock):
    """Everything until the other side closes."""
    parts = []
    try:
        while piece := sock.recv(65536):
            parts.append(piece)
    except (ConnectionError, TimeoutError):
        pass
    return b"".join(parts)


@contextmanager
def live_server(pool, app=None, **options):
    """A server of its own."""
    live = Live(Service(pool, ServiceOptions(**({"parallel": 8} | options))), app or AppOptions())
    try:
        yield live
    finally:
        live.stop()


@pytest.fixture(scope="session")
def live(pool):
    """The server that tests share who only talk to it."""
    with live_server(pool) as live:
        yield live


class Served:
    """`localllm serve` in a process of its own, with an API key and canaries to look for."""

    KEY = "CANARY-key-4f9d"
    HF_TOKEN = "CANARY-hub-77aa"

    def __init__(self, path, folder, *more, python=()):
        self.log = folder / "serve.log"
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)
        key = folder / "keys"
        key.write_text(f"# clients\n{self.KEY}\nanother-key-1234\n")
        environment = dict(os.environ) | {"LOCALLLM_HOME": str(self.home), "HF_TOKEN": self.HF_TOKEN}
        command = [
            sys.executable, *python, "-c", "from localllm.cli import main; main()", "serve", str(path), "--port", "0",
            "--alias", "tiny", "--parallel", "8", "--api-key-file", str(key), "--threads", "1", "-vv", *more,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.port = 0

    def record(self):
        """What the process notes about itself for `ps` and `stop`."""
        files = list((self.home / "run").glob("serve-*.json"))
        return json.loads(files[0].read_text()) if files else None

    def wait(self, seconds=60.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            record = self.record()
            if record:
                self.port = int(record["url"].rsplit(":", 1)[1])
                try:
                    if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                        return self
                except httpx.TransportError:
                    pass
            time.sleep(0.05)
        raise AssertionError(self.log.read_text()[-2000:])

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options):
        headers = {"authorization": f"Bearer {self.KEY}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60, **options)

    def stop(self, number=signal.SIGTERM, seconds=40.0):
        """The exit status and the seconds it took."""
        started = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        return code, time.monotonic() - started


@asynccontextmanager
async def stopped_after(served):
    """The server, ready; killed at the end if it still runs."""
    try:
        yield await asyncio.to_thread(served.wait, 120.0)
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


@pytest.fixture(scope="session")
def served(tiny_path, tmp_path_factory):
    served = Served(tiny_path, tmp_path_factory.mktemp("served"))
    try:
        yield served.wait()
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()
