"""One request never touches another: a victim's tokens and log-probabilities beside odd neighbours."""

import asyncio
import random
import threading
from unittest import mock

import pytest

from localllm.server import Service, ServiceOptions

from .conftest import CHAT, ask, opened, settled

VICTIM = ask(max_tokens=60, ignore_eos=True, logprobs=True, top_logprobs=3, return_token_ids=True)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}


@pytest.fixture
def roomy(roomy_pool):
    service = Service(roomy_pool, ServiceOptions(parallel=8))
    yield service
    service.close()


def attacker(draw, tokens):
    """A request that bends its own choice of tokens as far as it can; `tokens` are those of the victim."""
    banned = {str(token): -100 for token in tokens}
    bends = [
        {"logit_bias": banned}, {"logit_bias": {str(draw.choice(tokens)): 100}}, {"stop_token_ids": tokens},
        {"min_p": draw.choice([0.05, 0.9])}, {"top_k": 1}, {"top_p": 0.1}, {"typical_p": 0.2},
        {"repetition_penalty": 3.0}, {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"guided_regex": "[0-9]{5,40}"}, {"guided_choice": ["yes", "no"]}, {"min_tokens": 20, "max_tokens": 20},
        {"logprobs": True, "top_logprobs": 20},
    ]  # fmt: skip
    fields = {"temperature": draw.choice([0, 1, 2]), "seed": draw.randrange(1000), "n": draw.choice([1, 1, 4])}
    for bend in draw.sample(bends, 3):
        if not ("guided_regex" in fields or "guided_choice" in fields or "response_format" in fields) or not (
            bend.keys() & {"guided_regex", "guided_choice", "response_format"}
        ):
            fields |= bend
    stop = draw.choice([None, "e", ["a", "th"]])
    text = " ".join(draw.choice(["the", "hello", "är", "日本"]) for _ in range(draw.randrange(1, 30)))
    return ask(
        messages=[{"role": "user", "content": text}], **{"max_tokens": draw.randrange(1, 40)} | fields, stop=stop
    )


@pytest.mark.parametrize("rounds", [6, pytest.param(200, marks=pytest.mark.slow)])
async def test_neighbours_that_bend_their_choices(client, rounds):
    """Bans, biases, penalties, filters, structure, several answers: the victim's tokens and numbers stay its own."""
    draw = random.Random(1)
    alone = (await client.post(CHAT, json=VICTIM)).json()["choices"]
    tokens = sorted(set(alone[0]["token_ids"]))[:100]
    for _ in range(rounds):
        asked = [attacker(draw, tokens) for _ in range(draw.randrange(2, 7))]
        before, after = asked[: len(asked) // 2], asked[len(asked) // 2 :]
        posts = [client.post(CHAT, json=one) for one in (*before, VICTIM, *after)]
        answers = await asyncio.gather(*posts)
        assert {answer.status_code for answer in answers} == {200}
        assert answers[len(before)].json()["choices"] == alone


# --- leaving ---------------------------------------------------------------------------------------------------------


async def cancelled_when(service, condition, **fields):
    """A request whose client leaves as soon as `condition` holds, before it is with the engine."""
    task = asyncio.ensure_future(opened(service, **fields))
    while not condition():
        assert not task.done()
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def aborted_at(service, wanted, **fields):
    """A request that ends at the first piece that is `wanted`."""
    stream = await opened(service, stream=True, **fields)
    async for pieces in stream.batches():
        if any(wanted(piece) for _, piece in pieces):
            return
    raise AssertionError("it ended before that")


async def queued(service, number):
    queue = service.queues["tiny"]
    blocks = queue.reserve("others", cost=queue.parallel + queue.ahead)
    await blocks.granted()
    await cancelled_when(service, lambda: queue.num_waiting)
    blocks.release()


async def compiled(service, number):
    """A schema that no cache knows; the client leaves while it is compiled, which goes on in its thread."""
    schema = {"type": "object", "properties": {f"p{number}_{i}": {"type": "string"} for i in range(300)}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    compiling = threading.Event()
    (row,) = service.pool.loaded()
    compiles = row.llm.output_rules.spec

    def noticed(*given, **more):
        if more.get("constraint"):
            compiling.set()
        return compiles(*given, **more)

    with mock.patch.object(row.llm.output_rules, "spec", noticed):
        await cancelled_when(service, compiling.is_set, response_format=form)


async def prefilled(service, number):
    text = f"{number} " + "word " * 700
    await aborted_at(service, lambda piece: piece.prefill, messages=[{"role": "user", "content": text}])


async def began(service, number):
    await aborted_at(service, lambda piece: piece.token_ids, n=4, temperature=1, ignore_eos=True, max_tokens=100)


async def streamed(service, number):
    left = iter(range(5 + number % 7))
    await aborted_at(service, lambda piece: next(left, None) is None, ignore_eos=True, max_tokens=200)


async def ended(service, number):
    """Its last token is there, and was not sent."""
    stream = await opened(service, max_tokens=3, ignore_eos=True, stream=True)
    while not stream.has_ended:
        await asyncio.sleep(0)
    stream.abort()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("times", [3, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", [queued, compiled, prefilled, began, streamed, ended])
async def test_who_leaves_in_any_phase(roomy, roomy_llm, phase, times):
    """The victim beside it says the same, and nothing of what left stays behind."""
    fields = VICTIM | {"model": "tiny"}

    async def victim():
        (one,) = (await (await opened(roomy, **fields)).outputs())[0].completions
        return one.token_ids, one.logprobs

    alone = await victim()
    for number in range(times):
        if phase is queued:
            await phase(roomy, number)
            assert await victim() == alone
        else:
            beside = asyncio.ensure_future(victim())
            await asyncio.sleep(0)
            await phase(roomy, number)
            assert await beside == alone
    await settled(roomy_llm, roomy)
    roomy_llm.engine.scheduler.check_integrity()
