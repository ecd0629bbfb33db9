"""HTTP clients of benchmarks/server.py, written directly on asyncio to cost little next to the server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from localllm.cli import main; main()"]


class Server:
    """`localllm serve` in a process of its own, stopped at the end of the block."""

    def __init__(self, home: Path, *words: str) -> None:
        self.home = home
        home.chmod(0o700)  # required of a runtime folder
        self.log = home / "serve.log"
        environment = dict(os.environ) | {"XDG_RUNTIME_DIR": str(home), "OMP_NUM_THREADS": "1"}
        command = [*COMMAND, "serve", *words, "--port", "0", "-q", "--log-file", str(home / "log")]
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.port = 0

    def __enter__(self) -> Server:
        while self.process.poll() is None:
            files = list((self.home / "localllm").glob("serve-*.json"))
            if files and (url := json.loads(files[0].read_text())["url"]):
                self.port = int(url.rsplit(":", 1)[1])
                if self.get("/health") == 200:
                    return self
            time.sleep(0.05)
        raise SystemExit(self.log.read_text())

    def get(self, path: str) -> int:
        """Status of a GET; 0 if nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def stop(self) -> float:
        """Stop the server and return the seconds that took."""
        started = time.monotonic()
        self.process.terminate()
        self.process.wait(60)
        return time.monotonic() - started

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.stop()


class Connection:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> Connection:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    def close(self) -> None:
        """Leave."""
        if self._writer is not None:
            self._writer.close()

    def send(self, method: str, path: str, body: Any = None) -> None:
        """Send a request."""
        assert self._writer is not None
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read (status, headers) of the response."""
        assert self._reader is not None
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        return int(lines[0].split()[1]), headers

    async def body(self, headers: dict[str, str]) -> bytes:
        """Read a whole body with a content length."""
        assert self._reader is not None
        return await self._reader.readexactly(int(headers["content-length"]))

    async def post(self, path: str, body: Any) -> tuple[int, bytes]:
        """(status, body) of a request without streaming."""
        self.send("POST", path, body)
        status, headers = await self.head()
        return status, await self.body(headers)

    async def get(self, path: str) -> tuple[int, bytes]:
        """(status, body) of a GET."""
        self.send("GET", path)
        status, headers = await self.head()
        return status, await self.body(headers)

    async def stream(self, path: str, body: Any) -> tuple[float, float, int]:
        """(seconds to the first content, total seconds, tokens) of a streamed request."""
        found = await self.try_stream(path, body)
        assert found is not None, "refused"
        return found

    async def try_stream(self, path: str, body: Any) -> tuple[float, float, int] | None:
        """The same, or None if the server is too busy."""
        assert self._reader is not None
        started = time.perf_counter()
        self.send("POST", path, body | {"stream": True})
        status, headers = await self.head()
        if status == 429:
            await self.body(headers)
            return None
        assert status == 200, status
        first, count = 0.0, 0
        while True:
            size = int(await self._reader.readline(), 16)
            data = await self._reader.readexactly(size + 2)
            if size == 0:
                return first, time.perf_counter() - started, count
            tokens = data.count(b'"content":"') + data.count(b'"text":"') - data.count(b'"content":""')
            if tokens and not first:
                first = time.perf_counter() - started
            count += tokens


async def pulse(port: int, done: asyncio.Event, every: float = 0.05) -> list[float]:
    """Latencies of GET /health, repeated until `done`."""
    connection = await Connection(port).open()
    times = []
    while not done.is_set():
        started = time.perf_counter()
        await connection.get("/health")
        times.append(time.perf_counter() - started)
        await asyncio.sleep(every)
    connection.close()
    return times


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of `values` lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def rss_anon_mb(pid: int) -> float:
    """Anonymous memory of a server and its children, including swap."""
    total = 0.0
    for process in (pid, *children(pid)):
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        total += sum(int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "VmSwap") if name in fields)
    return total


def children(pid: int) -> list[int]:
    """Child processes of `pid`."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in file.read_text().split()]
    return found
