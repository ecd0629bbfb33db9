"""`serve --ray`: two replicas in a Ray of their own behind one endpoint, from the first request to the last.

The tests follow one another on one endpoint: what the APIs answer, where conversations go, a killed replica, a rolling
update, more and fewer replicas, the end.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from .conftest import CHAT, HELLO, WAIT_S, Endpoint, streamed, tiny_endpoint, until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray uses what others have deprecated
pytest.importorskip("ray", reason="ray is not installed: pip install -c constraints.txt -e '.[cluster]'")

HERE = Path(__file__).resolve()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """RAY_ADDRESS names a cluster to use instead of starting one."""
    address = os.environ.get("RAY_ADDRESS")
    made = tiny_endpoint(tmp_path_factory.mktemp("ray"), *([address] if address else []))
    try:
        yield made.wait()
    finally:
        made.end()


def conformance(endpoint: Endpoint, *names: str) -> None:
    """The server's own tests, asked of the endpoint."""
    files = [str(HERE.parents[1] / f"test_{name}.py") for name in names]
    environment = dict(os.environ) | {"DOOR_URL": endpoint.url}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[3])
    assert run.returncode == 0, run.stdout[-6000:]


def test_every_api_answers_as_one_server_does(endpoint: Endpoint) -> None:
    conformance(endpoint, "chat", "completions", "other_apis", "ollama")


def test_who_watches_sees_every_replica(endpoint: Endpoint) -> None:
    assert endpoint.get("/health").json() == {"status": "ok", "replicas": 2}
    assert len(endpoint.counted("vllm:kv_cache_usage_perc")) == 2
    assert endpoint.ask().status_code == 200
    assert sum(endpoint.counted("vllm:generation_tokens_total").values()) > 0
    rows = endpoint.get("/localllm/ps", headers={"authorization": f"Bearer {endpoint.token}"}).json()["models"]
    assert len({row["replica"] for row in rows}) == 2 and {row["state"] for row in rows} == {"ready"}
    assert endpoint.get("/localllm/ps").status_code == 401
    refused = httpx.post(f"{endpoint.url}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"}, timeout=60)
    assert refused.status_code == 400 and "all at once" in refused.json()["error"]["message"]


class Door:
    """A second door of this process before the same replicas."""

    def __init__(self, cluster: str, **options: Any) -> None:
        import ray
        from ray import serve

        from localllm.server.cluster import deployment
        from localllm.server.cluster.door import Door as Before
        from localllm.server.middleware import AppOptions

        if not ray.is_initialized():
            deployment.connect(cluster)
        self.deployment = deployment
        self.door = Before(AppOptions(**options))
        self.door.handle = serve.get_app_handle(deployment.NAME).options(stream=True)

    def deploy(self, path: Path, max_queue: int = 256, **fleet: Any) -> None:
        from localllm.config import EngineOptions
        from localllm.server.cluster.replica import ReplicaOptions
        from localllm.server.service import ServiceOptions

        engine = EngineOptions(max_parallel=8, ctx=4096, threads=1)
        options = ReplicaOptions(str(path), ("tiny",), engine, ServiceOptions(8, max_queue), (), True)
        self.deployment.deploy(options, self.deployment.FleetOptions(cpus=0.5, **fleet))

    async def client(self, **more: Any) -> httpx.AsyncClient:
        from localllm.server.cluster.affinity import Fleet

        while not Fleet.running:
            await asyncio.sleep(0.05)
        transport = httpx.ASGITransport(app=self.door.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=WAIT_S, **more)


@pytest.fixture(scope="module")
def cluster(endpoint: Endpoint) -> Iterator[str]:
    """The address of the endpoint's Ray, where this process is a client from now on."""
    import ray

    yield endpoint.cluster
    ray.shutdown()


async def conversations(client: httpx.AsyncClient, first: int = 100, turns: int = 4) -> tuple[int, int]:
    """(cached, all) prompt tokens of the later turns of ten conversations, four at a time."""
    cached = total = 0
    gate = asyncio.Semaphore(4)

    async def one(number: int) -> None:
        nonlocal cached, total
        messages = [{"role": "user", "content": f"{number} is a number. " * 6}]
        for turn in range(turns):
            async with gate:
                body = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
                answer = await client.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            if turn:
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                total += usage["prompt_tokens"]
            said = answer.json()["choices"][0]["message"]["content"] or "-"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and {turn}?"}]

    await asyncio.gather(*map(one, range(first, first + 10)))
    return cached, total


async def test_keys_and_limits_hold_at_the_door(endpoint: Endpoint, cluster: str) -> None:
    door = Door(cluster, api_keys=("the-key-of-the-door",))
    async with await door.client() as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/health")).status_code == 200
        keyed = {"authorization": "Bearer the-key-of-the-door"}
        assert (await client.get("/v1/models", headers=keyed)).status_code == 200
        large = await client.post(CHAT, content=b"x" * ((16 << 20) + 1), headers=keyed)
        assert large.status_code == 413
        assert (await client.get("/v1/models", headers=keyed | {"host": "evil.example"})).status_code == 403
        door.door.is_draining = True
        assert (await client.get("/health")).status_code == 503


async def test_two_doors_send_a_stored_response_to_who_has_it(endpoint: Endpoint, cluster: str) -> None:
    async with await Door(cluster).client() as client:
        for number in range(6):
            asked = {"model": "tiny", "input": f"question {number}", "max_output_tokens": 16}
            first = httpx.post(f"{endpoint.url}/v1/responses", json=asked, timeout=WAIT_S).json()
            then = await client.post("/v1/responses", json=asked | {"previous_response_id": first["id"]})
            assert then.status_code == 200, then.text
            assert (await client.get(f"/v1/responses/{first['id']}")).json()["id"] == first["id"]


def kill(number: int = 1) -> None:
    """End replicas as nothing else does."""
    found = [
        one for one in psutil.process_iter(["cmdline"]) if "ServeReplica:localllm:Replica" in str(one.info["cmdline"])
    ]
    ours = [one for one in found if one.uids().real == os.getuid()]
    for one in ours[:number]:
        one.kill()


async def test_a_rolling_update_is_not_noticed(endpoint: Endpoint, cluster: str) -> None:
    """The same name, another file: requests go on all the time, then all are answered by the new one."""
    door, done, statuses = Door(cluster), asyncio.Event(), []

    async def asking(client: httpx.AsyncClient) -> None:
        while not done.is_set():
            status, text = await streamed(client, endpoint.url, f"question {random.random()}", 40)
            statuses.append(status)
            assert '"error"' not in text and text.endswith("data: [DONE]\n\n")

    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        asks = [asyncio.ensure_future(asking(client)) for _ in range(3)]
        await asyncio.to_thread(lambda: door.deploy(endpoint.roomy, least=2, most=2))
        await until(lambda: endpoint.get("/v1/models").json()["data"][0]["max_model_len"] == 4096)
        done.set()
        await asyncio.gather(*asks)
    assert set(statuses) == {200}


def test_what_is_constrained_and_called_is_right_there_too(endpoint: Endpoint) -> None:
    conformance(endpoint, "structured", "sdks")


async def test_a_conversation_goes_where_its_pages_are(
    endpoint: Endpoint, cluster: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from localllm import LLM
    from localllm.server import AppOptions, Service, ServiceOptions, create_app
    from localllm.server.cluster import door as of_door
    from localllm.server.cluster.affinity import Prefix
    from localllm.server.pool import ModelPool

    with LLM(endpoint.roomy, max_parallel=8, ctx=4096) as llm:
        pool = ModelPool.holding(llm, ("tiny",))
        pool.models()
        service = Service(pool, ServiceOptions(8))
        transport = httpx.ASGITransport(app=create_app(service, AppOptions()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=WAIT_S) as client:
            one, total = await conversations(client)
        service.close()
        pool.close()
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=WAIT_S) as client:
        two, _ = await conversations(client)
        shares = endpoint.counted("vllm:prompt_tokens_total")
    anywhere = [Prefix(((1, os.urandom(8)),), 1) for _ in range(1000)]
    monkeypatch.setattr(of_door, "prefix_of", lambda path, body: anywhere.pop())
    async with await Door(cluster).client() as client:
        without, _ = await conversations(client, 200)
    with capsys.disabled():
        print(f"\ncached tokens of {total}: one replica {one}, two {two}, two without affinity {without}")
    assert two >= 0.9 * one
    assert min(shares.values()) > 0, "both have something to do"
    assert without < 0.9 * one, "the measurement sees the difference"


async def test_a_killed_replica_costs_only_what_it_was_doing(endpoint: Endpoint) -> None:
    """Streams of the one end with a named error; the others, and all that are asked meanwhile, are answered."""
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        running = [asyncio.ensure_future(streamed(client, endpoint.url, f"tell {n}", 2000)) for n in range(8)]
        await until(lambda: all(v >= 1 for v in endpoint.counted("vllm:num_requests_running").values()))
        kill()
        meanwhile = await asyncio.gather(*(streamed(client, endpoint.url, f"question {n}", 5) for n in range(6)))
        assert all(status == 200 and '"error"' not in text for status, text in meanwhile)
        answers = await asyncio.gather(*running)
    ended = [text for _, text in answers if '"error"' not in text]
    lost = [text for _, text in answers if '"error"' in text]
    assert ended and lost
    assert all('"code":"replica_lost"' in text and text.endswith("data: [DONE]\n\n") for text in lost)
    await until(lambda: endpoint.replicas == 2)


async def test_replicas_come_with_requests_and_go_without_breaking_one(endpoint: Endpoint, cluster: str) -> None:
    door, enough, answers = Door(cluster), asyncio.Event(), []
    await asyncio.to_thread(lambda: door.deploy(endpoint.roomy, 16, least=1, most=2, scale_up_s=1, scale_down_s=2))
    await until(lambda: endpoint.replicas == 1)
    async with httpx.AsyncClient(timeout=WAIT_S, limits=httpx.Limits(max_connections=90)) as client:
        burst = await asyncio.gather(*(streamed(client, endpoint.url, f"all at once {n}", 400) for n in range(90)))
    refused = [text for status, text in burst if status == 429]
    assert len(refused) >= 10 and all('"code":"queue_full"' in text for text in refused)
    assert all(text.endswith("[DONE]\n\n") for status, text in burst if status != 429)
    await until(lambda: endpoint.replicas == 1)

    async def asking(client: httpx.AsyncClient) -> None:
        while not enough.is_set():
            answers.append(await streamed(client, endpoint.url, f"question {random.random()}", 100))

    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        asks = [asyncio.ensure_future(asking(client)) for _ in range(20)]
        await until(lambda: endpoint.replicas == 2)
        long = [asyncio.ensure_future(streamed(client, endpoint.url, f"go on {n}", 3500)) for n in range(4)]
        enough.set()
        await asyncio.gather(*asks)
        await until(lambda: endpoint.replicas == 1)
        answers += await asyncio.gather(*long)
    assert all(status == 200 and '"error"' not in text and text.endswith("[DONE]\n\n") for status, text in answers)


def test_the_end_waits_for_answers(endpoint: Endpoint) -> None:
    with httpx.stream(
        "POST", f"{endpoint.url}{CHAT}", timeout=WAIT_S,
        json={"model": "tiny", "messages": HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True},
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        next(lines)
        endpoint.process.send_signal(signal.SIGTERM)
        text = list(lines)
    assert "data: [DONE]" in text and not any('"error"' in line for line in text)
    assert endpoint.process.wait(WAIT_S) == 0, endpoint.log.read_text()[-3000:]
    said = endpoint.log.read_text()
    assert "stopped" in said and "SIGTERM received" not in said, "Ray's handler would abort the process after 3 seconds"
