"""`serve --ollama`: the routes that change models, at that address alone; what Ollama's clients ask for besides."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from localllm.cli.served_models import HubLibrary, local_offers
from localllm.config import UserConfig
from localllm.errors import DownloadError, InvalidRequest, LocalLLMError, ServerError
from localllm.request import LoadProgress
from localllm.server import AppOptions, Service, create_app
from localllm.server.ollama.library import MAX_PULLS
from localllm.server.pool import ModelPool
from localllm.server.run import ServeOptions, bind, bind_ollama, make_server, url_of

ADDRESS = ("127.0.0.1", 11434)


class Shelf:
    """A library that notes what it is asked for."""

    def __init__(self):
        self.done, self.go, self.cancelled = [], threading.Event(), threading.Event()

    def pull(self, name, progress, cancel):
        if name == "lost":
            raise DownloadError("the hub does not answer", "check HF_ENDPOINT")
        for done in (0, 50, 100):
            progress(LoadProgress("download", done, 100))
        if name == "slow":
            while not cancel.wait(0.01) and not self.go.is_set():
                pass
            if cancel.is_set():
                self.cancelled.set()
        self.done.append(("pull", name))

    def remove(self, name):
        if "foreign" in name:
            raise InvalidRequest("foreign belongs to Ollama and is read-only here: ollama rm foreign", param="model")
        self.done.append(("remove", name))

    def copy(self, source, target):
        self.done.append(("copy", source, target))


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def at(service, shelf):
    """A client that reaches the server at an address."""

    def make(host="127.0.0.1", port=11434, **options):
        app = create_app(service, AppOptions(ollama=ADDRESS, library=shelf, **options))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url=f"http://{host}:{port}")

    return make


async def test_what_is_null_is_as_if_it_were_left_out(client):
    """As Ollama's own server reads it."""
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [{"role": "user", "content": "hi"}, called, {"role": "tool", "content": "sun"}]
    sent = {"model": "tiny", "messages": messages, "options": {"num_predict": 1}, "stream": False}
    assert (await client.post("/api/chat", json=sent)).json()["done_reason"] == "length"
    assert (await client.post("/api/chat", json=sent | {"messages": None})).json()["done_reason"] == "load"
    loaded = await client.post("/api/generate", json={"model": "tiny", "prompt": None})
    assert loaded.json()["done_reason"] == "load"
    called["tool_calls"] = [{"function": "f"}]
    assert (await client.post("/api/chat", json=sent)).status_code == 400


def test_a_result_belongs_to_its_own_call():
    from localllm.server.ollama.schemas import OllamaChatRequest, chat_of

    def ids(*results):
        calls = [{"function": {"name": "f"}}, {"function": {"name": "g"}}]
        messages = [{"role": "assistant", "tool_calls": calls}, *({"role": "tool", **one} for one in results)]
        chat = chat_of(OllamaChatRequest.model_validate({"model": "tiny", "messages": messages}))
        assert [call["id"] for call in chat.messages[0].tool_calls] == ["call_0_0", "call_0_1"]
        return [message.tool_call_id for message in chat.messages[1:]]

    assert ids({}, {}, {}) == ["call_0_0", "call_0_1", "call_0_1"]
    assert ids({"tool_name": "g"}, {"tool_name": "f"}) == ["call_0_1", "call_0_0"]
    assert ids({"tool_call_id": "call_0_1"}, {}) == ["call_0_1", "call_0_0"]


def test_a_call_carries_its_id_and_index():
    from localllm.llm.outputs import OutputDelta
    from localllm.request import FinishReason
    from localllm.server.ollama.routes import LineRendering
    from localllm.server.ollama.schemas import OllamaChatRequest

    rendering = LineRendering(None, OllamaChatRequest(model="tiny"), 0.0, None)
    deltas = [{"index": i, "id": f"call_{i}", "name": "f", "arguments": f'{{"x": {i}}}'} for i in (0, 1)]
    parts = [("tool_call", json.dumps(delta)) for delta in deltas]
    (called, _) = rendering._lines(0, OutputDelta(0, parts, finish_reason=FinishReason.STOP))
    assert json.loads(called)["message"]["tool_calls"] == [
        {"id": f"call_{i}", "function": {"index": i, "name": "f", "arguments": {"x": i}}} for i in (0, 1)
    ]


async def test_generate_continues_the_text_of_a_base_model(make_client, service, monkeypatch):
    """As with Ollama's own server, whose template for such a model is the prompt alone."""
    base = replace(await service.find("tiny"), chat=False)

    async def find(_):
        return base

    sent = {"model": "tiny", "prompt": "hello", "options": {"num_predict": 4, "temperature": 0}, "stream": False}
    async with make_client() as client:
        raw = (await client.post("/api/generate", json=sent | {"raw": True})).json()
        monkeypatch.setattr(service, "find", find)
        answer = (await client.post("/api/generate", json=sent)).json()
        refused = await client.post("/api/generate", json=sent | {"system": "Be brief."})
    assert (answer["response"], answer["prompt_eval_count"]) == (raw["response"], raw["prompt_eval_count"])
    assert refused.status_code == 400
    assert refused.json()["error"] == "prompt: tiny is a base model without a chat template."


async def test_generate_names_its_own_fields_in_errors(client):
    error = (await client.post("/api/generate", json={"model": "tiny", "prompt": "x" * 3000})).json()["error"]
    assert error.startswith("the prompt has ") and "messages" not in error
    images = {"model": "tiny", "prompt": "x", "images": ["aaaa"]}
    assert (await client.post("/api/generate", json=images)).json()["error"].startswith("images: ")


async def test_pull_tells_how_far_it_is(at, shelf):
    async with at() as client:
        answer = await client.post("/api/pull", content=b'{"model": "qwen3:0.6b"}')
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert lines[0] == {"status": "pulling manifest"} and lines[-1] == {"status": "success"}
        steps = [line for line in lines if "total" in line]
        assert steps[-1]["completed"] == steps[-1]["total"] == 100
        assert {line["digest"] for line in steps} == {steps[0]["digest"]} and steps[0]["digest"].startswith("sha256:")
        whole = await client.post("/api/pull", json={"name": "x", "stream": False})
        assert whole.json() == {"status": "success"}
        assert shelf.done == [("pull", "qwen3:0.6b"), ("pull", "x")]
        lost = [json.loads(line) for line in (await client.post("/api/pull", json={"model": "lost"})).text.splitlines()]
        assert lost[-1] == {"error": "the hub does not answer."}
        assert (await client.post("/api/pull", json={"model": "lost", "stream": False})).status_code == 502
        for bad in ({}, {"model": 5}, {"model": "x" * 1000}):
            assert (await client.post("/api/pull", json=bad)).status_code == 400


async def test_a_pull_ends_when_nobody_listens_and_only_so_many_run(at, shelf):
    async with at() as client:
        slow = [
            asyncio.ensure_future(client.post("/api/pull", json={"model": "slow", "stream": False}))
            for _ in range(MAX_PULLS)
        ]
        while client._transport.app.app.app.state.num_pulls < MAX_PULLS:
            await asyncio.sleep(0.01)
        full = await client.post("/api/pull", json={"model": "x"})
        assert full.status_code == 429 and "downloads are running" in full.json()["error"]
        slow[0].cancel()
        assert await asyncio.to_thread(shelf.cancelled.wait, 10)
        shelf.go.set()
        assert [answer.status_code for answer in await asyncio.gather(*slow[1:])] == [200] * (MAX_PULLS - 1)


async def test_a_burst_of_pulls_does_not_pass_the_limit(at, shelf):
    async with at() as client:
        asked = [
            asyncio.ensure_future(client.post("/api/pull", json={"model": "slow", "stream": number % 2 == 0}))
            for number in range(MAX_PULLS + 4)
        ]
        async with asyncio.timeout(10):
            while sum(one.done() for one in asked) < 4:
                await asyncio.sleep(0.01)
        shelf.go.set()
        statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
        assert sorted(statuses) == [200] * MAX_PULLS + [429] * 4


async def test_delete_and_copy(at, shelf, tiny_llm):
    async with at() as client:
        copied = await client.post("/api/copy", json={"source": "tiny:latest", "destination": "mine:latest"})
        assert (copied.status_code, copied.content) == (200, b"")
        assert shelf.done == [("copy", str(tiny_llm.path), "mine")]
        lost = await client.request("DELETE", "/api/delete", json={"model": "nothing"})
        assert lost.status_code == 404 and lost.json()["error"].startswith("model not found")


async def test_models_change_at_that_address_alone(at, shelf):
    sent = {"model": "tiny", "source": "tiny", "destination": "x"}
    calls = (("POST", "/api/pull"), ("POST", "/api/copy"), ("DELETE", "/api/delete"))
    for method, path in calls:
        for host, port, status in (("127.0.0.1", 8000, 404), ("192.168.1.2", 11434, 404), ("127.0.0.1", 11434, 403)):
            async with at(host, port, loopback=False) as client:
                headers = {} if status == 404 else {"host": "evil.example"}
                assert (await client.request(method, path, json=sent, headers=headers)).status_code == status
        async with at() as client:
            stranger = await client.request(method, path, json=sent, headers={"origin": "https://evil.example"})
            assert stranger.status_code == 403
        async with at(api_keys=("secret-key",)) as client:
            assert (await client.request(method, path, json=sent)).status_code == 401
    assert shelf.done == []


async def test_both_addresses_are_the_same_server(service, shelf):
    """Over real sockets: which address a request came in at is the socket's word."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    options = ServeOptions(port=0, ollama=address, library=shelf)
    first = bind(options)
    with first, bind_ollama(options, first)[0] as second:
        with pytest.raises(ServerError, match="in use") as caught:
            bind_ollama(options, first)
        assert "systemctl stop ollama" in caught.value.hint
        assert bind_ollama(options, second) == [], "the first port may be Ollama's own"
        server = make_server(service, options)
        serving = asyncio.ensure_future(server.serve(sockets=[first, second]))
        while not server.started:
            await asyncio.sleep(0.01)
        headers = {"host": f"127.0.0.1:{address[1]}"}
        async with httpx.AsyncClient(headers=headers) as client:
            for url, status in ((url_of(first), 404), (url_of(second), 200)):
                assert (await client.post(f"{url}/api/pull", json={"model": "x"})).status_code == status
                assert (await client.get(f"{url}/api/tags")).status_code == 200
            async with client.stream("POST", f"{url_of(second)}/api/pull", json={"model": "slow"}) as left:
                assert "pulling" in await anext(left.aiter_lines())
            assert await asyncio.to_thread(shelf.cancelled.wait, 10), "whoever leaves ends the download"
        server.should_exit = True
        await serving
    assert shelf.done[0] == ("pull", "x")


async def test_who_answers_there(at):
    async with at() as client:
        assert (await client.get("/")).text == "Ollama is running"
        assert (await client.head("/")).status_code == 200
        version = (await client.get("/api/version")).json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 6, 4), "what VS Code asks for"
        shown = (await client.post("/api/show", content=b'{"name": "tiny"}')).json()
        assert shown["model_info"]["general.basename"] == "tiny"
    async with at(port=8000) as client:
        assert (await client.get("/")).json()["name"] == "localllm"


async def test_the_document_states_the_shape_of_errors(client):
    document = (await client.get("/openapi.json")).json()
    failure = document["paths"]["/api/chat"]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
    wanted = document["components"]["schemas"][failure["$ref"].rpartition("/")[2]]
    lost = (await client.post("/api/chat", json={"model": "nothing"})).json()
    assert list(wanted["properties"]) == list(lost) == ["error"] and isinstance(lost["error"], str)


async def test_the_older_way_to_embed(client):
    old = (await client.post("/api/embeddings", json={"model": "tiny", "prompt": "hello"})).json()["embedding"]
    (new,) = (await client.post("/api/embed", json={"model": "tiny", "input": "hello"})).json()["embeddings"]
    scale = sum(x * x for x in old) ** 0.5
    assert [x / scale for x in old] == pytest.approx(new, abs=1e-5)
    assert (await client.post("/api/embeddings", json={"model": "tiny"})).json() == {"embedding": []}
    assert (await client.post("/api/embed", json={"model": "tiny", "input": []})).json()["embeddings"] == []
    (short,) = (await client.post("/api/embed", json={"model": "tiny", "input": "a", "dimensions": 8})).json()[
        "embeddings"
    ]
    assert len(short) == 8 and sum(x * x for x in short) == pytest.approx(1)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/api/generate", {"prompt": "hello"}),
        ("/api/generate", {"prompt": "hello", "raw": True}),
    ],
)
async def test_log_probabilities(client, path, more):
    sent = {"model": "tiny", "logprobs": True, "top_logprobs": 2, "options": {"num_predict": 5, "temperature": 0}}
    whole = (await client.post(path, json=sent | more | {"stream": False})).json()
    lines = [json.loads(line) for line in (await client.post(path, json=sent | more)).text.splitlines()]
    assert len(whole["logprobs"]) == whole["eval_count"] == 5
    assert [entry for one in lines for entry in one.get("logprobs", [])] == whole["logprobs"]
    assert all(entry.keys() == {"token", "logprob", "bytes", "top_logprobs"} for entry in whole["logprobs"])
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole["logprobs"])
    plain = (
        await client.post(path, json=sent | more | {"stream": False, "logprobs": False, "top_logprobs": None})
    ).json()
    assert "logprobs" not in plain
    bad = await client.post(path, json=sent | more | {"top_logprobs": 21})
    assert bad.status_code == 400 and "top_logprobs" in bad.json()["error"]
    bad = await client.post(path, json=sent | more | {"options": {"num_predict": "x"}})
    assert bad.json()["error"] == 'options.num_predict: must be an integer, not "x".'


def test_the_library_of_this_machine(tiny_path, empty_home, monkeypatch):
    """Copies share the files, removing is exact, and nothing of another program's is touched."""
    mine = empty_home / "data/models/mine/mine.Q8_0.gguf"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(tiny_path.read_bytes())
    theirs = empty_home / "user/.lmstudio/models/pub/theirs/m-Q8_0.gguf"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(tiny_path.read_bytes())
    monkeypatch.setenv("HOME", str(empty_home / "user"))
    monkeypatch.delenv("LOCALLLM_STORES")
    library = HubLibrary(UserConfig())

    library.copy("mine", "other")
    copied = empty_home / "data/models/other/mine.Q8_0.gguf"
    assert copied.samefile(mine)
    for target in ("mine", "../x", "a/b", "x:y", "", "pub/theirs"):
        with pytest.raises(LocalLLMError):
            library.copy("mine", target)
    with pytest.raises(LocalLLMError, match="not on this machine"):
        library.remove("min")
    for act in (library.remove, lambda name: library.copy(name, "new")):
        with pytest.raises(InvalidRequest, match="belongs to LM Studio and is read-only here"):
            act("lmstudio/pub/theirs:Q8_0")
    library.remove("mine")
    assert not mine.exists() and copied.exists() and theirs.exists()
    for name in ("other", "pub/theirs"):
        library.pull(name, lambda _: None, threading.Event())
    for path in (str(copied), "./x", "~/x", "x.gguf", "/etc/passwd"):
        with pytest.raises(LocalLLMError):
            library.pull(path, lambda _: None, threading.Event())
    with pytest.raises(LocalLLMError, match="offline mode is on"):
        HubLibrary(UserConfig(), offline=True).pull("ann/tiny-GGUF", lambda _: None, threading.Event())
    assert [offer.name for offer in local_offers()] == ["other", "lmstudio/pub/theirs:Q8_0"]


async def test_a_model_that_was_pulled_is_served_and_deleted(tiny_path, empty_home, tmp_path, monkeypatch):
    """Against a hub of our own: progress in bytes, the list afterwards, and the end of it."""
    repo = tmp_path / "hub/ann/tiny-GGUF"
    repo.mkdir(parents=True)
    (repo / "tiny-Q8_0.gguf").write_bytes(tiny_path.read_bytes())
    server = [sys.executable, "-P", str(Path(__file__).parents[1] / "hub/hub_server.py"), str(tmp_path / "hub")]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as hub_process:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{int(hub_process.stdout.readline())}")
        pool = ModelPool(local_offers, None, lambda: None)
        service = Service(pool)
        try:
            app = create_app(service, AppOptions(ollama=ADDRESS, library=HubLibrary(UserConfig())))
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:11434") as client:
                assert (await client.get("/api/tags")).json() == {"models": []}
                asked = {"model": "hf.co/ann/tiny-GGUF:Q8_0"}
                lines = [json.loads(line) for line in (await client.post("/api/pull", json=asked)).text.splitlines()]
                assert lines[-1] == {"status": "success"}
                assert {line["total"] for line in lines if "total" in line} == {tiny_path.stat().st_size}
                names = [model["name"] for model in (await client.get("/api/tags")).json()["models"]]
                assert names == ["ann/tiny-GGUF:Q8_0"]
                assert (await client.post("/api/show", json=asked)).status_code == 200, "the name it was pulled by"
                assert (await client.request("DELETE", "/api/delete", json=asked)).status_code == 200
                assert (await client.get("/api/tags")).json() == {"models": []}
                strange = (await client.post("/api/pull", json={"model": "ann/nothing"})).text.splitlines()
                assert "error" in json.loads(strange[-1])
        finally:
            hub_process.kill()
            service.close()
            pool.close()


def test_what_ollama_calls_a_model_finds_it():
    from localllm.cli.served_models import _also
    from localllm.hub import LocalModel, catalog

    latest = LocalModel("ollama/llama3.2:latest", Path("x"), "ollama", quant="latest")
    assert _also(latest) == ("llama3.2:latest", "llama3.2")
    entry = next(c for c in catalog.candidates() if c.name == "qwen3-0.6b" and not c.needs)
    assert {"qwen3:0.6b", f"hf.co/{entry.spec}"} <= set(_also(LocalModel(entry.spec, Path("x"), "hub")))
