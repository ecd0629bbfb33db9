"""The page on Python, run as it stands, and the model in an event loop."""

from __future__ import annotations

import asyncio
import doctest
import time
from pathlib import Path

import numpy as np
import pytest

from localllm import LLM, AsyncLLM, SamplingParams
from localllm.errors import ContextTooLong, InvalidRequest

PAGE = Path(__file__).parents[2] / "docs/python.md"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.slow
def test_the_page_on_python(smollm2_path: Path) -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried > 20 and not failed


@pytest.fixture
async def llm(tiny_path: Path):
    async with AsyncLLM(str(tiny_path), ctx=256) as loaded:
        yield loaded


async def test_awaited_is_what_the_model_gives(llm: AsyncLLM) -> None:
    plain = llm.llm.generate("the sea", GREEDY)
    both = await asyncio.gather(llm.generate("the sea", GREEDY), llm.generate("the sea", GREEDY))
    assert [one.completions[0].token_ids for one in both] == [plain.completions[0].token_ids] * 2
    assert "".join([piece.text async for piece in llm.generate_stream("the sea", GREEDY)]) == plain.text
    vectors = await llm.embed(["a", "b"])
    assert np.array_equal(vectors, llm.llm.embed(["a", "b"])) and np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert llm.llm.embed("a").shape == (llm.llm.facts.hidden_size,) and llm.llm.embed([]).shape[0] == 0


async def test_several_answers_to_one_prompt(llm: AsyncLLM) -> None:
    output = await llm.generate("the sea", SamplingParams(n=3, max_tokens=4, ignore_eos=True))
    assert [len(one.token_ids) for one in output.completions] == [4, 4, 4]


async def test_a_cancelled_task_ends_its_request(llm: AsyncLLM) -> None:
    endless = SamplingParams(max_tokens=200, ignore_eos=True)
    task = asyncio.ensure_future(llm.generate("the sea", endless))
    while not llm.llm.stats().num_running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pieces = llm.generate_stream("the sea", endless)
    await anext(pieces)
    await pieces.aclose()
    while llm.llm.stats().num_running:
        await asyncio.sleep(0.001)


async def test_a_cancelled_task_embeds_nothing_more(llm: AsyncLLM) -> None:
    task = asyncio.ensure_future(llm.embed([[(i % 50) + 5] * 250 for i in range(200)]))
    while not llm.llm.stats().num_running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while llm.llm.stats().num_running or llm.llm.stats().num_waiting:
        await asyncio.sleep(0.001)
    assert llm.llm.stats().num_prompt_tokens < 100 * 250


async def test_a_model_that_loads_for_a_cancelled_task_is_closed(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, start, close = asyncio.Event(), LLM._start_engine, LLM.close
    loop = asyncio.get_running_loop()

    def slow(self: LLM) -> None:
        time.sleep(0.3)
        start(self)

    def told(self: LLM) -> None:
        close(self)
        loop.call_soon_threadsafe(closed.set)

    monkeypatch.setattr(LLM, "_start_engine", slow)
    monkeypatch.setattr(LLM, "close", told)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), AsyncLLM(str(tiny_path), ctx=128):
            pass
    await asyncio.wait_for(closed.wait(), 30)


async def test_errors_are_raised_where_they_are_awaited(llm: AsyncLLM) -> None:
    with pytest.raises(ContextTooLong):
        await llm.generate("sea " * 1000)
    with pytest.raises(ContextTooLong):
        await llm.embed(["sea " * 1000])
    with pytest.raises(InvalidRequest):
        await llm.generate("a", SamplingParams(temperature=-1))
    with pytest.raises(RuntimeError, match="async with"):
        _ = AsyncLLM("any").llm


def test_a_text_is_scored_as_its_tokens(tiny_path: Path) -> None:
    with LLM(str(tiny_path), ctx=256) as llm:
        assert np.array_equal(llm.score("the sea"), llm.score(llm.encode_prompt("the sea")))
