"""Clients that send or read slowly, or leave: none is kept for ever, and nobody else notices."""

import asyncio
import contextlib
import random
import select
import socket
import struct
import threading
import time

import httpx
import psutil
import pytest

from localllm.server import protocol

from .conftest import CHAT, TEXT, ask, live_server, read_all, settled, status_of

HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
QUICK = {"HEADER_S": 0.3, "BODY_S": 0.3, "READER_S": 0.3, "DISCARD_S": 0.2}


@pytest.fixture
def quick(pool, monkeypatch):
    """A server whose deadlines are a fraction of a second."""
    for name, value in QUICK.items():
        monkeypatch.setattr(protocol, name, value)
    with live_server(pool) as live:
        yield live


def test_headers_of_a_short_answer_go_out_with_its_body():
    """Those of a stream at once; what is held is never lost."""

    class Wire:
        def __init__(self):
            self.sent = []

        def write(self, data):
            self.sent.append(data)

        def close(self):
            self.sent.append("closed")

        def get_extra_info(self, name):
            return name

    head = b"HTTP/1.1 200 \r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\n"
    stream = b"HTTP/1.1 200 \r\ntransfer-encoding: chunked\r\n\r\n"
    wire = Wire()
    one = protocol.OneWrite(wire)
    for data in (head, b"ok", stream, b"2\r\nok\r\n", head, b"", head):
        one.write(data)
    assert wire.sent == [head + b"ok", stream, b"2\r\nok\r\n", head]
    one.flush()
    one.flush()
    one.write(head)
    one.close()
    assert wire.sent[4:] == [head, head, "closed"] and one.get_extra_info("peername") == "peername"


def dripping(live, start, drip, pause=0.02, seconds=5.0):
    """Send `start`, then `drip` byte by byte; (seconds until the server ended it, its answer)."""
    started = time.monotonic()
    with live.connect(seconds) as sock:
        sock.sendall(start)
        sock.settimeout(pause)
        answer = b""
        while time.monotonic() - started < seconds:
            try:
                if drip:
                    sock.send(drip)
                piece = sock.recv(65536)
                answer += piece
                if not piece:
                    return time.monotonic() - started, answer
            except TimeoutError:
                continue
            except ConnectionError:
                return time.monotonic() - started, answer
    raise AssertionError(f"still open after {seconds} s: {answer[:100]!r}")


SLOW = {
    "silent": (b"", b"", 0),
    "partial-line": (b"POST /v1/ch", b"", 408),
    "dripping-headers": (HEAD, b"X", 408),
    "dripping-body": (HEAD + b"Content-Length: 100000\r\n\r\n{", b" ", 408),
    "no-body": (HEAD + b"Content-Length: 1000\r\n\r\n", b"", 408),
    "chunked-no-end": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{    \r\n", b"", 408),
    "junk-after-a-request": (b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n\x00\x01junk", b"", 200),
}


@pytest.mark.parametrize("kind", SLOW)
def test_slow_senders_are_ended(quick, kind):
    start, drip, status = SLOW[kind]
    took, answer = dripping(quick, start, drip)
    assert status_of(answer) == status
    assert took < 10 * QUICK["HEADER_S"]
    if status == 408:
        assert b'"request_timeout"' in answer and b"connection: close" in answer.lower()


def test_a_large_body_that_flows_is_not_slow(quick):
    """At 64 kB a second and more a body may take as long as it needs."""
    body = b'{"prompt": "' + b"x" * 100_000 + b'"}'
    with quick.connect() as sock:
        sock.sendall(HEAD.replace(CHAT.encode(), TEXT.encode()) + f"Content-Length: {len(body)}\r\n\r\n".encode())
        for at in range(0, len(body), 10_000):
            sock.sendall(body[at : at + 10_000])
            time.sleep(0.06)
        sock.settimeout(5)
        assert status_of(sock.recv(65536)) == 400  # more than the context, but read


def test_a_reader_that_stops_is_dropped_and_its_request_ends(quick, tiny_llm):
    """What it has not read stays bounded; the system's own buffers are made small."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", quick.port))
    body = str(ask(stream=True, max_tokens=200, ignore_eos=True, logprobs=True, top_logprobs=20, n=8)).replace("'", '"')
    body = body.replace("True", "true")
    sock.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body.encode())
    sock.recv(1)
    before = psutil.Process().memory_info().rss
    asyncio.run(settled(tiny_llm, quick.service, 20))
    assert psutil.Process().memory_info().rss - before < 32 << 20
    sock.close()


def read_slowly(live, count, pause, seconds):
    """`count` clients that read a byte of a long stream in every `pause`, until the server has ended them all.

    The system's buffers are made small: they would take the whole stream, and the server would not notice.

    Returns (the largest output buffer of one, the most bytes that the process grew by, seconds of a request beside).
    """
    body = httpx.Request("POST", "http://x", json=ask(stream=True, max_tokens=200, ignore_eos=True, logprobs=True,
                                                      top_logprobs=20)).content  # fmt: skip
    connections = live.server.server_state.connections
    live.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    before, grown, held, over = psutil.Process().memory_info().rss, 0, 0, threading.Event()

    def look():
        """All the time: the server may have ended them before anybody else looks."""
        nonlocal grown, held
        while not over.wait(0.005):
            with contextlib.suppress(RuntimeError):  # the set of connections changes meanwhile
                held = max([held, *(c.transport.get_write_buffer_size() for c in list(connections))])
            grown = max(grown, psutil.Process().memory_info().rss - before)

    with contextlib.ExitStack() as stack:
        watcher = threading.Thread(target=look)
        watcher.start()
        stack.callback(watcher.join)
        stack.callback(over.set)
        socks = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", live.port))
            sock.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            socks.append(sock)
        for sock in socks:
            assert sock.recv(1) == b"H"
            sock.setblocking(False)
        began = time.monotonic()
        assert httpx.post(live.url + CHAT, json=ask(), timeout=30).status_code == 200
        beside = time.monotonic() - began
        while connections:
            assert time.monotonic() - began < seconds, f"{len(connections)} are still open"
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.recv(1)
            time.sleep(pause)
    return held, grown, beside


def test_slow_readers_hold_little_and_are_ended(quick, tiny_llm):
    """Their streams have half a megabyte each; what waits for them is bounded, and in the end they go."""
    held, grown, beside = read_slowly(quick, 16, 0.05, 20)
    assert 0 < held < 1 << 20 and grown < 16 << 20 and beside < 5
    asyncio.run(settled(tiny_llm, quick.service))


@pytest.mark.slow
def test_two_hundred_readers_of_a_byte_a_second(pool, tiny_llm):
    with live_server(pool, parallel=8) as live:
        held, grown, beside = read_slowly(live, 200, 1.0, 120)
        assert 0 < held < 1 << 20 and grown < 200 << 20 and beside < 10
        asyncio.run(settled(tiny_llm, live.service))


def test_connections_are_limited(pool, monkeypatch):
    with live_server(pool) as live:
        monkeypatch.setattr(protocol.Connection, "max_connections", 20)
        socks = [live.connect() for _ in range(40)]
        closed = set()
        while len(closed) < 20:  # the server closes those that are too many
            readable, _, _ = select.select([sock for sock in socks if sock not in closed], [], [], 20)
            assert readable
            closed |= {sock for sock in readable if not sock.recv(4096)}
        assert len(live.server.server_state.connections) <= 20
        for sock in socks:
            sock.close()
        deadline = time.monotonic() + 20
        while live.server.server_state.connections:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert httpx.get(f"{live.url}/ping").status_code == 200


@pytest.mark.slow
def test_two_hundred_of_each_kind(pool):
    """For a minute, with the real deadlines: all ended in time, descriptors back, health and work undisturbed."""
    process = psutil.Process()
    with live_server(pool, parallel=8) as live:

        async def slow(kind, ended):
            start, drip, _ = SLOW[kind]
            began = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
                writer.write(start)
                while time.monotonic() - began < 60:
                    with contextlib.suppress(TimeoutError):
                        if not await asyncio.wait_for(reader.read(65536), 1.0):
                            break
                    if drip:
                        writer.write(drip)
            except ConnectionError:
                pass
            ended.append((kind, time.monotonic() - began))
            writer.close()

        async def watch(seconds, times, answers):
            async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    started = time.monotonic()
                    await client.get("/health")
                    times.append(time.monotonic() - started)
                    answers.append((await client.post(CHAT, json=ask())).status_code)
                    await asyncio.sleep(0.05)

        async def run():
            ended, times, answers = [], [], []
            tasks = [slow(kind, ended) for kind in SLOW for _ in range(200)]
            await asyncio.gather(watch(40, times, answers), *tasks)
            return ended, times, answers

        before = process.num_fds()
        ended, times, answers = asyncio.run(run())
        assert len(ended) == 200 * len(SLOW)
        idle = {"junk-after-a-request"}
        assert max(seconds for kind, seconds in ended if kind not in idle) <= 30
        assert set(answers) == {200}
        assert sorted(times)[int(len(times) * 0.99)] < 0.5  # ten times the line
        deadline = time.monotonic() + 20
        while process.num_fds() > before + 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)


# --- leaving ---------------------------------------------------------------------------------------------------------


async def leave(live, draw, number):
    """One request whose client goes away at a random moment: with FIN or RST, streamed or not."""
    sent = ask(stream=bool(number % 2), max_tokens=200, ignore_eos=True, n=draw.choice([1, 1, 1, 2]))
    sent["messages"] = [{"role": "user", "content": f"{number} " + "word " * draw.randrange(20)}]
    body = httpx.Request("POST", "http://x", json=sent).content
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    data = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    if draw.random() < 0.1:
        data = data[: draw.randrange(len(data))]
    writer.write(data)
    await asyncio.sleep(draw.random() * 0.15)
    sock = writer.get_extra_info("socket")
    if draw.random() < 0.5:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    del reader


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_disconnects_leak_nothing(pool, tiny_llm, count):
    """All gauges 0 and all pages free within 2 s of the last one, then the next request is quick."""
    draw = random.Random(4)
    with live_server(pool, parallel=8, max_queue=64) as live:

        async def run():
            places = asyncio.Semaphore(32)

            async def one(number):
                async with places:
                    await leave(live, draw, number)

            await asyncio.gather(*[one(number) for number in range(count)])

        asyncio.run(run())
        asyncio.run(settled(tiny_llm, live.service, 20))  # ten times the line
        tiny_llm.engine.scheduler.check_integrity()
        started = time.monotonic()
        assert httpx.post(live.url + CHAT, json=ask(max_tokens=1)).status_code == 200
        assert time.monotonic() - started < 5
        assert live.service.num_reserved == 0


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_many_that_time_out_then_one(pool, tiny_llm, count):
    """vLLM's cancel test: long requests given up after half a second, then one must be answered."""
    with live_server(pool, parallel=8) as live:

        async def run():
            limits = httpx.Limits(max_connections=count)
            async with httpx.AsyncClient(
                base_url=live.url, timeout=httpx.Timeout(30, read=0.2), limits=limits
            ) as client:
                long = ask(max_tokens=10_000, ignore_eos=True, temperature=1)
                results = await asyncio.gather(
                    *[client.post(CHAT, json=long) for _ in range(count)], return_exceptions=True
                )
            assert sum(isinstance(r, httpx.TimeoutException) for r in results) > count // 2

        asyncio.run(run())
        started = time.monotonic()
        assert httpx.post(live.url + CHAT, json=ask(), timeout=30).status_code == 200
        assert time.monotonic() - started < 5
        asyncio.run(settled(tiny_llm, live.service, 10))


def test_a_client_that_half_closes_is_gone(live, tiny_llm):
    with live.connect() as sock:
        body = httpx.Request("POST", "http://x", json=ask(max_tokens=200, ignore_eos=True)).content
        sock.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock) == b""
    asyncio.run(settled(tiny_llm, live.service))
