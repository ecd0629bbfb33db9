"""A server under load for hours: does its memory grow, does it slow down, does it make mistakes?

    python benchmarks/soak.py [--minutes 120] [--clients 32] [--json FILE]

Closed-loop clients send every kind of request to the tiny model: chats, streams, completions with scores, several
answers, schemas, tools, embeddings, stored responses; one in ten is greedy with a known answer. The server's RssAnon is
sampled every few seconds and fitted linearly over requests. Targets: no errors and no wrong answers; after the first
sixth, which is warm-up, growth of at most 0.5 MB per 1,000 requests and 64 MB in total; the last sixth's median within
10 % of the second sixth's, its 99th percentile within 1.5 times; every page free at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from server import tiny_model
from server_client import Connection, Server, percentile, rss_anon_mb

SAMPLE_S = 5.0
PARTS = 6
GROWTH_LINE_MB, SLOPE_LINE_MB = 64.0, 0.5
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
CONTEXT = 2048  # the explanation of a tool takes 500 tokens of the tiny model
KNOWN = 8  # greedy requests whose answers are fetched before the load starts


def greedy(number: int) -> dict[str, Any]:
    """A request with one correct answer."""
    prompt = random.Random(number).choices(range(3, 250), k=5 + number)
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def any_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body) of a random other request."""
    text = " ".join(draw.choices(("sea", "sun", "ship", "salt", "sand"), k=draw.randrange(1, 30)))
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": draw.randrange(1, 24)}
    structured = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"n": 2, "seed": draw.randrange(100)}),
        ("/v1/chat/completions", chat | structured | {"max_tokens": 40}),
        ("/v1/chat/completions", chat | {"tools": TOOLS}),
        ("/v1/chat/completions", chat | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}),
        ("/v1/completions", {"prompt": ["a", text], "max_tokens": 4, "echo": True, "logprobs": 1}),
        ("/v1/responses", {"input": text, "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": [text, "a"]}),
    ]
    return draw.choice(kinds)


class Soak:
    """Client results: (seconds since the start, duration) of each request, and failures by kind."""

    def __init__(self, port: int, known: list[str]) -> None:
        self.port, self.known = port, known
        self.times: list[tuple[float, float]] = []
        self.failures: Counter[str] = Counter()
        self.started = time.monotonic()

    async def client(self, number: int, seconds: float) -> None:
        """Send one request after another until the time is up."""
        draw = random.Random(number)
        connection = await Connection(self.port).open()
        while (begun := time.monotonic()) < self.started + seconds:
            await self._one(connection, draw)
            self.times.append((begun - self.started, time.monotonic() - begun))
        connection.close()

    async def _one(self, connection: Connection, draw: random.Random) -> None:
        kind = draw.random()
        if kind < 0.1:
            number = draw.randrange(KNOWN)
            status, data = await connection.post("/v1/completions", greedy(number))
            if status != 200 or json.loads(data)["choices"][0]["text"] != self.known[number]:
                self.failures[f"known answer: {status}"] += 1
        elif kind < 0.4:
            text = {"messages": [{"role": "user", "content": f"{draw.random()}"}], "max_tokens": 16}
            await connection.stream("/v1/chat/completions", text)
        else:
            path, body = any_request(draw)
            status, _ = await connection.post(path, body)
            if status != 200:
                self.failures[f"{path}: {status}"] += 1


async def load(server: Server, clients: int, seconds: float, known: list[str]) -> tuple[Soak, list[tuple[int, float]]]:
    """Run the load; return (client results, samples of (requests so far, MB))."""
    soak = Soak(server.port, known)
    memory: list[tuple[int, float]] = []

    async def watch() -> None:
        shown = 0.0
        while True:
            memory.append((len(soak.times), rss_anon_mb(server.process.pid)))
            if time.monotonic() - shown > 60:
                shown = time.monotonic()
                print(f"{shown - soak.started:5.0f} s  {memory[-1][0]:8,} requests  {memory[-1][1]:.1f} MB", flush=True)
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*[soak.client(number, seconds) for number in range(clients)])
    watching.cancel()
    return soak, memory


async def known_answers(port: int) -> list[str]:
    """Answers to the greedy requests, each run alone."""
    connection = await Connection(port).open()
    answers = []
    for number in range(KNOWN):
        status, data = await connection.post("/v1/completions", greedy(number))
        assert status == 200, data
        answers.append(json.loads(data)["choices"][0]["text"])
    connection.close()
    return answers


async def pages_missing(port: int) -> float:
    """Number of pages that are not free when nothing runs."""
    connection = await Connection(port).open()
    _, page = await connection.get("/metrics")
    connection.close()
    lines = [line.rsplit(" ", 1) for line in page.decode().splitlines() if not line.startswith("#")]
    named = {name.split("{")[0]: float(value) for name, value in lines}
    return named["localllm:kv_pages_total"] - named["localllm:kv_pages_free"]


def summary(soak: Soak, memory: list[tuple[int, float]], seconds: float, missing: float) -> dict[str, Any]:
    """Rows with their targets."""
    settled = [entry for entry in memory if entry[0] >= memory[-1][0] / PARTS]
    requests, used = np.array(settled).T
    slope = float(np.polyfit(requests, used, 1)[0]) * 1000
    parts = [[took for at, took in soak.times if at * PARTS // seconds == part] for part in (1, PARTS - 1)]
    p50, p99 = ([1000 * percentile(part, share) for part in parts] for share in (0.5, 0.99))
    rows: list[dict[str, Any]] = [
        {"row": "errors and wrong answers", "value": soak.failures.total(), "line": "0"},
        {"row": "requests", "value": len(soak.times), "line": ">= 250,000 in two hours"},
        {"row": "growth, MB per 1,000 requests", "value": round(slope, 4), "line": f"<= {SLOPE_LINE_MB}"},
        {"row": "growth in all, MB", "value": round(float(used[-1] - used[0]), 1), "line": f"<= {GROWTH_LINE_MB:g}"},
        {"row": "median, ms: second and last sixth", "value": [round(x, 2) for x in p50], "line": "within 10 %"},
        {"row": "p99, ms: second and last sixth", "value": [round(x, 2) for x in p99], "line": "within 1.5 x"},
        {"row": "pages that are not free afterwards", "value": missing, "line": "0"},
    ]
    met = [
        not soak.failures, True, slope <= SLOPE_LINE_MB, used[-1] - used[0] <= GROWTH_LINE_MB,
        abs(p50[1] / p50[0] - 1) <= 0.1, p99[1] <= 1.5 * p99[0], not missing,
    ]  # fmt: skip
    for row, holds in zip(rows, met, strict=True):
        row["met"] = bool(holds)
    return {"schema": "localllm.soak/1", "minutes": round(seconds / 60, 1), "rows": rows, "failures": soak.failures}


def main() -> int:
    """Run the load, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        path = tiny_model(home, CONTEXT)
        (home / "s").mkdir()
        words = (str(path), "--threads", "1", "--parallel", "16", "--max-queue", "64", "--ctx", str(CONTEXT))
        with Server(home / "s", *words) as server:
            known = asyncio.run(known_answers(server.port))
            soak, memory = asyncio.run(load(server, options.clients, 60 * options.minutes, known))
            time.sleep(2)
            missing = asyncio.run(pages_missing(server.port))
    found = summary(soak, memory, 60 * options.minutes, missing)
    found["versions"] = {name: metadata.version(name) for name in ("localllm", "torch", "fastapi", "uvicorn")}
    found["command"] = " ".join(["python", "benchmarks/soak.py", *sys.argv[1:]])
    for row in found["rows"]:
        print(f"{row['row']:40} {row['value']!s:>22}  {row['line']:24} {'ok' if row['met'] else 'NOT MET'}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(row["met"] for row in found["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
