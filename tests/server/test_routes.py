"""The routes as clients see them: the official SDK, shapes, streams, errors, the gate."""

import asyncio
import json

import openai
import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello there"}]


def ask(**fields):
    return {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0, **fields}


def events(body):
    lines = [line for line in body.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


@pytest.fixture
async def sdk(client):
    async with openai.AsyncOpenAI(api_key="x", base_url="http://127.0.0.1:8000/v1", http_client=client) as sdk:
        yield sdk


async def test_sdk_chat_whole_and_streamed(sdk):
    """REL-16"""
    whole = await sdk.chat.completions.create(**ask())
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = await sdk.chat.completions.create(**ask(stream=True, stream_options={"include_usage": True}))
    chunks = [chunk async for chunk in stream]
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_sdk_text_completion_list_and_models(sdk):
    answer = await sdk.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=4, temperature=1, seed=1)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.object == "text_completion"
    models = await sdk.models.list()
    assert [m.id for m in models.data] == ["tiny", "org/tiny"]
    assert (await sdk.models.retrieve("org/tiny")).id == "org/tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_sdk_text_stream(sdk):
    whole = await sdk.completions.create(model="tiny", prompt="abc", max_tokens=6, temperature=0)
    stream = await sdk.completions.create(model="tiny", prompt="abc", max_tokens=6, temperature=0, stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == whole.choices[0].text


async def test_logprobs(client):
    body = (await client.post(CHAT, json=ask(logprobs=True, top_logprobs=3))).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(len(c["top_logprobs"]) == 3 and c["logprob"] <= 0 for c in content)
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
    streamed = events((await client.post(CHAT, json=ask(logprobs=True, top_logprobs=3, stream=True))).text)
    seen = [e for c in streamed for x in c["choices"] if x["logprobs"] for e in x["logprobs"]["content"]]
    assert seen == content


async def test_scoring_a_prompt(client):
    """lm-eval-harness: echo, no generation, the log-probability of every prompt token"""
    fields = {"model": "tiny", "prompt": "hello world", "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = (await client.post(TEXT, json=fields)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].endswith("hello world")
    assert logprobs["token_logprobs"][0] is None and all(p <= 0 for p in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    assert "".join(logprobs["tokens"]) == choice["text"]


async def test_n_streams_interleave_and_all_end(client):
    streamed = events((await client.post(CHAT, json=ask(n=3, temperature=1, seed=2, stream=True))).text)
    ends = [x["index"] for c in streamed for x in c["choices"] if x["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


async def test_parallel_requests_equal_lone_ones(client):
    lone = [(await client.post(CHAT, json=ask(seed=i, temperature=1.0))).json() for i in range(6)]
    both = await asyncio.gather(*[client.post(CHAT, json=ask(seed=i, temperature=1.0)) for i in range(6)])
    assert [r.json()["choices"] for r in both] == [r["choices"] for r in lone]


BAD = [
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, ask(messages=[{"role": "robot", "content": "x"}]), 400, "messages[0].role"),
    (CHAT, ask(messages=[{"role": "user", "content": None}]), 400, "messages[0].content"),
    (
        CHAT,
        ask(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        "messages[0].content[0]",
    ),
    (CHAT, ask(model="other"), 404, "model"),
    (CHAT, ask(n=0), 400, "n"),
    (CHAT, ask(n=10**9), 400, "n"),
    (CHAT, ask(n="2"), 400, "n"),
    (CHAT, ask(n=True), 400, "n"),
    (CHAT, ask(temperature=-1), 400, "temperature"),
    (CHAT, ask(temperature="1"), 400, "temperature"),
    (CHAT, ask(top_p=0), 400, "top_p"),
    (CHAT, ask(max_tokens=0), 400, "max_tokens"),
    (CHAT, ask(max_tokens=1.5), 400, "max_tokens"),
    (CHAT, ask(stop=[""]), 400, "stop"),
    (CHAT, ask(stop=["a"] * 17), 400, "stop"),
    (CHAT, ask(seed=2**70), 400, "seed"),
    (CHAT, ask(logit_bias={"99999999": 1}), 400, "logit_bias"),
    (CHAT, ask(logit_bias={"a": 1}), 400, "logit_bias"),
    (CHAT, ask(top_logprobs=3), 400, "top_logprobs"),
    (CHAT, ask(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (CHAT, ask(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, ask(response_format={"type": "json_object"}), 400, "response_format"),
    (CHAT, ask(tools=[{"type": "function"}]), 400, "tools"),
    (CHAT, ask(chat_template="x"), 400, "chat_template"),
    (CHAT, ask(chat_template_kwargs={"tools": 1}), 400, "chat_template_kwargs"),
    (CHAT, ask(cache_salt="a/b"), 400, "cache_salt"),
    (CHAT, ask(messages=[{"role": "user", "content": "x" * 3000}]), 400, "messages"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [""]}, 400, "prompt"),
    (TEXT, {"prompt": [[-1]]}, 400, "prompt"),
    (TEXT, {"prompt": [[10**9]]}, 400, "prompt"),
    (TEXT, {"prompt": ["x"] * 129}, 400, "prompt"),
    (TEXT, {"prompt": ["x"] * 100, "n": 2}, 400, "prompt"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"prompt": "x", "logprobs": 6}, 400, "logprobs"),
    (TEXT, {}, 400, "prompt"),
]


@pytest.mark.parametrize(("route", "fields", "status", "param"), BAD, ids=range(len(BAD)))
async def test_bad_fields(client, tiny_llm, route, fields, status, param):
    """LIM-01 to LIM-08, LIM-12, LIM-14"""
    response = await client.post(route, json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert (await client.get("/health")).status_code == 200
    stats = tiny_llm.stats()
    assert stats.num_running == stats.num_waiting == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}",
     b'{"messages": [{"role": "user", "content": "\\ud800"}]}'],
)  # fmt: skip
async def test_bodies_that_are_no_request(client, body):
    """LIM-10"""
    response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_wrong_type_size_route_and_method(make_client):
    async with make_client(max_body_bytes=1000) as client:
        plain = await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
        assert plain.status_code == 415
        zipped = await client.post(CHAT, json={}, headers={"content-encoding": "gzip"})
        assert zipped.status_code == 415
        large = await client.post(CHAT, json=ask(messages=[{"role": "user", "content": "x" * 2000}]))
        assert (large.status_code, large.json()["error"]["code"]) == (413, "content_too_large")

        async def chunks():
            for _ in range(30):
                yield b" " * 100

        endless = await client.post(CHAT, content=chunks(), headers={"content-type": "application/json"})
        assert endless.status_code == 413
        missing = await client.get("/v1/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
        method = await client.get(CHAT)
        assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_supported")
        assert "POST" in method.headers["allow"]


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("localhost.evil.example", 403), ("127.0.0.1.nip.io", 403), ("", 403),
     ("0.0.0.0.evil", 403), ("localhost:8000", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200)],
)  # fmt: skip
async def test_only_local_hosts(client, host, status):
    """SEC-02"""
    for path in ("/health", "/v1/models"):
        assert (await client.get(path, headers={"host": host})).status_code == status


async def test_origins_must_be_allowed(make_client):
    """SEC-05"""
    async with make_client(origins=("http://localhost:3000",)) as client:
        for origin in ("https://evil.example", "null"):
            assert (await client.post(CHAT, json=ask(), headers={"origin": origin})).status_code == 403
        assert (await client.post(CHAT, json=ask(), headers={"origin": "http://localhost:3000"})).status_code == 200


async def test_keys(make_client):
    """SEC-03, SEC-04"""
    async with make_client(api_keys=("sécret",), loopback=False) as client:
        assert (await client.get("/health")).status_code == 200
        bad = [{}, {"authorization": "Bearer "}, {"authorization": "Bearer wrong"}, {"authorization": b"Bearer \xe9"}]
        for headers in bad:
            for path in ("/v1/models", "/v1/models/", "//v1/models", "/V1/models", "/nothing", "/openapi.json"):
                response = await client.get(path, headers=headers)
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == "Bearer"
        trick = await client.get("/v1/models", headers={"host": "x/health?x="})
        assert trick.status_code != 200
        good = {"authorization": "bearer sécret".encode()}
        assert (await client.get("/v1/models", headers=good)).status_code == 200


async def test_a_bug_shows_nothing_of_our_insides(client, tiny_llm, monkeypatch):
    """ERR-01"""

    def fail(*args, **kwargs):
        raise RuntimeError("<object at 0x7a95e299e750> in /home/user/secret.py")

    monkeypatch.setattr(tiny_llm, "encode_chat", fail)
    response = await client.post(CHAT, json=ask())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "0x7a95" not in response.text and "/home" not in response.text


async def test_draining_refuses_with_503(client, service):
    service.is_draining = True
    response = await client.post(CHAT, json=ask())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in response.headers
    assert (await client.get("/health")).status_code == 503


async def idle(llm, service, seconds=5.0):
    """Wait until nothing is under way; then every page is free or only cached."""
    for _ in range(int(seconds / 0.01)):
        stats = llm.stats()
        if stats.num_running == stats.num_waiting == service.num_reserved == service.num_turns == 0:
            assert stats.pages_free + stats.pages_cached == stats.pages_total
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still busy: {llm.stats()}")


async def turn_of(service, **fields):
    """A turn as the routes open it."""
    from starlette.requests import Request

    from localllm.server.ask import open_chat
    from localllm.server.schemas import ChatRequest

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    chat = await open_chat(service, Request(scope), ChatRequest.model_validate(ask(**fields)))
    return chat.turn


async def test_leaving_a_stream_ends_its_request(service, tiny_llm):
    """REL-04"""
    turn = await turn_of(service, max_tokens=10_000, ignore_eos=True)
    async for _ in turn.batches():
        break
    await idle(tiny_llm, service)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": ["a", 1] * 100_000}, {"prompt": [[1, "a"]] * 100}, {"prompt": {"a": 1}}, {"prompt": [True]}],
    ids=["mixed", "nested", "object", "bool"],
)
async def test_prompts_of_no_known_shape(client, fields):
    """LIM-03"""
    response = await client.post(TEXT, json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_long_bad_lists_stop_at_the_first_element(client):
    body = ask(messages=[{"role": "user", "content": [{"x": 1}] * 300_000}])
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400
    assert len(response.text) < 1000


async def test_prompt_logprobs_with_several_answers(client):
    fields = {"model": "tiny", "prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 1, "n": 2}
    for choice in (await client.post(TEXT, json=fields)).json()["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])


async def test_offsets_of_a_streamed_completion_go_on(client):
    fields = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "temperature": 0, "logprobs": 1, "echo": True}
    whole = (await client.post(TEXT, json=fields)).json()["choices"][0]["logprobs"]
    chunks = events((await client.post(TEXT, json=fields | {"stream": True})).text)
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [x for part in parts for x in part[key]] == whole[key]


async def test_a_client_that_leaves_ends_its_request(service, tiny_llm):
    """REL-04, not streamed"""
    from starlette.requests import Request

    from localllm.server.errors import ClientLeft
    from localllm.server.turns import unless_left

    async def receive():
        return {"type": "http.disconnect"}

    turn = await turn_of(service, max_tokens=10_000, ignore_eos=True)
    with pytest.raises(ClientLeft):
        async with unless_left(Request({"type": "http"}, receive)):
            await turn.answer()
    await idle(tiny_llm, service)


async def test_an_allowed_origin_passes_the_preflight(make_client):
    async with make_client(origins=("http://localhost:3000",), api_keys=("k",)) as client:
        headers = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
        preflight = await client.options(CHAT, headers=headers)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "http://localhost:3000"
        answer = await client.post(CHAT, json=ask(), headers=headers | {"authorization": "Bearer k"})
        assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert (await client.options(CHAT, headers=headers | {"origin": "https://evil.example"})).status_code == 403


async def test_text_that_cannot_be_made_is_an_error_not_a_hang(client, monkeypatch):
    """ISO-06, REL-10"""
    from localllm.stream import TextStream

    monkeypatch.setattr(TextStream, "push", lambda self, token: 1 / 0)
    response = await asyncio.wait_for(client.post(CHAT, json=ask()), 20)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    streamed = await asyncio.wait_for(client.post(CHAT, json=ask(stream=True)), 20)
    assert streamed.status_code == 500


async def test_a_stuck_engine_is_not_healthy(client, tiny_llm, monkeypatch):
    monkeypatch.setattr(tiny_llm, "is_stalled", lambda least_s: True)
    response = await client.get("/health")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stalled")
