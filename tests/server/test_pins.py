"""/localllm/pins: made, listed, refused and released."""

PATH = "/localllm/pins"
OWNER = {"authorization": "Bearer owner"}


async def test_a_prefix_is_pinned_for_a_time_and_released(make_client, tiny_llm):
    text = "once upon a time in a town by the sea " * 6
    async with make_client(token="owner") as client:
        client.headers.update(OWNER)
        made = (await client.post(PATH, json={"model": "tiny", "prompt": text, "priority": 7, "ttl_s": 60})).json()
        size = tiny_llm.plan.page_size
        assert made["model"] == "tiny" and made["tokens"] >= size and made["tokens"] % size == 0
        assert made["priority"] == 7 and 50 < made["expires_in_s"] <= 60
        (listed,) = (await client.get(PATH)).json()["pins"]
        assert listed["id"] == made["id"]
        ids = tiny_llm.encode_prompt(text)
        (path,) = [tiny_llm.engine._pages.tree.match(ids, "", len(ids))]
        assert [node.rank[0] for node in path] == [7] * (made["tokens"] // size)
        assert (await client.post("/localllm/unpin", json={"id": made["id"]})).json()["deleted"] is True
        again = await client.post("/localllm/unpin", json={"id": made["id"]})
        assert again.status_code == 404 and made["id"] in again.json()["error"]["message"]
        assert (await client.get(PATH)).json() == {"pins": []}


async def test_what_cannot_be_pinned_is_refused_by_name(make_client, tiny_llm):
    async with make_client(token="owner") as client:
        client.headers.update(OWNER)
        for sent, said in (
            ({"prompt": "x"}, "but a page has"),
            ({"prompt": "x", "priority": 0}, "priority"),
            ({"prompt": "x", "ttl_s": -1}, "ttl_s"),
            ({}, "prompt"),
            ({"prompt": "one two three four " * 900}, "pages"),
        ):
            response = await client.post(PATH, json={"model": "tiny", **sent})
            assert response.status_code == 400 and said in response.text, (sent, response.text)
    assert tiny_llm.engine.pins.all() == []
