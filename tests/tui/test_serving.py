"""/serve and --serve: the engine of the chat answers other programs while the chat is open."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))

from localllm.backend.in_process import InProcessBackend
from localllm.cli.attach import find_server
from localllm.cli.commands.serve import taken_by
from localllm.cli.commands.stop import stop
from localllm.cli.endpoint import ChatEndpoint
from localllm.cli.frame.command import Env, Options
from localllm.conversation.session import Session
from localllm.conversation.slash import OFF, parse_port
from localllm.conversation.tree import Conversation
from localllm.device import processes
from localllm.errors import ConfigError, ServerError
from localllm.request import SamplingParams
from localllm.tui.app import ChatApp
from localllm.tui.frame import ScreenOptions
from localllm.tui.widgets.engine import EnginePanel

from .conftest import WAIT_S, Chat, chat
from .test_chat import notices

FEW = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    import tiny_models

    return str(tiny_models.tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", "Q8_0"))


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        yield sock.getsockname()[1]


@pytest.fixture(autouse=True)
def run_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))


@asynccontextmanager
async def real_chat(model: str, serve: int | None = OFF) -> AsyncIterator[Chat]:
    """A chat over an engine that computes."""
    backend = InProcessBackend(lambda llm: FEW, offline=True)
    record = processes.Record("chat")
    env = Env(Options(quiet=True))
    endpoint = ChatEndpoint(env, env.config, backend, record)
    session = Session(backend, Conversation(), model="tiny", endpoint=endpoint, serves=serve)
    app = ChatApp(session, ScreenOptions(name=model))
    try:
        async with app.run_test(size=(118, 34)) as pilot:
            await pilot.pause()
            yield Chat(app, backend, pilot)  # type: ignore[arg-type]
    finally:
        endpoint.stop()
        backend.close()
        record.remove()


def is_open(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0


async def test_serve_answers_beside_the_chat_and_off_closes_the_port(tiny_path: str) -> None:
    async with real_chat(tiny_path) as running:
        await running.ready()
        await running.send("/serve 0")
        await running.until(lambda: "serving this model at http://127.0.0.1:" in notices(running))
        url = running.app.session.endpoint.url  # type: ignore[union-attr]
        await running.until(lambda: f"api :{url.rsplit(':', 1)[1]}" in running.text("#state"))
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
            assert [row["id"] for row in (await client.get("/v1/models")).json()["data"]] == ["tiny"]
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            answer = await client.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200
            assert 1 <= answer.json()["usage"]["completion_tokens"] <= 5
            assert (await running.ask("hello")).exchange.stop == "length"  # the same engine answers here
        assert find_server("auto", ("tiny",)) is not None
        assert [(one.kind, one.url) for one in processes.running()] == [("chat", url)]
        with pytest.raises(ServerError, match="belongs to a chat"):  # a signal would end the chat, too
            stop.run(Env(Options(quiet=True)), target=url.rsplit(":", 1)[1])
        taken = taken_by(ServerError("taken"), int(url.rsplit(":", 1)[1]))
        assert "a chat of localllm" in taken.message and "localllm stop" not in taken.hint
        await running.pilot.press("f4")
        panel = running.screen.query_one(EnginePanel)
        await running.until(lambda: f"api {url}/v1" in str(panel.query_one("#engine-text").render()))  # type: ignore[attr-defined]
        await running.send("/serve off")
        await running.until(lambda: not is_open(url))
        await running.until(lambda: "api" not in running.text("#state"))
        assert find_server("auto", ("tiny",)) is None
        assert (await running.ask("again")).exchange.stop == "length"


async def test_an_endpoint_that_ends_by_itself_is_not_to_be_found(tiny_path: str) -> None:
    async with real_chat(tiny_path, serve=0) as running:
        await running.ready()
        await running.until(lambda: running.app.session.endpoint.url)  # type: ignore[union-attr]
        await running.until(lambda: find_server("auto", ("tiny",)))
        beside = running.app.session.endpoint._server  # type: ignore[union-attr]
        await running.until(lambda: beside._server is not None and beside._server.started)
        beside._server.should_exit = True
        await running.until(lambda: not running.app.session.endpoint.url)  # type: ignore[union-attr]
        await running.until(lambda: find_server("auto", ("tiny",)) is None)
        assert (await running.ask("again")).exchange.stop == "length"


async def test_serve_from_the_start_follows_the_next_model_and_ends_with_the_chat(tiny_path: str) -> None:
    async with real_chat(tiny_path, serve=0) as running:
        await running.ready()
        await running.until(lambda: running.app.session.endpoint.url)  # type: ignore[union-attr]
        url = running.app.session.endpoint.url  # type: ignore[union-attr]
        await running.send(f"/model {tiny_path}")
        await running.until(lambda: notices(running).count("serving this model at") == 2)
        assert running.app.session.endpoint.url == url  # type: ignore[union-attr]
        assert httpx.get(f"{url}/v1/models", timeout=WAIT_S, trust_env=False).status_code == 200
    assert not is_open(url)


async def test_a_busy_port_is_named_and_the_chat_goes_on(tiny_path: str, busy_port: int) -> None:
    async with real_chat(tiny_path, serve=busy_port) as running:
        await running.ready()
        await running.until(lambda: f"port {busy_port}" in notices(running))
        assert f"/serve {busy_port + 1}" in notices(running)
        assert "api" not in running.text("#state")
        assert (await running.ask("hello")).exchange.stop == "length"


async def test_serve_without_an_engine_of_ones_own_says_so() -> None:
    async with chat() as running:
        await running.ready()
        await running.send("/serve")
        await running.until(lambda: "no engine of its own" in notices(running))
        await running.send("/serve much")
        await running.until(lambda: "not much" in notices(running))


@pytest.mark.parametrize(
    ("text", "port"), [("", None), ("off", OFF), ("0", 0), ("8001", 8001), ("65536", ""), ("-1", ""), ("x", "")]
)
def test_what_follows_serve(text: str, port: int | str | None) -> None:
    if port == "":
        with pytest.raises(ConfigError):
            parse_port(text)
    else:
        assert parse_port(text) == port


@pytest.mark.parametrize(
    ("words", "serve", "rest"),
    [
        (["--serve"], "", None),
        (["--serve", "qwen"], "", "qwen"),
        (["qwen", "--serve", "8001"], "8001", "qwen"),
        (["--serve=8001", "qwen"], "8001", "qwen"),
        (["--serve", "--plain", "qwen"], "", "qwen"),
        (["--serve", "8001", "--", "qwen", "--serve"], "8001", "qwen"),
    ],
)
def test_the_port_of_the_option_may_be_left_out(words: list[str], serve: str, rest: str | None) -> None:
    from localllm.cli.commands.chat import chat as command
    from localllm.cli.frame.command import build

    with build("chat", command).make_context("chat", list(words)) as context:
        assert context.params["serve"] == serve
        assert context.params["model"] == rest
