"""The OpenAPI document against the server, and bodies that nobody would send: no 5xx, no hang, nothing left."""

import asyncio
import copy
import json
import math
import random
import time

import httpx
import pytest

from localllm.server.app import ROUTES, document

from .conftest import CHAT, MESSAGES, RESPONSES, TEXT, ask, settled

VALUES = [
    None, True, False, 0, 1, -1, 2, 10**9, -(10**9), 2**63, 2**70, 0.5, -0.5, 1e308, math.inf, "", "x", "1", "\x00",
    "\ud7ff", "😀" * 50, "x" * 5000, [], [None], [[]], [1], ["x"], {}, {"x": 1}, {"type": "text"},
    [{"type": "text", "text": "y"}], "auto", "none",
]  # fmt: skip
SEEDS = {
    CHAT: ask(
        stream=False, n=1, stop=["a"], seed=1, top_p=0.9, top_k=5, logprobs=True, top_logprobs=2, logit_bias={"5": 1},
        stream_options=None, user="u", metadata={"a": "b"}, cache_salt="s", chat_template_kwargs={}, min_p=0.1,
        reasoning_effort="low", priority=0, deadline_ms=60_000,
    ),
    TEXT: {
        "model": "tiny", "prompt": ["a", "b"], "max_tokens": 3, "echo": True, "logprobs": 1, "n": 2, "stream": False,
    },
    RESPONSES: {
        "model": "tiny", "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "max_output_tokens": 16, "text": {"format": {"type": "text"}}, "include": [], "reasoning": {"effort": "low"},
    },
    MESSAGES: {
        "model": "tiny", "max_tokens": 4, "system": "s",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "stop_sequences": ["a"], "temperature": 0.5, "thinking": {"type": "disabled"},
    },
    "/v1/embeddings": {"model": "tiny", "input": ["a"], "encoding_format": "float", "dimensions": 4},
    "/rerank": {"model": "tiny", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    "/tokenize": {"model": "tiny", "prompt": "a", "add_special_tokens": True},
    "/detokenize": {"model": "tiny", "tokens": [5, 6]},
    "/api/chat": {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": False, "keep_alive": "5m",
        "options": {"num_predict": 3, "temperature": 0.5, "seed": 1, "stop": ["a"]},
    },
    "/api/generate": {"model": "tiny", "prompt": "x", "stream": False, "raw": True, "options": {"num_predict": 3}},
}  # fmt: skip


def mutate(value, draw):
    """A copy of a request with one to three places changed, removed, doubled or replaced."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 2, 3])):
        places = list(_places(value))
        holder, key = draw.choice(places)
        kind = draw.random()
        if kind < 0.15 and isinstance(holder, dict):
            holder.pop(key, None)
        elif kind < 0.25 and isinstance(holder, list):
            holder.append(copy.deepcopy(draw.choice(VALUES)))
        elif kind < 0.35 and isinstance(holder, dict):
            name = draw.choice(["tools", "n", "stream", "prompt", "zzz", "logprobs", "echo"])
            holder[name] = copy.deepcopy(draw.choice(VALUES))
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def _places(value):
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])
    if not keys:
        yield {}, "x"


@pytest.mark.parametrize("count", [300, pytest.param(50_000, marks=pytest.mark.slow)])
async def test_mutated_bodies(client, service, tiny_llm, count):
    draw = random.Random(25)
    codes = {}
    for number in range(count):
        path = draw.choice(list(SEEDS))
        sent = mutate(SEEDS[path], draw)
        body = json.dumps(sent).replace("Infinity", "1e400").encode()
        if draw.random() < 0.05:
            at = draw.randrange(len(body))
            body = body[:at] + bytes([draw.randrange(256)]) + body[at + 1 :]
        started = time.monotonic()
        response = await asyncio.wait_for(
            client.post(path, content=body, headers={"content-type": "application/json"}), 20
        )
        known = response.status_code in (200, 400, 404) or "deadline_exceeded" in response.text  # a mutated deadline
        assert known, (number, path, body[:500], response.text[:300])
        assert time.monotonic() - started < 20
        codes[response.status_code] = codes.get(response.status_code, 0) + 1
    assert codes[200] > count * 0.05 and codes[400] > count * 0.3
    await settled(tiny_llm, service)
    tiny_llm.engine.scheduler.check_integrity()


def test_the_document_names_every_route():
    made = document()
    operations = {(m.upper(), path) for path, methods in made["paths"].items() for m in methods}
    assert len(operations) == len(ROUTES)
    json.dumps(made, allow_nan=False)
    ids = [op["operationId"] for methods in made["paths"].values() for op in methods.values()]
    assert len(set(ids)) == len(ids)
    for methods in made["paths"].values():
        for operation in methods.values():
            assert operation["summary"].endswith(".")


async def test_the_document_is_served(client):
    assert (await client.get("/openapi.json")).json() == document()


def test_what_is_answered_is_what_the_document_says(live):
    """The keys that it promises are there."""
    with httpx.Client(base_url=live.url, timeout=30) as client:
        for path, sent in SEEDS.items():
            answer = client.post(path, json=sent)
            assert answer.status_code == 200, (path, answer.text)
            schema = document()["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
            assert set(schema.get("required", [])) <= set(answer.json()), path


@pytest.mark.slow
def test_schemathesis(pool):
    """Some five thousand requests made from our own document: every answer is one it allows."""
    import hypothesis
    import schemathesis
    from schemathesis.checks import CHECKS, load_all_checks

    from .conftest import live_server

    load_all_checks()
    names = {"not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"}
    wanted = [check for check in CHECKS.get_all() if check.__name__ in names]
    assert len(wanted) == len(names)
    with live_server(pool, max_queue=64) as live:
        schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
        total = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path.startswith("/localllm"):
                continue

            @hypothesis.given(case=operation.as_strategy())
            @hypothesis.settings(
                max_examples=250, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
            )
            def check(case):
                nonlocal total
                total += 1
                if isinstance(case.body, dict):  # none of them may generate for minutes
                    case.body = {**case.body, "max_tokens": 4} if "max_tokens" in str(case.body) else case.body
                response = case.call(timeout=30)
                if response.status_code == 503:  # the request may leave no time for an answer
                    assert response.json()["error"]["code"] == "deadline_exceeded"
                    return
                case.validate_response(response, checks=wanted)

            check()
        assert total >= 5000
        assert httpx.get(f"{live.url}/health").status_code == 200
