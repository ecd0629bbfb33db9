"""The cost of HTTP: streaming and first token against the bare engine, small requests, health under load, shutdown.

    python benchmarks/server.py [MODEL] [--json FILE] [--repeat 5] [--quick] [--only overload]

Server and client are separate processes; the server computes with one thread, which leaves the client the other of two
cores. Engine and server are measured in alternation. Rows are medians with their targets; run it on an otherwise idle
machine. benchmarks/structured.py measures the cost of schemas and grammars, benchmarks/soak.py hours under load.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import server_stress as stress
from server_client import Connection, Server, percentile, pulse, rss_anon_mb

MESSAGES = [{"role": "user", "content": "Write about the sea."}]
TOKENS = {1: 128, 32: 48}
WORKING = 4  # working connections among slow ones: 32 would fill the server, and /health would measure its queue
OTHER = "gemma3-270m"  # the model to load during /health requests
Rows = list[dict[str, Any]]


def engine_main(model: str) -> None:
    """The bare engine in a process of its own: one line of JSON in, one line out."""
    from localllm import LLM, SamplingParams

    with LLM(model, threads=1, ctx=1024, max_parallel=32) as llm:
        llm.generate("warm up", SamplingParams(max_tokens=4))
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(engine_run(llm, *json.loads(line))), flush=True)


def engine_run(llm: Any, count: int, tokens: int) -> tuple[float, float]:
    """(tokens per second, seconds to the first token) of equal concurrent conversations without a reader."""
    from localllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    done = threading.Semaphore(0)
    firsts: dict[int, float] = {}

    def listen(number: int, piece: Any) -> None:
        if piece.token_ids:
            firsts.setdefault(number, time.perf_counter() - started)
        if piece.finish_reason is not None:
            done.release()

    started = time.perf_counter()
    for number in range(count):
        prompt = llm.encode_chat(MESSAGES)
        llm.submit(prompt, params, splits_reasoning=True, listener=partial(listen, number))
    for _ in range(count):
        done.acquire()
    return count * tokens / (time.perf_counter() - started), statistics.median(firsts.values())


class Engine:
    """Client of the engine process."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, __file__, model, "--engine"]
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def measure(self, streams: int) -> tuple[float, float]:
        """(tokens per second, seconds to the first token)"""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([streams, TOKENS[streams]]) + "\n")
        self._process.stdin.flush()
        tps, first = json.loads(self._process.stdout.readline())
        return tps, first

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


async def streams(port: int, count: int, model: str) -> tuple[float, float]:
    """The same over HTTP, with one event per token."""
    connections = [await Connection(port).open() for _ in range(count)]
    body = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS[count], "ignore_eos": True}
    started = time.perf_counter()
    results = await asyncio.gather(*[c.stream("/v1/chat/completions", body) for c in connections])
    took = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return count * TOKENS[count] / took, statistics.median(first for first, _, _ in results)


async def many_small(port: int, seconds: float, connections: int = 32) -> float:
    """Requests of 16 tokens per second over this many connections."""
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    done = 0

    async def loop() -> None:
        nonlocal done
        connection = await Connection(port).open()
        while time.perf_counter() < end:
            status, _ = await connection.post("/v1/completions", body)
            assert status == 200
            done += 1
        connection.close()

    end = time.perf_counter() + seconds
    await asyncio.gather(*[loop() for _ in range(connections)])
    return done / seconds


async def health_while(
    port: int, path: str, body: Any, status: int, at_least_s: float = 3.0
) -> tuple[list[float], float]:
    """(latencies of /health every 50 ms during a request, the request's seconds); short requests are repeated."""
    done = asyncio.Event()
    watching = asyncio.ensure_future(pulse(port, done, 0.05))
    connection = await Connection(port).open()
    begun = started = time.perf_counter()
    took = []
    while not took or started - begun < at_least_s:
        got, data = await connection.post(path, body)
        assert got == status, data[:300]
        took.append(time.perf_counter() - started)
        started += took[-1]
    done.set()
    return await watching, statistics.median(took)


async def health_while_loading(port: int, model: str) -> tuple[list[float], float]:
    """The same while another model is loading for its first request."""
    return await health_while(port, "/v1/completions", {"model": model, "prompt": "x", "max_tokens": 1}, 200, 0)


async def refusals(port: int) -> list[float]:
    """Seconds of every 429 in a burst of 64, with 8 running and 16 waiting."""
    connections = [await Connection(port).open() for _ in range(64)]
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
    late: list[float] = []

    async def one(connection: Connection) -> None:
        started = time.perf_counter()
        status, _ = await connection.post("/v1/completions", body)
        if status == 429:
            late.append(time.perf_counter() - started)

    await asyncio.gather(*[one(c) for c in connections])
    for connection in connections:
        connection.close()
    return late


async def disconnects(port: int, count: int) -> float:
    """Seconds from the last of many random disconnects until every gauge is back at rest."""
    draw = random.Random(1)
    places = asyncio.Semaphore(32)

    async def one() -> None:
        async with places:
            connection = await Connection(port).open()
            body = {"prompt": [draw.randrange(260) for _ in range(20)], "max_tokens": 200, "ignore_eos": True}
            connection.send("POST", "/v1/completions", body | {"stream": draw.random() < 0.5})
            await asyncio.sleep(draw.random() * 0.1)
            connection.close()

    await asyncio.gather(*[one() for _ in range(count)])
    started = time.perf_counter()
    connection = await Connection(port).open()
    while True:
        _, page = await connection.get("/metrics")
        values = dict(line.rsplit(" ", 1) for line in page.decode().splitlines() if not line.startswith("#"))
        named = {name.split("{")[0]: float(value) for name, value in values.items()}
        rest = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        if (
            not any(named[name] for name in rest)
            and named["localllm:kv_pages_total"] == named["localllm:kv_pages_free"]
        ):
            connection.close()
            return time.perf_counter() - started


async def slow_clients(port: int, quiet: int, turns: int) -> tuple[list[float], float]:
    """(latencies of /health, throughput in percent) of a server with 1,000 slow connections, alternating with an equal
    server without them, because the same work takes up to a third longer from one minute to the next.
    """

    async def working(port: int) -> tuple[float, list[float]]:
        done = asyncio.Event()
        watching = asyncio.ensure_future(pulse(port, done, 0.05))
        rate = await many_small(port, 2, WORKING)
        done.set()
        return rate, await watching

    shares, times = [], []
    for turn in range(turns):
        if turn % 3 == 0:  # the server ends them after 15 s
            socks = slow_connections(port)
            await asyncio.sleep(1)  # accepting a thousand takes a while; measure with them connected
        alone, _ = await working(quiet)
        beside, health = await working(port)
        shares.append(100 * beside / alone)
        times += health
        if turn % 3 == 2 or turn == turns - 1:
            for sock in socks:
                sock.close()
    return times, statistics.median(shares)


def slow_connections(port: int) -> list[socket.socket]:
    """Open a thousand connections that send nothing, or only part of a request."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    starts = [
        b"",
        b"POST /v1",
        head,
        head + b"Content-Length: 9999\r\n\r\n{",
        b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n\0junk",
    ]
    socks = []
    for start in starts * 200:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.send(start)
        socks.append(sock)
    return socks


def tiny_model(folder: Path, context: int = 256) -> Path:
    """Write model T, with about a hundred thousand random weights."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/checkpoint"))
    import tiny_models

    path: Path = tiny_models.tiny_gguf(folder / "tiny.gguf", "Q8_0", context=context)
    return path


def measure(model: str, repeat: int, quick: bool, row: Callable[..., None]) -> None:
    """Everything."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        options = ("--threads", "1", "--ctx", "1024", "--parallel", "32")
        engine = Engine(model)
        (home / "m").mkdir()
        with Server(home / "m", model, *options) as server:
            for count, line in ((1, 5.0), (32, 10.0)):
                bare, http, added = [], [], []
                for _ in range(repeat * (3 if count == 1 else 1)):  # one second each
                    first = engine.measure(count)
                    second = asyncio.run(streams(server.port, count, model))
                    bare.append(first[0])
                    http.append(second[0])
                    added.append(1000 * (second[1] - first[1]))
                cost = 100 * (1 - statistics.median(http) / statistics.median(bare))
                row(f"engine alone, {count} streams", bare, "-", True, "tok/s")
                row(f"over HTTP, {count} streams", http, "-", True, "tok/s")
                row(f"HTTP costs, {count} streams", [cost], f"<= {line:g}", cost <= line, "%")
                if count == 1:
                    median = statistics.median(added)
                    row("HTTP adds to the first token", added, "<= 5", median <= 5, "ms")
        engine.close()
        health(model, home, row)
        small(home, repeat, quick, row)


def health(model: str, home: Path, row: Callable[..., None]) -> None:
    """Measure /health during work that holds the GIL."""
    (home / "h").mkdir()
    schema = {"type": "object", "properties": {f"p{i}": {"enum": [f"{i}-{j}" for j in range(60)]} for i in range(60)}}
    structured = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    text = "the quick brown fox " * 25_000
    many = [{"role": r, "content": "x" * 20} for _ in range(500) for r in ("user", "assistant")]
    cases: list[tuple[str, str, Any, int]] = [
        ("a 100k-token tokenise", "/tokenize", {"prompt": text}, 200),
        ("a 1,000-message request", "/v1/chat/completions", {"messages": many, "max_tokens": 1}, 400),
        ("a schema compile", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **structured}, 200),
        ("a 1,500-token prefill", "/v1/completions", {"prompt": [*range(1000, 2500)], "max_tokens": 1}, 200),
    ]  # fmt: skip
    with Server(home / "h", "--pin", model, "--threads", "1", "--ctx", "8192") as server:
        for name, path, body, status in cases:
            show_health(name, *asyncio.run(health_while(server.port, path, {"model": model} | body, status)), row)
        # no target: tokenizers and llguidance each process 262,144 words in one call that holds the GIL
        show_health(f"a load of {OTHER}", *asyncio.run(health_while_loading(server.port, OTHER)), row, has_line=False)
    (home / "l").mkdir()
    with Server(home / "l", "--pin", OTHER, "--threads", "1", "--ctx", "1024") as server:
        show_health("a model load", *asyncio.run(health_while_loading(server.port, model)), row)


def show_health(
    what: str, times: list[float], seconds: float, row: Callable[..., None], *, has_line: bool = True
) -> None:
    """Add two rows."""
    p99, most = 1000 * percentile(times, 0.99), 1000 * max(times)
    what = f"health during {what} ({seconds:.1f} s)"
    row(f"{what}: p99", [p99], "< 100" if has_line else "-", p99 < 100 or not has_line, "ms")
    row(f"{what}: max", [most], "< 500" if has_line else "-", most < 500 or not has_line, "ms")


def small(home: Path, repeat: int, quick: bool, row: Callable[..., None]) -> None:
    """Measure the tiny model, where most of the time is the server's."""
    path = tiny_model(home)
    (home / "s").mkdir()
    with Server(home / "s", str(path), "--threads", "1", "--parallel", "32") as server:
        asyncio.run(many_small(server.port, 2))
        rates = [asyncio.run(many_small(server.port, 3 if quick else 10)) for _ in range(repeat)]
        row("T: requests of 16 tokens, 32 connections", rates, ">= 300", statistics.median(rates) >= 300, "req/s")
        (home / "u").mkdir()
        # alternate the disturbed server with an equal one, because the machine's speed changes by the second
        with Server(home / "u", str(path), "--threads", "1", "--parallel", "32") as quiet:
            asyncio.run(many_small(quiet.port, 2))
            settled = asyncio.run(disconnects(server.port, 200 if quick else 2000))
            row("T: at rest after random disconnects", [settled], "<= 2", settled <= 2, "s")
            firsts = [asyncio.run(stress.first_token_ratio(server.port, quiet.port)) for _ in range(9)]
            later = statistics.median(firsts)
            row("T: first token after them, of an idle server's", firsts, "<= 1.2", later <= 1.2, "x")
            times, kept = asyncio.run(slow_clients(server.port, quiet.port, 3 if quick else 12))
        p99 = 1000 * percentile(times, 0.99)
        row("T: health beside 1,000 slow clients: p99", [p99], "< 50", p99 < 50, "ms")
        row("T: throughput beside 1,000 slow clients", [kept], ">= 90", kept >= 90, "%")
        ended = server.stop()
        row("T: idle server ends", [ended], "<= 2", ended <= 2, "s")
    too_much(path, home, quick, row)
    (home / "b").mkdir()
    with Server(home / "b", str(stress.bomb_model(home)), "--threads", "1") as server:
        show_health("three template bombs", *asyncio.run(stress.health_beside_bombs(server.port)), row)


def too_much(path: Path, home: Path, quick: bool, row: Callable[..., None]) -> None:
    """Overload the tiny model at `path`."""
    (home / "q").mkdir()
    with Server(home / "q", str(path), "--threads", "1", "--parallel", "8", "--max-queue", "16") as server:
        late = [x for _ in range(1 if quick else 5) for x in asyncio.run(refusals(server.port))]
        p99 = 1000 * percentile(late, 0.99)
        row("T: a refusal in a burst of 64: p99", [p99], "<= 100", p99 <= 100, "ms")
        used = rss_anon_mb(server.process.pid)
        rates, goodput, waits = stress.overload(server, 20 if quick else 300)
        row("T: answers of 240 tokens at capacity", rates, "-", True, "req/s")
        row("T: goodput at three times the capacity", goodput, ">= 95", statistics.median(goodput) >= 95, "%")
        row("T: first token then, p99, of what the queue takes", waits, "<= 150", statistics.median(waits) <= 150, "%")
        grown = rss_anon_mb(server.process.pid) - used
        row("T: memory after it", [grown], "<= 10", grown <= 10, "MB")
        answered = asyncio.run(stress.given_up(server.port, 40 if quick else 200))
        row("T: an answer after 200 clients gave up", [answered], "<= 0.5", answered <= 0.5, "s")
        ended = stress.second_signal(server)
        row("T: busy server ends at the second signal", [ended], "<= 1", ended <= 1, "s")


def main() -> None:
    """Parse the options, measure, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="shorter, less precise runs")
    parser.add_argument("--only", choices=["overload"], help="remeasure only these rows of --json")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine_main(options.model)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
    rows: Rows = []

    def row(name: str, values: list[float], line: str, holds: bool, unit: str) -> None:
        value = statistics.median(values)
        rows.append({"name": name, "median": value, "unit": unit, "runs": values, "line": line, "holds": holds})
        print(f"{name:58} {value:9.2f} {unit:6} target {line:7} {'ok' if holds else 'MISSED'}", flush=True)

    if options.only:
        with tempfile.TemporaryDirectory() as folder:
            too_much(tiny_model(Path(folder)), Path(folder), options.quick, row)
    else:
        measure(options.model, options.repeat, options.quick, row)
    document: dict[str, Any] = {
        "schema": "localllm.server-benchmark/1",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/server.py " + " ".join(sys.argv[1:]),
        "load": os.getloadavg()[0],
        "versions": {n: metadata.version(n) for n in ("localllm", "torch", "uvicorn", "starlette")}
        | {"python": platform.python_version()},
        "rows": rows,
    }
    if options.only and options.json and options.json.exists():
        before = json.loads(options.json.read_text())
        anew = {one["name"]: one for one in rows}
        kept = [anew.get(one["name"], one) for one in before["rows"]]
        document = before | {"rows": kept, "anew": document | {"rows": sorted(anew)}}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
