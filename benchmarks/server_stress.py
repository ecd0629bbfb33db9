"""Overload of the tiny model of benchmarks/server.py: three times its capacity, disconnects, signals, a bomb."""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from pathlib import Path

from server_client import Connection, Server, percentile, pulse

PLACES, QUEUE = 8, 16  # concurrent sequences, and requests that may wait
TOKENS = 240  # per answer: 25 to 40 answers per second
GIVES_UP_S = 0.5
WARM_S = 1.0  # until the number of running requests is steady
# of overload and capacity, alternating: one round may be off by a quarter as the machine's speed changes
ROUNDS = 30
# delay between the clients' first requests, as under overload: answers of equal length that start together also end
# together, and eight prompts in one step save 5 % of the total time compared with one prompt in each of eight
APART_S = 0.013
# the longest answer that fits T's context
LONG = {"prompt": [5, 6, 7], "max_tokens": 240, "ignore_eos": True, "temperature": 1}
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BOMB = "{% if messages[0].content == 'bomb' %}" + FOREVER + "{% endif %}"


async def saturated(port: int, seconds: float) -> float:
    """Answers per second with a half-full queue, where each client sends again after its answer."""
    ends: list[float] = []

    async def loop(number: int) -> None:
        await asyncio.sleep(number * APART_S)
        connection = await Connection(port).open()
        while time.perf_counter() < begun + seconds:
            await connection.stream("/v1/completions", LONG | {"max_tokens": TOKENS})
            ends.append(time.perf_counter() - begun)
        connection.close()

    begun = time.perf_counter()
    await asyncio.gather(*[loop(number) for number in range(PLACES + QUEUE // 2)])
    return steady(ends, seconds)


def steady(ends: list[float], seconds: float) -> float:
    """Answers per second, counting those that ended while the load was steady."""
    return sum(WARM_S <= end < seconds for end in ends) / (seconds - WARM_S)


async def overloaded(port: int, rate: float, seconds: float) -> tuple[float, list[float], int]:
    """(answers per second, seconds to first token of each accepted request, rejections) for requests that arrive at
    `rate`, independent of earlier ones. Connections are kept alive, as in every SDK.
    """
    firsts: list[float] = []
    ends: list[float] = []
    idle: list[Connection] = []
    refused = 0

    async def one() -> None:
        nonlocal refused
        connection = idle.pop() if idle else await Connection(port).open()
        found = await connection.try_stream("/v1/completions", LONG | {"max_tokens": TOKENS})
        idle.append(connection)
        if found is None:
            refused += 1
        else:
            firsts.append(found[0])
            ends.append(time.perf_counter() - begun)

    running = []
    begun = time.perf_counter()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        running.append(asyncio.ensure_future(one()))
    await asyncio.gather(*running)
    for connection in idle:
        connection.close()
    return steady(ends, seconds), firsts, refused


async def first_token_ratio(port: int, other: int, count: int = 21) -> float:
    """Median time to first token of one server relative to another, with sequential, alternating requests."""
    connections = [await Connection(port).open(), await Connection(other).open()]
    found: list[list[float]] = [[], []]
    for _ in range(count):
        for connection, times in zip(connections, found, strict=True):
            times.append((await connection.stream("/v1/completions", LONG | {"max_tokens": 4}))[0])
    for connection in connections:
        connection.close()
    return statistics.median(found[0]) / statistics.median(found[1])


async def given_up(port: int, count: int) -> float:
    """Seconds of an answer of 8 tokens right after many clients have disconnected."""

    async def one() -> None:
        connection = await Connection(port).open()
        connection.send("POST", "/v1/completions", LONG)
        await asyncio.sleep(GIVES_UP_S)
        connection.close()

    await asyncio.gather(*[one() for _ in range(count)])
    started = time.perf_counter()
    connection = await Connection(port).open()
    while await connection.try_stream("/v1/completions", LONG | {"max_tokens": 8}) is None:
        await asyncio.sleep(0.01)  # the queue is still full of their requests
    connection.close()
    return time.perf_counter() - started


def overload(server: Server, seconds: float) -> tuple[list[float], list[float], list[float]]:
    """(answers per second at capacity, goodput in percent of it, and 99th percentile of the time to first token in
    percent of what the queue explains) at three times the capacity, in `ROUNDS` rounds alternating with the capacity,
    because the same work takes up to a third longer from one minute to the next.
    """
    asyncio.run(saturated(server.port, 2))
    capacities = [asyncio.run(saturated(server.port, seconds / ROUNDS / 2))]
    goodput, waits = [], []
    for _ in range(ROUNDS):
        done, firsts, _ = asyncio.run(overloaded(server.port, 3 * capacities[-1], seconds / ROUNDS))
        capacities.append(asyncio.run(saturated(server.port, seconds / ROUNDS / 2)))
        capacity = (capacities[-2] + capacities[-1]) / 2
        goodput.append(100 * done / capacity)
        waits.append(100 * percentile(firsts, 0.99) / (QUEUE / capacity))
    return capacities, goodput, waits


def second_signal(server: Server) -> float:
    """Seconds from the second SIGTERM until a server with eight running answers has exited."""

    async def busy() -> list[Connection]:
        connections = [await Connection(server.port).open() for _ in range(PLACES)]
        for connection in connections:
            connection.send("POST", "/v1/completions", LONG)
        await asyncio.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
        return connections

    held = asyncio.run(busy())
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)
    took = time.monotonic() - started
    del held
    return took


def bomb_model(folder: Path) -> Path:
    """Write T with a template that never ends for a chat that triggers it."""
    import tiny_models

    keys = tiny_models.tiny_keys(tiny_models.vocabulary())
    kind, template = keys["tokenizer.chat_template"]
    keys["tokenizer.chat_template"] = kind, BOMB + template
    path = folder / "bomb.gguf"
    path.write_bytes(tiny_models.assemble(keys, tiny_models.tiny_tensors(len(tiny_models.vocabulary()), "Q8_0")))
    return path


async def health_beside_bombs(port: int, count: int = 3) -> tuple[list[float], float]:
    """(latencies of /health while template bombs are rendered and rejected, their total seconds)"""
    done = asyncio.Event()
    watching = asyncio.ensure_future(pulse(port, done, 0.05))
    connection = await Connection(port).open()
    messages = [{"role": "user", "content": "bomb"}]
    started = time.perf_counter()
    for _ in range(count):
        status, data = await connection.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert status == 400, data[:300]
    took = time.perf_counter() - started
    connection.close()
    done.set()
    return await watching, took
