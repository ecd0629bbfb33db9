"""/v1/chat/completions as clients see it: the official SDK, shapes, the rules of streams, extras."""

import asyncio
import json
import socket
import time

import httpx
import openai
import pytest

from localllm.server import Service, ServiceOptions
from localllm.server.errors import ApiError
from localllm.server.pool import ModelPool
from localllm.server.served_model import ServedModel

from .conftest import CHAT, api_of, ask, events, settled


@pytest.fixture
async def sdk(client):
    async with openai.AsyncOpenAI(api_key="x", base_url=api_of(client), http_client=client) as sdk:
        yield sdk


async def test_sdk_whole_and_streamed_say_the_same(sdk):
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


def test_sdk_of_threads_whole_streamed_and_raw(live):
    """The synchronous client over a real connection, its stream helper, and the raw response."""
    with openai.OpenAI(api_key="x", base_url=f"{live.url}/v1") as sdk:
        text = sdk.chat.completions.create(**ask()).choices[0].message.content
        whole = sdk.chat.completions.create(**ask(stop=text[3:5]))  # the helper wants an answer that ended by itself
        with sdk.chat.completions.stream(**ask(stop=text[3:5])) as stream:
            for _ in stream:
                pass
            assert stream.get_final_completion().choices[0].message.content == whole.choices[0].message.content
        raw = sdk.chat.completions.with_raw_response.create(**ask(), extra_headers={"X-Request-Id": "mine-1"})
        assert raw.headers["x-request-id"] == "mine-1" and raw.parse().object == "chat.completion"
        assert int(raw.headers["openai-processing-ms"]) >= 0
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.chat.completions.create(**ask(model="other"))
        assert caught.value.request_id and caught.value.code == "model_not_found"
        ids = [model.id for model in sdk.models.list()]
        assert ids == ["tiny", "org/tiny"] and sdk.models.retrieve("org/tiny").id == "org/tiny"


async def test_headers_and_form_of_a_stream(client):
    response = await client.post(CHAT, json=ask(stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    chunks = events(response.text)
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {} and chunks[-1]["choices"][0]["finish_reason"]
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-1])
    assert not any("usage" in c for c in chunks)


async def test_usage_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events((await client.post(CHAT, json=ask(stream=True, stream_options=options))).text)
    seen = [c["usage"]["completion_tokens"] for c in chunks if c.get("usage")]
    assert seen == sorted(seen) and seen[-1] == 8
    plain = events((await client.post(CHAT, json=ask(stream=True, stream_options={"include_usage": True}))).text)
    assert all(c["usage"] is None for c in plain[:-1]) and plain[-1]["choices"] == []


async def test_shape_of_a_whole_answer(client):
    body = (await client.post(CHAT, json=ask(service_tier="auto", store=True, metadata={"a": "b"}))).json()
    assert {"id", "object", "created", "model", "choices", "usage"} <= set(body)
    assert body["id"].startswith("chatcmpl-") and body["service_tier"] == "default"
    (choice,) = body["choices"]
    assert {"finish_reason", "index", "message", "logprobs"} <= set(choice)
    assert {"role", "content", "refusal"} <= set(choice["message"]) and choice["message"]["refusal"] is None
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_refusal_is_the_text_of_its_message(client):
    """As in OpenAI's messages, which have a refusal instead of content."""
    hello = ask()["messages"]
    usages = []
    for said in ({"content": None, "refusal": "I will not."}, {"content": "I will not."}):
        sent = ask(messages=[*hello, {"role": "assistant", **said}, *hello])
        usages.append((await client.post(CHAT, json=sent)).json()["usage"]["prompt_tokens"])
    assert usages[0] == usages[1]
    empty = ask(messages=[*hello, {"role": "assistant", "content": None}, *hello])
    assert (await client.post(CHAT, json=empty)).json()["error"]["param"] == "messages[1].content"


async def test_logprobs(client):
    body = (await client.post(CHAT, json=ask(logprobs=True, top_logprobs=3))).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(len(c["top_logprobs"]) == 3 and c["logprob"] <= 0 for c in content)
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
    streamed = events((await client.post(CHAT, json=ask(logprobs=True, top_logprobs=3, stream=True))).text)
    seen = [e for c in streamed for x in c["choices"] if x["logprobs"] for e in x["logprobs"]["content"]]
    assert seen == content


async def test_n_streams_interleave_and_all_end(client):
    streamed = events((await client.post(CHAT, json=ask(n=3, temperature=1, seed=2, stream=True))).text)
    ends = [x["index"] for c in streamed for x in c["choices"] if x["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


async def test_parallel_requests_equal_lone_ones(client):
    lone = [(await client.post(CHAT, json=ask(seed=i, temperature=1.0))).json() for i in range(6)]
    both = await asyncio.gather(*[client.post(CHAT, json=ask(seed=i, temperature=1.0)) for i in range(6)])
    assert [r.json()["choices"] for r in both] == [r["choices"] for r in lone]
    assert len({r["choices"][0]["message"]["content"] for r in lone}) == 6


async def test_extras_of_other_servers(client):
    fields = {"return_token_ids": True, "timings_per_token": True, "logprobs": True, "return_tokens_as_token_ids": True}
    body = (await client.post(CHAT, json=ask(**fields))).json()
    choice = body["choices"][0]
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert body["timings"]["predicted_n"] == 8
    streamed = events((await client.post(CHAT, json=ask(**fields, stream=True))).text)
    ids = [i for c in streamed for x in c["choices"] for i in x.get("token_ids", [])]
    assert ids == choice["token_ids"] and streamed[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert all(chunk["choices"] for chunk in streamed)  # clients read choices[0] of every chunk
    assert [c["timings"]["predicted_n"] for c in streamed if "timings" in c] == [8] and "timings" in streamed[-1]


async def test_stop_strings_and_how_they_show(client):
    whole = (await client.post(CHAT, json=ask(max_tokens=12))).json()["choices"][0]["message"]["content"]
    stop = whole[3:5]
    cut = (await client.post(CHAT, json=ask(max_tokens=12, stop=stop))).json()["choices"][0]
    assert cut["message"]["content"] == whole[: whole.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = await client.post(CHAT, json=ask(max_tokens=12, stop=[stop], include_stop_str_in_output=True))
    assert kept.json()["choices"][0]["message"]["content"] == whole[: whole.index(stop) + len(stop)]


async def test_the_last_message_is_continued(client):
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "once upon"}]
    text = (await client.post("/apply-template", json=ask(messages=turn, continue_final_message=True))).json()["prompt"]
    assert text.endswith("once upon")
    answer = await client.post(CHAT, json=ask(messages=turn, continue_final_message=True))
    assert answer.status_code == 200
    bad = await client.post(CHAT, json=ask(continue_final_message=True))
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "messages")


async def test_max_completion_tokens_wins(client):
    body = (await client.post(CHAT, json=ask(max_tokens=8, max_completion_tokens=3))).json()
    assert body["usage"]["completion_tokens"] == 3


async def test_null_is_the_default(client):
    names = ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "user", "tools", "response_format")
    assert (await client.post(CHAT, json=ask() | dict.fromkeys(names))).status_code == 200


async def test_the_prefix_cache_keeps_salts_apart(client, tiny_llm):
    long = [{"role": "user", "content": "the same long beginning of a prompt, again and again " * 2}]

    async def cached(**fields):
        body = (await client.post(CHAT, json=ask(messages=long, **fields))).json()
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    await cached(cache_salt="alice")
    assert await cached(cache_salt="bob") == 0
    assert await cached(cache_salt="alice") > 0
    assert (await client.post(CHAT, json=ask(cache_salt="a/b"))).status_code == 400


async def test_a_deadline_ends_an_answer_with_what_it_has(client, make_service, make_client, tiny_llm, monkeypatch):
    engine = tiny_llm.engine
    step = engine.stepper.step

    def slow_step():
        time.sleep(0.005)
        return step()

    with monkeypatch.context() as patch:  # 200 tokens take a second on any machine
        patch.setattr(engine.stepper, "step", slow_step)
        body = (await client.post(CHAT, json=ask(max_tokens=200, ignore_eos=True, deadline_ms=300))).json()
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert 0 < body["usage"]["completion_tokens"] < 200
    busy = make_service(parallel=1)
    async with make_client(busy) as other:
        running = [asyncio.ensure_future(other.post(CHAT, json=ask(max_tokens=200, ignore_eos=True))) for _ in range(4)]
        while busy.queues["tiny"].num_waiting < 2:
            await asyncio.sleep(0)
        late = await other.post(CHAT, json=ask(deadline_ms=1))
        assert (late.status_code, late.json()["error"]["code"]) == (503, "deadline_exceeded")
        await asyncio.gather(*running)


async def test_a_stream_begins_before_its_answer_when_that_takes_long(make_service, make_client, tiny_llm, monkeypatch):
    """Headers at admission, comments while nothing comes; a failure is then an event."""
    from localllm.server import reply

    monkeypatch.setattr(reply, "PATIENCE_S", 0.02)
    monkeypatch.setattr(reply, "KEEP_ALIVE_S", 0.05)
    service = make_service()
    slow = tiny_llm.encode_chat

    def encode_chat(*args, **kwargs):
        time.sleep(0.3)
        return slow(*args, **kwargs)

    monkeypatch.setattr(tiny_llm, "encode_chat", encode_chat)
    async with make_client(service) as client:
        text = (await client.post(CHAT, json=ask(stream=True))).text
        assert text.startswith(": ping\n\n") and text.count(": ping") >= 3
        assert events(text)[-1]["choices"][0]["finish_reason"]
        long = [{"role": "user", "content": "x" * 3000}]
        failed = await client.post(CHAT, json=ask(stream=True, messages=long))
        assert failed.status_code == 200
        assert events(failed.text)[-1]["error"]["code"] == "context_length_exceeded"
    await settled(tiny_llm, service)


async def test_an_error_on_the_way_is_an_event(client, tiny_llm, monkeypatch):
    """The SDK raises it."""
    from localllm.errors import OutOfMemory
    from localllm.server.response_stream import AsyncResponseStream

    take = AsyncResponseStream.take

    def failing(self, number, delta):
        if delta.usage is not None:
            delta.error = OutOfMemory("memory ran out at 0x7f00deadbeef in /home/me/secret.py")
        take(self, number, delta)

    monkeypatch.setattr(AsyncResponseStream, "take", failing)
    streamed = events((await client.post(CHAT, json=ask(stream=True))).text)
    error = streamed[-1]["error"]
    assert error["code"] == "does_not_fit" and "0x7f00" not in error["message"] and "/home" not in error["message"]
    async with openai.AsyncOpenAI(api_key="x", base_url=api_of(client), http_client=client) as sdk:
        stream = await sdk.chat.completions.create(**ask(stream=True))
        with pytest.raises(openai.APIError, match="memory ran out"):
            async for _ in stream:
                pass


def test_tool_calls_in_their_shapes():
    """The first delta names the call, the others hold pieces of its arguments."""
    from localllm.llm.outputs import CompletionOutput, add_tool_call
    from localllm.server.openai.output import tool_calls_json, tool_delta

    deltas = [
        {"index": 0, "id": "call_1", "name": "f", "arguments": ""},
        {"index": 0, "arguments": '{"a":'},
        {"index": 0, "arguments": "1}"},
    ]
    shown = [tool_delta(json.dumps(d)) for d in deltas]
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert shown[0] == first and shown[1] == {"index": 0, "function": {"arguments": '{"a":'}}
    one = CompletionOutput(0)
    for delta in deltas:
        add_tool_call(one.tool_calls, delta)
    assert json.loads(tool_calls_json(one.tool_calls)[0]["function"]["arguments"]) == {"a": 1}


async def test_a_request_without_a_model_is_answered_by_the_only_one(client):
    without = {k: v for k, v in ask().items() if k != "model"}
    assert (await client.post(CHAT, json=without)).json()["model"] == "tiny"
    assert (await client.post(CHAT, json=ask(model=""))).json()["model"] == "tiny"
    assert (await client.post(CHAT, json=ask(model="org/tiny"))).json()["model"] == "tiny"


@pytest.mark.parametrize(("embeds", "said"), [(False, "without a chat template"), (True, "is an embedding model")])
async def test_a_model_that_cannot_chat_is_not_loaded_to_say_so(make_client, embeds, said):
    base = ServedModel("base", "base", chat=False, embeds=embeds)
    pool = ModelPool([base, ServedModel("other", "other")].copy, None, lambda: None)
    async with make_client(Service(pool)) as client:
        response = await client.post(CHAT, json=ask(model="base"))
    assert response.status_code == 400 and said in response.text and not pool.loaded()
    pool.close()


@pytest.mark.parametrize("stop", ["", ["a"] * 17, "a" * 257], ids=["empty", "many", "long"])
async def test_a_wrong_stop_string_is_refused_before_a_model_is_loaded(make_client, stop):
    pool = ModelPool([ServedModel("away", "away")].copy, None, lambda: None)
    async with make_client(Service(pool)) as client:
        response = await client.post(CHAT, json=ask(model="away", stop=stop))
    assert response.status_code == 400 and response.json()["error"]["param"] == "stop" and not pool.loaded()
    pool.close()


@pytest.fixture
def two_models():
    pool = ModelPool([ServedModel("first", "first"), ServedModel("second", "second")].copy, None, lambda: None)
    yield pool
    pool.close()


@pytest.mark.parametrize("model", [{}, {"model": ""}, {"model": None}], ids=str)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
        ("/api/generate", {"prompt": "hi"}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
async def test_where_several_are_served_a_request_names_its_model(make_client, two_models, path, body, model):
    async with make_client(Service(two_models)) as client:
        response = await client.post(path, json=body | model)
    assert response.status_code == 400 and "model" in response.text, response.text
    if path == CHAT and "model" in model:
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("model", "missing_required_parameter")
        assert "first, second" in error["message"]


async def test_the_default_model_is_meant_where_none_is_named(two_models):
    service = Service(two_models, ServiceOptions(default_model="second"))
    assert (await service.find(None)).name == (await service.find("")).name == "second"
    assert (await service.find("first")).name == "first"
    gone = Service(two_models, ServiceOptions(default_model="gone"))
    with pytest.raises(ApiError, match="must name a model"):
        await gone.find(None)
    for one in (service, gone):
        one.close()


def test_a_stream_over_a_real_connection_comes_in_pieces(live):
    with httpx.stream("POST", live.url + CHAT, json=ask(stream=True, max_tokens=100, ignore_eos=True)) as response:
        pieces = list(response.iter_raw())
    assert len(pieces) > 10 and pieces[-1].endswith(b"data: [DONE]\n\n")


def test_answers_on_a_kept_connection_do_not_wait_for_acknowledgements(live):
    """Nagle's algorithm and a delayed acknowledgement would cost 40 ms each."""
    accepted = {c.transport.get_extra_info("socket") for c in live.server.server_state.connections}
    with httpx.Client(base_url=live.url) as client:
        client.get("/ping")
        new = {c.transport.get_extra_info("socket") for c in live.server.server_state.connections} - accepted
        assert all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in new) and new
