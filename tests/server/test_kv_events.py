"""GET /localllm/kv_events: for the owner, while the model is loaded."""

import asyncio
import json
from types import SimpleNamespace

from starlette.requests import Request

from localllm.server.other.kv_events import _batches, kv_events

PATH = "/localllm/kv_events"


async def test_the_owner_sees_the_pages_that_are_there_and_those_that_come(make_client, service, tiny_llm):
    prompt = [7 + index % 50 for index in range(80)]
    async with make_client(api_keys=("k",), token="owner") as client:
        assert (await client.get(PATH, headers={"authorization": "Bearer k"})).status_code == 401
        for query, status in (("", 400), ("?model=", 400), ("?model=none", 404)):
            response = await client.get(PATH + query, headers={"authorization": "Bearer owner"})
            assert response.status_code == status and "model" in response.json()["error"]["message"]
    await asyncio.to_thread(tiny_llm.generate, prompt)
    app = SimpleNamespace(state=SimpleNamespace(service=service))
    scope = {"type": "http", "method": "GET", "path": PATH, "headers": [], "query_string": b"model=tiny", "app": app}
    answer = await kv_events(Request(scope))
    assert answer.headers["content-type"].startswith("text/event-stream")
    sent: asyncio.Queue[dict] = asyncio.Queue()
    left = asyncio.Event()

    async def receive():
        await left.wait()
        return {"type": "http.disconnect"}

    async def batch():
        body = (await sent.get()).get("body", b"")
        return json.loads(body[6:]) if body.startswith(b"data: {") else await batch()

    async with asyncio.timeout(20):
        serving = asyncio.ensure_future(answer(scope, receive, sent.put))
        first = await batch()
        assert first["ts"] > 0 and any(event["token_ids"][:16] == prompt[:16] for event in first["events"])
        await asyncio.to_thread(tiny_llm.generate, prompt[::-1])
        while not any(event.get("token_ids", [])[:16] == prompt[::-1][:16] for event in (await batch())["events"]):
            pass
        left.set()
        await asyncio.gather(serving, return_exceptions=True)
    await asyncio.to_thread(tiny_llm.generate, prompt[:5])
    assert not tiny_llm.engine._events._listeners


async def test_a_server_that_drains_ends_the_stream(service):
    app = SimpleNamespace(state=SimpleNamespace(service=service))
    scope = {"type": "http", "method": "GET", "path": PATH, "headers": [], "query_string": b"model=tiny", "app": app}
    answer = await kv_events(Request(scope))
    service.is_draining = True
    pieces = []

    async def send(message):
        pieces.append(message.get("body", b""))

    async with asyncio.timeout(20):
        await answer(scope, asyncio.Event().wait, send)
    assert pieces[-2:] == [b"data: [DONE]\n\n", b""]


async def test_a_reader_that_leaves_as_an_event_comes_is_let_go(service, tiny_llm):
    for turns in range(8):  # of the event loop between the event and the end
        batches = _batches(service, tiny_llm)
        await anext(batches)
        reading = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0.01)
        tiny_llm.engine._events._listeners[-1]({"ts": 0.0, "events": []})
        for _ in range(turns):
            await asyncio.sleep(0)
        if reading.cancel():
            await asyncio.wait({reading})
            assert reading.cancelled(), turns
        await batches.aclose()
    await asyncio.to_thread(tiny_llm.generate, [1, 2, 3])  # the engine has left its listeners
    assert not tiny_llm.engine._events._listeners
