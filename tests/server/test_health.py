"""What /health tells, and to whom."""


async def test_the_first_page_says_who_answers(client):
    """Ollama's programs ask for it with HEAD before anything else."""
    first = (await client.get("/")).json()
    assert first["name"] == "localllm" and first["version"] == (await client.get("/version")).json()["version"]
    assert (await client.head("/")).status_code == 200
    for path in (f"{first['apis']['openai']}/models", f"{first['apis']['ollama']}/tags", first["apis"]["openapi"]):
        assert (await client.get(path)).status_code == 200
    assert (await client.post(first["apis"]["anthropic"], json={})).status_code == 400


async def test_details_say_what_runs_how_where_no_key_is_needed(client, tiny_llm):
    assert (await client.get("/health")).json() == {"status": "ok"}
    (row,) = (await client.get("/health?details")).json()["models"]
    assert (row["model"], row["warnings"]) == ("tiny", [])
    assert row["truth_line"] == tiny_llm.run_summary
    assert "matmuls c_int16" in row["truth_line"] and "KV bf16" in row["truth_line"]


async def test_a_server_with_keys_tells_its_owner_only(make_client):
    async with make_client(api_keys=("k",), token="owner") as client:
        assert (await client.get("/health?details")).json() == {"status": "ok"}
        (row,) = (await client.get("/localllm/ps", headers={"authorization": "Bearer owner"})).json()["models"]
        assert "KV bf16" in row["truth_line"]
