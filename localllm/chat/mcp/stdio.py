"""A program that speaks MCP over its standard streams, with limits on message length and shutdown time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from .servers import ServerEntry

MAX_MESSAGE = 8 << 20  # bytes per line; a program that writes a longer one is ended
GRACE_S = 1.0  # after each of: standard input closed, SIGTERM
_running: set[asyncio.subprocess.Process] = set()
_TAIL = 20  # lines of standard error kept for error messages


class Program:
    """The program as a transport for `mcp.Client`: an async context manager that yields its streams.

    The mcp package's own transport (2.3.0) has no limit on the length of a line: a program that floods its standard
    output would exhaust this process's memory.
    """

    def __init__(self, entry: ServerEntry) -> None:
        self._entry = entry
        self._stderr_lines: deque[str] = deque(maxlen=_TAIL)
        self._streams = self._run()

    @property
    def said(self) -> str:
        """The last line that the program wrote to standard error."""
        return next((line for line in reversed(self._stderr_lines) if line.strip()), "").strip()

    async def __aenter__(self) -> tuple[MemoryObjectReceiveStream, MemoryObjectSendStream]:
        return await self._streams.__aenter__()

    async def __aexit__(self, *error: object) -> bool | None:
        return await self._streams.__aexit__(*error)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[tuple[MemoryObjectReceiveStream, MemoryObjectSendStream]]:
        entry = self._entry
        process = await asyncio.create_subprocess_exec(
            entry.command, *entry.args, env=get_default_environment() | dict(entry.env), cwd=entry.cwd or None,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            limit=MAX_MESSAGE, start_new_session=True,
        )  # fmt: skip
        _running.add(process)
        received, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, sent = anyio.create_memory_object_stream[SessionMessage](0)
        work = (_read(process, received), _write(process, sent), self._log(process))
        tasks = [asyncio.create_task(one) for one in work]
        try:
            yield incoming, outgoing
        finally:
            for stream in (incoming, outgoing, received, sent):
                stream.close()
            with anyio.CancelScope(shield=True):
                await _end(process)
                _running.discard(process)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(1 << 14):
            self._stderr_lines.extend(data.decode("utf-8", "replace")[-2000:].splitlines())


async def _read(process: asyncio.subprocess.Process, received: MemoryObjectSendStream) -> None:
    """Turn lines of standard output into messages until the program ends or breaks the protocol."""
    assert process.stdout is not None
    async with received:
        with contextlib.suppress(ValueError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            # a line over the limit raises ValueError, which ends the stream and the connection
            while line := await process.stdout.readline():
                try:
                    message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                except ValueError as error:
                    await received.send(error)
                else:
                    await received.send(message)
    while await process.stdout.read(1 << 16):  # a full pipe would keep the program from ending
        pass


async def _write(process: asyncio.subprocess.Process, sent: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, anyio.ClosedResourceError):
        async for message in sent:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


def kill_all() -> None:
    """Kill every program at once, from any thread; for a process that exits without waiting for them."""
    for process in tuple(_running):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program: close its input, then send signals to its process group."""
    assert process.stdin is not None
    process.stdin.close()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_S)
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
    else:
        await process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # processes that it left behind
