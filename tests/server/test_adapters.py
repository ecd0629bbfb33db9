"""LoRA adapters over HTTP: loaded hot in vLLM's shape, named as a model, listed, and refused where they cannot be."""

import httpx
import pytest
import tiny_models

from localllm.server import AppOptions, create_app
from localllm.server.adapters import AdapterNames

CHAT, LOAD, UNLOAD = "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tiny_path, tmp_path_factory):
    return str(tiny_models.tiny_adapter(tmp_path_factory.mktemp("adapters") / "pirate", tiny_path, 1))


@pytest.fixture
async def local(make_client):
    async with make_client(loopback=True) as client:
        yield client


async def said(client, model, path=CHAT, **more):
    hello = [{"role": "user", "content": "hello there"}]
    body = {"model": model, "messages": hello, "max_tokens": 6, "temperature": 0, **more}
    return await client.post(path, json=body)


async def test_an_adapter_comes_answers_and_goes(local, folder, tiny_llm):
    base = (await said(local, "tiny")).json()["choices"][0]["message"]["content"]
    loaded = await local.post(LOAD, json={"lora_name": "pirate", "lora_path": folder})
    assert loaded.status_code == 200 and loaded.text == "Success: LoRA adapter 'pirate' added successfully."
    try:
        answers = [(await said(local, name)).json() for name in ("pirate", "tiny:pirate", "org/tiny:pirate", "tiny")]
        texts = [one["choices"][0]["message"]["content"] for one in answers]
        assert texts[0] == texts[1] == texts[2] != base == texts[3]
        assert [one["model"] for one in answers] == ["pirate"] * 3 + ["tiny"]
        message = (await said(local, "pirate", "/v1/messages")).json()
        assert message["model"] == "pirate" and message["content"][0]["text"] == texts[0]
        ours = {"options": {"num_predict": 6, "temperature": 0}, "stream": False}
        assert (await said(local, "pirate:latest", "/api/chat", **ours)).json()["message"]["content"] == texts[0]
        listed = {one["id"]: one for one in (await local.get("/v1/models")).json()["data"]}
        assert listed["pirate"]["parent"] == "tiny" and listed["tiny"]["parent"] is None
        assert (await local.get("/v1/models/pirate")).json() == listed["pirate"]
        vectors = await local.post("/v1/embeddings", json={"model": "pirate", "input": "a"})
        assert vectors.status_code == 400 and "name tiny alone" in vectors.json()["error"]["message"]
        again = await local.post(LOAD, json={"lora_name": "pirate", "lora_path": folder})
        assert again.status_code == 400 and "is already loaded" in again.json()["error"]["message"]
        anew = await local.post(LOAD, json={"lora_name": "pirate", "lora_path": folder, "load_inplace": True})
        assert anew.status_code == 200
        worse = {"lora_name": "pirate", "lora_path": f"{folder}/nowhere", "load_inplace": True}
        assert (await local.post(LOAD, json=worse)).status_code == 404
        assert (await said(local, "pirate")).json()["choices"][0]["message"]["content"] == texts[0], "it is kept"
        tiny_llm.unload_adapter("pirate")  # as when a model was unloaded between two requests
        assert (await said(local, "pirate")).json()["choices"][0]["message"]["content"] == texts[0]
    finally:
        gone = await local.post(UNLOAD, json={"lora_name": "pirate"})
    assert gone.text == "Success: LoRA adapter 'pirate' removed successfully."
    assert (await said(local, "pirate")).status_code == 404
    assert (await local.post(UNLOAD, json={"lora_name": "pirate"})).status_code == 404
    assert not tiny_llm.adapters.known()


async def test_bad_loads_are_refused(local, folder, tmp_path):
    for body, status, words in (
        ({"lora_name": "tiny", "lora_path": folder}, 400, "is the name of a model"),
        ({"lora_name": "x", "lora_path": str(tmp_path)}, 404, "holds no adapter"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 404, "holds no adapter"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": folder, "model": "nobody"}, 404, "nobody"),
    ):
        answer = await local.post(LOAD, json=body)
        assert answer.status_code == status and words in answer.json()["error"]["message"]


async def test_only_the_owner_loads_where_others_may_ask(service, folder):
    app = create_app(service, AppOptions(api_keys=("key-of-a-client",), token="owner"))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        body = {"lora_name": "pirate", "lora_path": folder}
        refused = await client.post(LOAD, json=body, headers={"authorization": "Bearer key-of-a-client"})
        assert refused.status_code == 401
        owner = {"authorization": "Bearer owner"}
        assert (await client.post(LOAD, json=body, headers=owner)).status_code == 200
        assert (await client.post(UNLOAD, json=body, headers=owner)).status_code == 200


def test_names_given_at_the_start_are_known_before_the_model_is_loaded(pool):
    names = AdapterNames(pool, "tiny", {"pirate": "/somewhere"})
    assert [one.name for one in names.all()] == ["pirate"]
    found = names.find("tiny:pirate")
    assert found is not None and found.model == "tiny"
    assert names.find("other:pirate") is None and names.find("tiny") is None and names.find(None) is None
