"""Under load, faults and odd surroundings."""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import random
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from localllm import LLM
from localllm.llm.outputs import OutputSpec
from localllm.server import Service, ServiceOptions, reply
from localllm.server.pool import ModelPool
from localllm.server.served_model import Lease

from .conftest import CHAT, TEXT, ask, events, live_server, opened, settled


@pytest.fixture(scope="module")
def own_llm(tiny_path):
    """A model that tests may break."""
    with LLM(tiny_path, max_parallel=8, debug_invariants=True, threads=1) as llm:
        yield llm


@pytest.fixture
def own(own_llm):
    """A server over it."""
    pool = ModelPool.holding(own_llm, ("tiny",))
    pool.models()
    with live_server(pool) as live:
        yield live
    pool.close()


SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip
STRUCTURED = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


def random_request(draw):
    """A greedy or seeded request of any kind but the next."""
    fields = {
        "temperature": draw.choice([0, 0, 1.0]), "seed": draw.randrange(1000), "max_tokens": draw.randrange(1, 24),
        "n": draw.choice([1, 1, 2]), "ignore_eos": draw.random() < 0.5,
    }  # fmt: skip
    if draw.random() < 0.3:
        fields |= {"logprobs": True, "top_logprobs": draw.randrange(4)}
    if draw.random() < 0.3:
        fields["stop"] = draw.choice(["e", ["a", "th"], "xyz"])
    text = " ".join(draw.choice(["the", "and", "in", "är", "日本", "😀"]) for _ in range(draw.randrange(1, 12)))
    return ask(messages=[{"role": "user", "content": text}], **fields)


def bound_request(draw):
    """One with tools, or a schema; a call that is not cut short is one of the tools'."""
    fields = draw.choice([
        STRUCTURED, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": True},
    ])  # fmt: skip
    return random_request(draw) | {"stop": None, "max_tokens": draw.choice([4, 60, 100])} | fields


def joined(streamed):
    """What a stream adds up to, in the shape of a whole answer's choices."""
    choices = {}
    for chunk in streamed:
        for part in chunk["choices"]:
            empty = {"content": "", "calls": [], "logprobs": [], "finish_reason": None}
            one = choices.setdefault(part["index"], empty)
            one["content"] += part["delta"].get("content") or ""
            for call in part["delta"].get("tool_calls", []):
                if "id" in call:
                    one["calls"].append([call["function"]["name"], ""])
                one["calls"][call["index"]][1] += call["function"]["arguments"]
            one["logprobs"] += part["logprobs"]["content"] if part["logprobs"] else []
            one["finish_reason"] = part["finish_reason"] or one["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def plain(whole):
    return [
        {
            "content": c["message"]["content"] or "", "finish_reason": c["finish_reason"],
            "calls": [[call["function"][key] for key in ("name", "arguments")]
                      for call in c["message"].get("tool_calls") or []],
            "logprobs": c["logprobs"]["content"] if c["logprobs"] else [],
        }
        for c in whole["choices"]
    ]  # fmt: skip


@pytest.fixture
def roomy(roomy_pool):
    """With room for tools."""
    service = Service(roomy_pool, ServiceOptions(parallel=8))
    yield service
    service.close()


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.slow)])
async def test_streams_equal_whole_answers(roomy, roomy_llm, make_client, count):
    """Text, calls, log-probabilities, finish reasons and all of usage."""
    draw = random.Random(16)
    reasons = set()
    async with make_client(roomy) as client:
        for number in range(count):
            sent = (bound_request if number % 3 == 0 else random_request)(draw)
            whole = (await client.post(CHAT, json=sent | {"cache_salt": f"{number}"})).json()
            options = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": f"{number} streamed"}
            chunks = events((await client.post(CHAT, json=sent | options)).text)
            assert joined(chunks) == plain(whole), sent
            assert chunks[-1]["usage"] == whole["usage"]
            reasons |= {choice["finish_reason"] for choice in whole["choices"]}
    assert reasons == {"stop", "length", "tool_calls"}


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.slow)])
async def test_a_seed_is_a_seed(client, count):
    """The same alone and among seven others; different seeds differ."""
    draw = random.Random(17)
    different = 0
    for number in range(count):
        sent = ask(seed=number, temperature=1.0, max_tokens=12, ignore_eos=True)
        alone = plain((await client.post(CHAT, json=sent)).json())
        others = [client.post(CHAT, json=random_request(draw)) for _ in range(7)]
        together, *_ = await asyncio.gather(client.post(CHAT, json=sent), *others)
        assert plain(together.json()) == alone
        different += plain((await client.post(CHAT, json=sent | {"seed": number + 1000})).json()) != alone
    assert different >= 0.95 * count


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["every third step", "a quarter of the pages"])
def test_preemption_changes_nothing(own, own_llm, how):
    """Greedy and seeded, several answers, log-probabilities, a schema: streams without a repeated or missing piece.

    None of them takes more than ten times the steps that the longest takes alone.
    """
    draw = random.Random(8)
    asked = [random_request(draw) | {"max_tokens": 40, "ignore_eos": True} for _ in range(7)]
    asked.append(ask(max_tokens=60, **STRUCTURED, logprobs=True))

    async def post(client, one, stream):
        before = own_llm.stats().num_steps
        response = await client.post(CHAT, json=one | {"stream": stream})
        return response, own_llm.stats().num_steps - before

    async def run(stream):
        async with httpx.AsyncClient(base_url=own.url, timeout=120) as client:
            posts = [post(client, one, stream) for one in asked]
            return await asyncio.gather(*posts) if stream else [await one for one in posts]

    alone = asyncio.run(run(False))
    calm = [plain(r.json()) for r, _ in alone]
    assert json.loads(calm[-1][0]["content"]).keys() == {"a", "b"}
    scheduler = own_llm.engine.scheduler
    limits, before, counted = scheduler.limits, scheduler.num_preemptions, preemptions_counted(own.url)
    held = []
    if how == "every third step":
        scheduler.limits = replace(limits, preempt_every=3)
    else:
        own_llm.engine.clear_prefix_cache()
        pool = scheduler.pages.pools[0]
        while pool.num_reclaimable:
            time.sleep(0.01)
        held = [pool.take() for _ in range(pool.num_free - 12)]
    own_llm.engine.check_invariants = not held  # pages held here are nobody's
    try:
        crowd = asyncio.run(run(True))
    finally:
        scheduler.limits = limits
        for page in held:
            pool.release(page)
        own_llm.engine.check_invariants = True
    assert preemptions_counted(own.url) - counted == scheduler.num_preemptions - before > 0
    assert [joined(events(r.text)) for r, _ in crowd] == calm
    assert max(steps for _, steps in crowd) <= 10 * max(steps for _, steps in alone)
    asyncio.run(settled(own_llm, own.service))


def preemptions_counted(url):
    """What the histogram of preemptions a request has, summed up."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(httpx.get(url + "/metrics").text)
    name = "vllm:request_num_preemptions_sum"
    return sum(s.value for family in families for s in family.samples if s.name == name)


# --- faults ----------------------------------------------------------------------------------------------------------


def broken_once(error):
    """A fault that fails one step."""
    left = [error]

    def fault(step):
        if left:
            raise left.pop()

    return fault


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError("no more")], ids=["raises", "memory"])
def test_a_step_that_fails_fails_its_requests(own, own_llm, error):
    """With the reason; the next request is answered. (Steps of several are tried again smaller: tests/engine.)"""
    own_llm.engine.stepper.fault = broken_once(error)
    try:
        first = httpx.post(own.url + CHAT, json=ask())
    finally:
        own_llm.engine.stepper.fault = None
    code = "does_not_fit" if isinstance(error, MemoryError) else "internal_error"
    assert (first.status_code, first.json()["error"]["code"]) in [(500, code), (503, code)]
    assert "boom" not in first.text
    assert httpx.post(own.url + CHAT, json=ask()).status_code == 200
    assert httpx.get(own.url + "/health").status_code == 200
    asyncio.run(settled(own_llm, own.service))


def test_text_that_cannot_be_made_is_an_error_not_a_hang(own, own_llm, monkeypatch):
    """A neighbour is not touched."""
    from localllm.tokenizer.detokenizer import IncrementalDetokenizer

    accept = IncrementalDetokenizer.accept
    alone = httpx.post(own.url + CHAT, json=ask()).json()["choices"]
    poison = own_llm.encode_prompt("x")[0]

    def failing(self, token):
        if token == poison:
            raise ZeroDivisionError
        return accept(self, token)

    monkeypatch.setattr(IncrementalDetokenizer, "accept", failing)
    bad = {"prompt": "a", "max_tokens": 4, "logit_bias": {str(poison): 100}}

    async def both():
        async with httpx.AsyncClient(base_url=own.url, timeout=20) as client:
            posts = [client.post(TEXT, json=bad), client.post(TEXT, json=bad | {"stream": True})]
            return await asyncio.gather(*posts, client.post(CHAT, json=ask()))

    failed, streamed, neighbour = asyncio.run(both())
    assert (failed.status_code, streamed.status_code) == (500, 500)
    assert failed.json()["error"]["code"] == "internal_error"
    assert neighbour.json()["choices"] == alone


def test_a_step_that_hangs_is_told_by_health(own, own_llm, monkeypatch):
    monkeypatch.setattr("localllm.server.service.STALL_S", 0.2)
    monkeypatch.setattr(own_llm.engine.stepper.stats, "longest_step_s", 0.0)
    gate = threading.Event()
    own_llm.engine.stepper.fault = lambda step: gate.wait(20)
    try:
        with httpx.Client(base_url=own.url, timeout=20) as client:
            thread = threading.Thread(target=lambda: client.post(CHAT, json=ask()))
            thread.start()
            deadline = time.monotonic() + 15
            while (health := httpx.get(own.url + "/health")).status_code == 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_stalled")
            assert httpx.post(own.url + CHAT, json=ask()).status_code == 503
            gate.set()
            thread.join(20)
        own_llm.engine.stepper.fault = None
        assert httpx.get(own.url + "/health").status_code == 200
    finally:
        gate.set()
        own_llm.engine.stepper.fault = None


def test_a_gpu_that_fails_while_nothing_runs_is_told_by_health(own, own_llm, monkeypatch):
    def lost(must_stop):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable'")

    assert httpx.post(own.url + CHAT, json=ask(), timeout=20).status_code == 200
    try:
        monkeypatch.setattr(own_llm, "plan", replace(own_llm.plan, device="cuda:0"))
        monkeypatch.setattr("localllm.llm.loaded_model.LoadedModel.why_dead", "the GPU failed: its memory has an error")
        own_llm.engine.when_idle(lost)
        deadline, said = time.monotonic() + 20, ""
        while "restart the server" not in said:
            assert time.monotonic() < deadline, said
            health = httpx.get(own.url + "/health")
            said = health.json()["error"]["message"] if health.status_code == 503 else ""
            time.sleep(0.05)
        assert said.endswith("stopped: the GPU failed: its memory has an error; restart the server.")
        assert health.json()["error"]["code"] == "engine_dead"
        assert own_llm.engine.failure.startswith("the GPU failed: its memory") and "\n" not in own_llm.engine.failure
        assert own_llm.run_summary.startswith(
            "stopped: the GPU failed: its memory has an uncorrectable error (CUDA error"
        )
    finally:
        monkeypatch.undo()
        own_llm.sleep()
        own_llm.wake()


def test_an_engine_that_dies_comes_back(own, own_llm, monkeypatch):
    """What ran gets an error, health says so, and the next success is less than five seconds away."""
    engine = own_llm.engine

    def die():
        raise SystemError("the thread is gone")

    monkeypatch.setattr(engine, "_run_once", die)
    first = httpx.post(own.url + CHAT, json=ask(), timeout=20)
    assert first.status_code == 503
    died = time.monotonic()
    while (again := httpx.post(own.url + CHAT, json=ask(), timeout=20)).status_code != 200:
        assert again.status_code == 503 and time.monotonic() - died < 20
        time.sleep(0.05)
    assert own_llm.engine is not engine
    assert httpx.get(own.url + "/health").status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_larger_than_the_context_is_refused_at_once(live, streamed):
    sent = ask(messages=[{"role": "user", "content": "x" * 3000}], stream=streamed)
    response = httpx.post(live.url + CHAT, json=sent)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "256" in error["message"] and any(word.replace(",", "").isdigit() for word in error["message"].split())


# --- liveness --------------------------------------------------------------------------------------------------------


class Pulse:
    """Asks for /health every 20 ms from a thread of its own; the longest answer in seconds."""

    def __init__(self, url):
        self._url, self.times = url, []
        self._done = threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self):
        with httpx.Client(timeout=30) as client:
            while not self._done.wait(0.02):
                started = time.monotonic()
                client.get(f"{self._url}/health")
                self.times.append(time.monotonic() - started)

    def __exit__(self, *error):
        self._done.set()
        self._thread.join()


def test_health_answers_while_texts_are_read(live):
    """A text of 100,000 tokens, a thousand messages, a large body that is refused; ten times the line."""
    with httpx.Client(base_url=live.url, timeout=60) as client, Pulse(live.url) as pulse:
        long = client.post("/tokenize", json={"prompt": "word " * 40_000}).json()
        assert long["count"] >= 100_000
        many = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 500
        assert client.post(CHAT, json=ask(messages=many)).status_code == 400
        assert client.post(TEXT, json={"prompt": ["a", 1] * 500_000}).status_code == 400
    assert max(pulse.times) < 5.0


async def test_schemas_that_take_long_do_not_hold_up_large_bodies(service, client, tiny_llm, monkeypatch):
    """A large body is parsed in a thread, too."""
    compiling = threading.Event()
    monkeypatch.setattr(tiny_llm.output_rules, "spec", lambda *_, **__: compiling.wait(20) and OutputSpec())
    slow = [client.post(CHAT, json=ask(response_format={"type": "json_object"})) for _ in range(40)]
    waiting = [asyncio.ensure_future(one) for one in slow]
    while service.num_reserved < len(slow):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    large = await asyncio.wait_for(client.post(CHAT, json=ask(user="x" * (1 << 17))), 10)
    compiling.set()
    assert large.status_code == 400
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


async def test_many_rows_are_written_beside_the_event_loop():
    """A row a call, so that others get the interpreter between two."""
    for count in (3, 500):
        rows = ({"é": number, "by": threading.current_thread().name} for number in range(count))
        answer = json.loads((await reply.with_rows({"object": "list", "x": 1}, "data", rows, count)).body)
        assert (answer["object"], answer["x"], [row["é"] for row in answer["data"]]) == ("list", 1, [*range(count)])
        assert ({row["by"] for row in answer["data"]} == {threading.main_thread().name}) == (count == 3)


def test_a_template_bomb_stops_nobody(own, own_llm, monkeypatch):
    """Refused in two seconds, streams go on, health answers."""
    template = own_llm._template.template
    fine = ask(messages=[{"role": "user", "content": "hi"}], max_tokens=150, ignore_eos=True, stream=True)
    with Pulse(own.url) as pulse, httpx.Client(base_url=own.url, timeout=60) as client:
        with client.stream("POST", CHAT, json=fine) as running:
            lines = running.iter_lines()
            next(lines)
            monkeypatch.setattr(own_llm._template, "template", "{{ 'A' * 1000000000 }}")
            started = time.monotonic()
            bomb = httpx.post(own.url + CHAT, json=ask(), timeout=30)
            took = time.monotonic() - started
            monkeypatch.setattr(own_llm._template, "template", template)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert client.post(CHAT, json=ask()).status_code == 200
    assert bomb.status_code == 400 and took < 20
    assert max(pulse.times) < 5.0


def test_pings_do_not_disturb_the_sdk(live, monkeypatch):
    monkeypatch.setattr(reply, "KEEP_ALIVE_S", 0.0)
    with openai.OpenAI(api_key="x", base_url=f"{live.url}/v1") as sdk:
        stream = sdk.chat.completions.create(**ask(max_tokens=100, stream=True), extra_body={"ignore_eos": True})
        assert sum(1 for chunk in stream if chunk.choices[0].delta.content) > 10


# --- soak ------------------------------------------------------------------------------------------------------------


def anonymous_bytes():
    """RssAnon and swap of this process."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))


def fits(sent, choice):
    """Whether an answer is what its schema or its tools demand, as far as it got."""
    if choice["finish_reason"] == "length" or "response_format" not in sent and "tool_choice" not in sent:
        return True
    made = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in made.get("tool_calls") or []]
    objects = calls or [("f", made["content"])]
    return all(json.loads(text).keys() == ({"a", "b"} if name == "f" else set()) for name, text in objects)


async def soak(url, seconds, clients, known):
    """Closed-loop clients with every kind of request; (requests, errors, wrong answers)."""
    counts = {"requests": 0, "errors": 0, "wrong": 0}

    async def one(client, draw):
        sent = random_request(draw)
        kind = draw.random()
        if kind < 0.1:
            expected = known[draw.randrange(len(known))]
            response = await client.post(CHAT, json=expected[0])
            counts["wrong"] += plain(response.json()) != expected[1]
        elif kind < 0.4:
            response = await client.post(CHAT, json=sent | {"stream": True})
            counts["wrong"] += not all(c["finish_reason"] for c in joined(events(response.text)))
        elif kind < 0.5:
            response = await client.post(
                TEXT, json={"prompt": ["a", "b"], "max_tokens": 4, "echo": True, "logprobs": 1}
            )
        elif kind < 0.55:
            response = await client.post("/v1/embeddings", json={"input": ["a", "hello"]})
        elif kind < 0.6:
            response = await client.post("/v1/responses", json={"input": "x", "max_output_tokens": 16})
        elif kind < 0.8:
            sent = bound_request(draw)
            response = await client.post(CHAT, json=sent)
            counts["wrong"] += not all(fits(sent, choice) for choice in response.json()["choices"])
        else:
            response = await client.post(CHAT, json=sent)
        counts["errors"] += response.status_code != 200
        counts["requests"] += 1

    async def loop(number):
        draw = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            while time.monotonic() < end:
                await one(client, draw)

    end = time.monotonic() + seconds
    await asyncio.gather(*[loop(number) for number in range(clients)])
    return counts


def soaked(*given):
    """`soak` to its end, in a process of the clients' own: what grows here is the server."""
    return asyncio.run(soak(*given))


def held(process):
    """Bytes of memory, descriptors, threads."""
    return anonymous_bytes(), process.num_fds(), process.num_threads()


async def all_threads(service):
    """Both pools of threads as large as they get."""
    waits = [asyncio.to_thread(time.sleep, 0.05) for _ in range(40)]
    await asyncio.gather(*waits, *[service.in_thread(lambda: time.sleep(0.05)) for _ in range(8)])


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1, 600])
def test_soak(roomy_pool, roomy_llm, seconds, monkeypatch):
    """Sixteen clients, everything mixed: no error, no wrong answer, nothing left behind."""
    draw = random.Random(1)
    # pytest keeps every line that is logged: 150 bytes of each of 100,000 requests
    monkeypatch.setattr(logging.getLogger("localllm.access"), "disabled", True)
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where the clients' process finds `soaked`
    made = ThreadPoolExecutor(1) if seconds < 60 else ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with live_server(roomy_pool, parallel=8, max_queue=64) as live, made as clients:
        known = []
        for _ in range(5):
            sent = random_request(draw) | {"temperature": 0}
            known.append((sent, plain(httpx.post(live.url + CHAT, json=sent).json())))
        clients.submit(soaked, live.url, min(seconds / 3, 60), 16, known).result()  # warm
        asyncio.run_coroutine_threadsafe(all_threads(live.service), live.loop).result()
        process = psutil.Process()
        before = held(process)
        counts = clients.submit(soaked, live.url, seconds, 16, known).result()
        asyncio.run(settled(roomy_llm, live.service))
        assert counts["errors"] == counts["wrong"] == 0 and counts["requests"] > 5 * seconds
        deadline = time.monotonic() + 20
        limits = (before[0] + (10 << 20), before[1] + 2, before[2] + 2)
        while any(now > most for now, most in zip(held(process), limits, strict=True)):
            assert time.monotonic() < deadline, (held(process), limits)
            time.sleep(0.01)


async def test_a_clock_that_jumps(client, service, monkeypatch):
    """Durations are measured on the other clock."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + random.choice([-3600.0, 0.0, 3600.0]))
    body = (await client.post(CHAT, json=ask(timings_per_token=True))).json()
    assert 0 <= body["timings"]["prompt_ms"] < 60_000 and 0 <= body["timings"]["predicted_ms"] < 60_000
    response = await client.get("/health")
    assert 0 <= int(response.headers["openai-processing-ms"]) < 60_000


# --- metrics ---------------------------------------------------------------------------------------------------------

EXPECTED = [
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "request_success", "cache_config_info", "iteration_tokens_total", "request_prompt_tokens",
    "request_generation_tokens", "request_params_n", "request_params_max_tokens", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_num_preemptions",
]  # fmt: skip


async def test_metrics_add_up(make_service, make_client, tiny_llm):
    """After k requests counters are the sums of usage, histograms have k entries, gauges are at rest."""
    from prometheus_client.parser import text_string_to_metric_families

    service = make_service()
    used = {"prompt_tokens": 0, "completion_tokens": 0}
    async with make_client(service) as client:
        for number in range(6):
            sent = ask(
                stream=number == 2, n=1 + number % 2, stream_options={"include_usage": True} if number == 2 else None
            )
            response = await client.post(CHAT, json=sent)
            usage = events(response.text)[-1]["usage"] if number == 2 else response.json()["usage"]
            for name in used:
                used[name] += usage[name]
        await client.post(CHAT, json=ask(model="other"))
        await settled(tiny_llm, service)
        page = (await client.get("/metrics")).text
    families = {f.name.removeprefix("vllm:"): f for f in text_string_to_metric_families(page)}
    assert set(EXPECTED) <= set(families)

    def value(family, name="", **labels):
        return sum(
            s.value for s in families[family].samples
            if s.name.endswith(name) and labels.items() <= s.labels.items() and s.labels["model_name"] == "tiny"
        )  # fmt: skip

    assert value("prompt_tokens", "_total") == used["prompt_tokens"]
    assert value("generation_tokens", "_total") == used["completion_tokens"]
    assert value("request_success", "_total") == 6
    histograms = [
        name for name, family in families.items()
        if family.type == "histogram" and name not in ("iteration_tokens_total", "inter_token_latency_seconds")
    ]  # fmt: skip
    assert len(histograms) == 11 and {value(name, "_count") for name in histograms} == {6}
    assert value("request_params_n", "_sum") == 9
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(name) == 0
    assert {s.labels["reason"]: s.value for s in families["num_requests_waiting_by_reason"].samples} == {
        "capacity": 0, "deferred": 0,
    }  # fmt: skip
    pages = [families[f"localllm:kv_pages_{name}"].samples[0].value for name in ("total", "free", "cached")]
    assert pages[0] == pages[1] >= pages[2]


WITHOUT_ANSWERS = [
    ("/v1/embeddings", {"input": ["a", "hello there", "c"]}),
    ("/v1/embeddings", {"input": [1, 2, 3]}),
    ("/v1/score", {"text_1": "a", "text_2": ["a", "bc"]}),
    ("/rerank", {"query": "hello", "documents": ["bye", "hello"]}),
    ("/api/embed", {"model": "tiny", "input": ["a", "b"]}),
    (TEXT, {"prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 1}),
    (TEXT, {"prompt": ["a", "bc"], "echo": True, "max_tokens": 0, "n": 2}),
    (
        TEXT,
        {"prompt": "hello", "echo": True, "max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}},
    ),
]


@pytest.mark.parametrize(("path", "sent"), WITHOUT_ANSWERS, ids=range(len(WITHOUT_ANSWERS)))
async def test_what_is_only_read_is_counted_too(make_service, make_client, tiny_llm, caplog, path, sent):
    """In the counters and in the line of the log, both as `usage` has it."""
    caplog.set_level("INFO", "localllm.access")
    service = make_service()
    async with make_client(service, log_format="json") as client:
        response = await client.post(path, json=sent)
        body = events(response.text)[-1] if sent.get("stream") else response.json()
        used = body["prompt_eval_count"] if path == "/api/embed" else body["usage"]["prompt_tokens"]
        await settled(tiny_llm, service)
        page = (await client.get("/metrics")).text
    assert used > 1 and f'vllm:prompt_tokens_total{{model_name="tiny"}} {float(used)}' in page
    assert f'vllm:request_prompt_tokens_sum{{model_name="tiny"}} {float(used)}' in page
    assert "vllm:generation_tokens_total{" not in page
    assert 'vllm:request_generation_tokens_sum{model_name="tiny"} 0.0' in page
    line = next(json.loads(r.getMessage()) for r in caplog.records if r.name == "localllm.access" and path in r.message)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (used, 0)


def test_how_often_a_request_was_put_back_is_counted(service):
    """Of all its answers together."""
    from localllm.llm.outputs import OutputDelta
    from localllm.request import FinishReason, SamplingParams, Timing
    from localllm.server.exchange import Exchange
    from localllm.server.metrics import RequestMeter

    meter = RequestMeter(service.metrics, "tiny", SamplingParams(n=2), Exchange("r", "POST", CHAT, "unix"))
    for index, times in enumerate((2, 1)):
        meter.take(OutputDelta(index, finish_reason=FinishReason.STOP, timing=Timing(num_preemptions=times)))
    assert 'vllm:request_num_preemptions_sum{model_name="tiny"} 3.0' in service.metrics.text().decode()


async def test_an_aborted_request_is_counted_as_such(service, make_client, tiny_llm):
    stream = await opened(service, max_tokens=200, ignore_eos=True, stream=True)
    async for _ in stream.batches():
        break
    await settled(tiny_llm, service)
    async with make_client() as client:
        page = (await client.get("/metrics")).text
    assert 'vllm:request_success_total{finished_reason="abort",model_name="tiny"} 1.0' in page


async def test_a_lease_that_comes_as_its_request_leaves_is_given_back(service, monkeypatch):
    """The thread that loads has begun to hand it over, so that the wait for it cannot be cancelled any more."""
    future, released = Future(), []
    future.set_running_or_notify_cancel()
    monkeypatch.setattr(service.pool, "acquire", lambda model: future)
    asking = asyncio.ensure_future(service.lease((await service.models())[0]))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    future.set_result(Lease(None, lambda: released.append(True)))
    assert released == [True]


# --- memory of a slow reader -----------------------------------------------------------------------------------------


async def test_deltas_nobody_reads_are_merged(service, tiny_llm):
    """What waits for a reader is bounded in deltas, and nothing of it is lost."""
    from localllm.server.response_stream import MAX_PENDING

    sent = {"max_tokens": 180, "ignore_eos": True, "logprobs": True}
    (whole,) = await (await opened(service, **sent)).outputs()
    stream = await opened(service, **sent)
    while tiny_llm.stats().num_running or service.num_reserved:
        await asyncio.sleep(0.01)
    assert stream.num_pending <= MAX_PENDING + 1
    (late,) = await stream.outputs()
    assert late.completions[0].text == whole.completions[0].text
    assert late.completions[0].token_ids == whole.completions[0].token_ids
    assert late.completions[0].logprobs == whole.completions[0].logprobs


def test_a_service_of_its_own_leaves_no_threads(pool):
    before = {t.name for t in threading.enumerate()}
    service = Service(pool, ServiceOptions())
    asyncio.run(service.in_thread(lambda: None))
    service.close()
    deadline = time.monotonic() + 5
    while {t.name for t in threading.enumerate()} - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not {t.name for t in threading.enumerate()} - before


@contextlib.contextmanager
def environment(**values):
    """Variables for a block."""
    old = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def test_the_time_zone_may_change(live):
    for zone in ("Asia/Tokyo", "America/New_York", "nonsense"):
        with environment(TZ=zone):
            time.tzset()
            assert httpx.post(live.url + CHAT, json=ask()).status_code == 200
    time.tzset()
    assert json.loads(httpx.get(live.url + "/version").text)["version"]
