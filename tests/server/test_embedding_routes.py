"""The routes for vectors, scores and ranks over a model that embeds text, and those that it refuses."""

import time

import numpy as np
import pytest

from localllm import LLM
from localllm.server.pool import ModelPool


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    import tiny_encoder

    with LLM(tiny_encoder.tiny_encoder(tmp_path_factory.mktemp("bert")), debug_invariants=True) as llm:
        pool = ModelPool.holding(llm, ("bert",))
        pool.models()
        yield pool
        pool.close()


async def test_every_route_pools_as_the_model_was_trained(client):
    sent = {"model": "bert", "input": ["the sea", "the sun"]}
    answer = (await client.post("/v1/embeddings", json=sent)).json()
    assert answer["pooling"] == "cls" and answer["usage"]["prompt_tokens"] == 8
    vectors = [np.array(row["embedding"]) for row in answer["data"]]
    named = (await client.post("/v1/embeddings", json=sent | {"pooling": "cls"})).json()["data"]
    assert [row["embedding"] for row in named] == [row["embedding"] for row in answer["data"]]
    other = (await client.post("/v1/embeddings", json=sent | {"pooling": "mean"})).json()
    assert other["pooling"] == "mean" and other["data"][0]["embedding"] != answer["data"][0]["embedding"]
    assert (await client.post("/api/show", json={"model": "bert"})).json()["capabilities"] == ["embedding"]
    ollama = (await client.post("/api/embed", json=sent)).json()
    assert ollama["pooling"] == "cls" and np.allclose(ollama["embeddings"], vectors)
    scored = (await client.post("/v1/score", json={"model": "bert", "text_1": "the sea", "text_2": "the sun"})).json()
    assert abs(scored["created"] - time.time()) < 60
    twice = {"model": "bert", "text_1": "a", "queries": "b", "text_2": "c"}
    assert (await client.post("/v1/score", json=twice)).json()["error"]["param"] == "queries"
    assert scored["pooling"] == "cls" and scored["data"][0]["score"] == pytest.approx(vectors[0] @ vectors[1], abs=1e-5)
    ranks = {"model": "bert", "query": "the sea", "documents": ["hills", "the sea"]}
    assert [row["index"] for row in (await client.post("/rerank", json=ranks)).json()["results"]] == [1, 0]


async def test_a_text_beyond_the_window_is_refused_or_cut(client):
    long = {"model": "bert", "input": "the " * 80}
    refused = await client.post("/v1/embeddings", json=long)
    assert refused.status_code == 400 and "64" in refused.json()["error"]["message"]
    assert (await client.post("/api/embed", json=long)).json()["prompt_eval_count"] == 64


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "the sea", "max_tokens": 3}),
        ("/api/generate", {"prompt": "the sea", "stream": False}),
    ],
)
async def test_it_generates_nothing(client, path, body):
    refused = await client.post(path, json={"model": "bert", **body})
    assert refused.status_code == 400 and "is an embedding model" in refused.text
