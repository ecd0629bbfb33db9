"""/v1/completions: lists of prompts, echo, log-probabilities, and what an evaluation harness makes of them."""

import json

import openai
import pytest

from .conftest import TEXT, api_of, events


@pytest.fixture
async def sdk(client):
    async with openai.AsyncOpenAI(api_key="x", base_url=api_of(client), http_client=client) as sdk:
        yield sdk


def complete(**fields):
    return {"model": "tiny", "prompt": "hello", "max_tokens": 5, "temperature": 0, **fields}


async def test_sdk_list_of_prompts_and_stream(sdk):
    answer = await sdk.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=4, temperature=1, seed=1)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.object == "text_completion"
    whole = await sdk.completions.create(**complete())
    stream = await sdk.completions.create(**complete(), stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == whole.choices[0].text


async def test_a_prompt_as_long_as_the_window_is_scored(client, tiny_llm):
    """The one token that is made and dropped needs no room, as in the windows that evaluation harnesses cut."""
    window = tiny_llm.plan.ctx
    prompt = [5 + at % 200 for at in range(window)]
    fields = complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    choices = [(await client.post(TEXT, json=fields | more)).json()["choices"][0] for more in ({}, {"n": 2}, {})]
    for choice in choices:
        scores = choice["logprobs"]["token_logprobs"]
        assert len(scores) == window and scores[0] is None and None not in scores[1:]
        assert scores == choices[0]["logprobs"]["token_logprobs"]
    short = (await client.post(TEXT, json=fields | {"prompt": prompt[:-1]})).json()["choices"][0]["logprobs"]
    assert scores[1:-1] == pytest.approx(short["token_logprobs"][1:], abs=1e-3)
    for more in ({"prompt": [*prompt, 5]}, {"max_tokens": 2}, {"echo": False, "max_tokens": 1}):
        refused = await client.post(TEXT, json=fields | more)
        assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_several_prompts_stream_side_by_side(client):
    fields = complete(prompt=["a", "b", "c"], stream=True, stream_options={"include_usage": True})
    chunks = events((await client.post(TEXT, json=fields)).text)
    whole = (await client.post(TEXT, json=complete(prompt=["a", "b", "c"]))).json()
    for choice in whole["choices"]:
        parts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(parts) == choice["text"]
    assert chunks[-1]["usage"] == whole["usage"]


async def test_extras_of_other_servers_in_streams(client):
    fields = complete(prompt=["a", "b"], n=2, seed=1, temperature=1.0, return_token_ids=True, timings_per_token=True)
    whole = (await client.post(TEXT, json=fields)).json()
    options = {"continuous_usage_stats": True}
    chunks = events((await client.post(TEXT, json=fields | {"stream": True, "stream_options": options})).text)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [i for c in mine for i in c.get("token_ids", [])] == choice["token_ids"]
        assert [c["prompt_token_ids"] for c in mine if "prompt_token_ids" in c] == [choice["prompt_token_ids"]]
    running = [chunk["usage"] for chunk in chunks if chunk["choices"]]
    counts = [usage["completion_tokens"] for usage in running]
    assert counts == sorted(counts) and running[-1]["total_tokens"] == whole["usage"]["total_tokens"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert max(chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk) == 10


async def test_token_ids_as_prompts(client, tiny_llm):
    ids = tiny_llm.encode_prompt("hello")
    by_ids = (await client.post(TEXT, json=complete(prompt=ids, return_token_ids=True))).json()
    by_text = (await client.post(TEXT, json=complete())).json()
    assert by_ids["choices"][0]["text"] == by_text["choices"][0]["text"]
    assert by_ids["choices"][0]["prompt_token_ids"] == ids and len(by_ids["choices"][0]["token_ids"]) == 5
    both = (await client.post(TEXT, json=complete(prompt=[ids, ids]))).json()
    assert [c["text"] for c in both["choices"]] == [by_text["choices"][0]["text"]] * 2


async def test_scoring_a_prompt(client):
    """echo, no generation, the log-probability of every prompt token"""
    fields = complete(prompt="hello world", max_tokens=0, echo=True, logprobs=1)
    choice = (await client.post(TEXT, json=fields)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].endswith("hello world") and choice["finish_reason"] == "length"
    assert logprobs["token_logprobs"][0] is None and all(p <= 0 for p in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    assert "".join(logprobs["tokens"]) == choice["text"]


async def test_offsets_are_positions_in_the_text(client):
    """Also after characters of several tokens, and for tokens shown as ids."""
    fields = complete(prompt="a 😀漢 z 😀 b", max_tokens=0, echo=True, logprobs=0)
    choice = (await client.post(TEXT, json=fields)).json()["choices"][0]
    text, tokens, offsets = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "\ufffd" in tokens and len(set(offsets)) < len(offsets)
    assert all(token == "\ufffd" or text.startswith(token, at) for token, at in zip(tokens, offsets, strict=True))
    as_ids = (await client.post(TEXT, json=fields | {"return_tokens_as_token_ids": True})).json()["choices"][0]
    assert as_ids["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
async def test_what_lm_eval_sends_and_reads(client, tiny_llm, as_ids):
    """The request of its `local-completions` model, and its way to the sum over a continuation (LM Eval 0.4.9)."""
    context, continuation = "the sky", " is blue"
    whole = tiny_llm.encode_prompt(context + continuation)
    length = len(tiny_llm.encode_prompt(context))
    prompt = [whole] if as_ids else [context + continuation]
    sent = {
        "prompt": prompt, "model": "tiny", "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "temperature": 0,
    }  # fmt: skip
    answer = (await client.post(TEXT, json=sent)).json()
    total = 0.0
    for choice in sorted(answer["choices"], key=lambda c: c["index"]):
        logprobs = choice["logprobs"]
        tokens = logprobs["token_logprobs"][length:-1]
        tops = logprobs["top_logprobs"][length:-1]
        is_greedy = all(p == max(top.values()) for p, top in zip(tokens, tops, strict=True))
        total = sum(tokens)
    import numpy as np

    rows = tiny_llm.score(whole)
    expected = sum(float(rows[i - 1][whole[i]]) for i in range(length, len(whole)))
    assert total == pytest.approx(expected, abs=1e-3)
    assert is_greedy == all(int(np.argmax(rows[i - 1])) == whole[i] for i in range(length, len(whole)))


async def test_what_lm_eval_sends_to_generate(client):
    sent = {
        "prompt": ["Question: 1+1\nAnswer:"], "model": "tiny", "max_tokens": 6, "temperature": 0,
        "stop": ["\n\n", "Question:"], "seed": 1234,
    }  # fmt: skip
    answer = (await client.post(TEXT, json=sent)).json()
    assert [c["index"] for c in answer["choices"]] == [0] and isinstance(answer["choices"][0]["text"], str)


async def test_prompt_logprobs_with_several_answers(client):
    for choice in (await client.post(TEXT, json=complete(max_tokens=2, echo=True, logprobs=1, n=2))).json()["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])


async def test_a_streamed_completion_has_the_log_probabilities_of_a_whole_one(client):
    """Of every answer to every prompt."""
    fields = complete(prompt=["hello world", "hello"], n=2, logprobs=1, echo=True)
    whole = (await client.post(TEXT, json=fields)).json()["choices"]
    chunks = events((await client.post(TEXT, json=fields | {"stream": True})).text)
    for one in whole:
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == one["index"]]
        assert "".join(c["text"] for c in choices) == one["text"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for c in choices if c["logprobs"] for x in c["logprobs"][key]] == one["logprobs"][key]


async def test_a_suffix_is_refused_by_name(client):
    error = (await client.post(TEXT, json=complete(suffix="end"))).json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_feature")


async def test_default_length_is_sixteen(client):
    sent = {"model": "tiny", "prompt": "x", "ignore_eos": True}
    assert (await client.post(TEXT, json=sent)).json()["usage"]["completion_tokens"] == 16


def test_every_logprob_is_json():
    """Minus infinity is no JSON number."""
    from localllm.server.openai.output import finite

    assert json.dumps(finite(float("-inf")), allow_nan=False) == "-9999.0"
