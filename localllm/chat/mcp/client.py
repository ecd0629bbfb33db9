"""Connections to MCP servers: their tools in the OpenAI format, and calls that always return text.

Nothing a server sends is trusted: names, descriptions and schemas are checked, results are sanitized and truncated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from localllm._version import __version__
from localllm.errors import ConfigError
from localllm.request import extra_hint
from localllm.terminal import clean, clean_line, counted

from .servers import ServerEntry

CONNECT_S = 20.0  # `npx` and `uvx` may have to download the program first
CLOSE_S = 1.0
MAX_TOOLS = 128
MAX_PAGES = 16
MAX_SCHEMA_CHARS = 32_768
MAX_ABOUT_CHARS = 4_096
MAX_RESULT_CHARS = 24_000  # about 6k tokens: a result must leave room for the answer
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, as shown to the model.

    name     unique across all servers; 1 to 64 letters, digits, _ or -
    own      the server's name for it
    """

    name: str
    server: str
    own: str
    about: str
    parameters: Mapping[str, Any]

    def in_openai_shape(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.about, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call: text for the model and the screen, without terminal control sequences."""

    text: str
    failed: bool = False


@dataclass(slots=True, eq=False)
class _Server:
    """A server and its connection; `client` is None while disconnected."""

    entry: ServerEntry
    client: Any = None
    tools: list[Any] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # tools that cannot be offered, and why
    problem: str = ""
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # ends the current connection
    connecting: asyncio.Task[None] | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # one per open connection


class McpTools:
    """All configured servers, in a separate thread. Closing it ends the programs it started."""

    def __init__(self, entries: Sequence[ServerEntry]) -> None:
        """Start the thread; connects to nothing yet. Raises ConfigError if the package `mcp` is missing."""
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise ConfigError("MCP requires the package mcp", extra_hint("mcp")) from None
        self._servers = [_Server(entry) for entry in entries]
        self._tools: dict[str, Tool] = {}
        self._problems: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()

    @property
    def tools(self) -> list[Tool]:
        return list(self._tools.values())

    @property
    def problems(self) -> list[str]:
        """Servers and tools that cannot be used, and why."""
        return list(self._problems)

    def connect(self) -> None:
        """Connect to all servers in parallel, for at most `CONNECT_S`. Failures are listed in `problems`."""
        self._run(self._connect_all()).result()
        self._problems = [f"{clean_line(s.entry.name)}: {s.problem}" for s in self._servers if s.problem]
        self._tools = {tool.name: tool for tool in self._checked()}

    def call(self, name: str, arguments: str, cancel: threading.Event | None = None) -> Result:
        """Call a tool with JSON arguments. Failures are returned as a failed result; `cancel` ends the wait."""
        tool = self._tools.get(name)
        if tool is None:
            return Result(f"unknown tool {clean_line(name)[:64]}", failed=True)
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return Result("the arguments are not valid JSON", failed=True)
        if not isinstance(given, dict):
            return Result("the arguments must be an object", failed=True)
        server = next(s for s in self._servers if s.entry.name == tool.server)
        waiting = self._run(self._call(server, tool, given))
        try:
            while cancel is None or not cancel.is_set():
                with contextlib.suppress(FutureTimeout):
                    return waiting.result(0.1)
            self._loop.call_soon_threadsafe(self._drop, server)  # before the next call can reach it
            return Result("stopped by the user", failed=True)
        finally:
            waiting.cancel()  # no effect if it is done

    def close(self) -> None:
        """End all connections; takes a few seconds at most, and returns at once if interrupted. Safe to call twice."""
        if not self._thread.is_alive():
            return
        try:
            self._run(self._close_all()).result()
        except BaseException:  # a second Ctrl+C: the process exits before the programs can be asked to end
            from .stdio import kill_all

            kill_all()
            raise
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # --- in the thread of the connections ----------------------------------------------------------------------------

    async def _connect_all(self) -> None:
        await asyncio.gather(*(self._connect(server) for server in self._servers))

    async def _close_all(self) -> None:
        for server in self._servers:
            server.stop.set()
            if server.connecting is not None:
                server.connecting.cancel()
        await asyncio.gather(*(task for s in self._servers for task in s.tasks), return_exceptions=True)
        if waiting := asyncio.all_tasks() - {asyncio.current_task()}:  # threads that wait for connections and calls
            await asyncio.wait(waiting, timeout=CLOSE_S)

    async def _connect(self, server: _Server) -> None:
        ready = asyncio.get_running_loop().create_future()
        server.problem, server.refused, server.stop = "", [], asyncio.Event()
        task = asyncio.create_task(self._hold(server, server.stop, ready))
        server.tasks.add(task)
        task.add_done_callback(server.tasks.discard)
        server.connecting = task
        await ready
        server.connecting = None

    async def _hold(self, server: _Server, stop: asyncio.Event, ready: asyncio.Future[None]) -> None:
        """Connect and hold the connection until `stop`: it must be closed by the task that opened it."""
        from mcp.client import Client
        from mcp.types import Implementation

        transport = client = None
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(CONNECT_S):
                    transport = await _transport(server.entry, stack)
                    info = Implementation(name="localllm", version=__version__)
                    streams = _without_bad_tools(transport, server)
                    client = Client(streams, client_info=info, raise_exceptions=False)
                    await stack.enter_async_context(client)
                    server.tools = await _listed(client)
                server.client = client
                ready.set_result(None)
                await stop.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # includes the exception groups that transports raise
            said = getattr(transport, "said", "")
            server.problem = _why(error) + (f" ({clean_line(said)[:200]})" if said else "")
            logging.getLogger(__name__).debug("server %s", server.entry.name, exc_info=True)
        finally:
            if server.client is client:  # else a newer connection has replaced it
                server.client = None
            if not ready.done():
                ready.set_result(None)

    async def _call(self, server: _Server, tool: Tool, arguments: dict[str, Any]) -> Result:
        if server.client is None:
            await self._connect(server)  # the connection has ended: reconnect once
        if server.client is None:
            why = f"the server {clean_line(server.entry.name)} is not available: {server.problem}"
            return Result(why, failed=True)
        try:
            async with asyncio.timeout(server.entry.timeout_s):
                answer = await server.client.call_tool(tool.own, arguments)
        except TimeoutError:
            why = f"no result within {server.entry.timeout_s:g} s"
        except Exception as error:
            why = f"the call failed: {_why(error)}"
        else:
            return _result(answer)
        self._drop(server)
        return Result(why, failed=True)

    def _drop(self, server: _Server) -> None:
        """Disconnect a server that hangs and end its processes; the next call reconnects."""
        server.stop.set()
        server.client = None

    # --- what servers say --------------------------------------------------------------------------------------------

    def _checked(self) -> Iterator[Tool]:
        """Yield the tools of all servers under valid, unique names. Fills `_problems`."""
        taken: set[str] = set()
        for server in self._servers:
            self._problems += [f"{clean_line(server.entry.name)}: {why}" for why in server.refused]
            for told in server.tools:
                if len(taken) == MAX_TOOLS:
                    self._problems.append(f"only the first {MAX_TOOLS} tools are offered")
                    return
                unique = _unique(told.name, server.entry.name, taken)
                taken.add(unique)
                about = clean(told.description or told.title or "")[:MAX_ABOUT_CHARS]
                yield Tool(unique, server.entry.name, told.name, about, told.input_schema)


async def _transport(entry: ServerEntry, stack: AsyncExitStack) -> Any:
    if entry.command:
        from .stdio import Program

        return Program(entry)
    from mcp.client.streamable_http import streamable_http_client

    from .http import new_client

    client = await stack.enter_async_context(new_client(entry.headers, CONNECT_S, entry.timeout_s))
    return streamable_http_client(entry.url, http_client=client)


async def _listed(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor or len(tools) > MAX_TOOLS:
            break
    return tools[: MAX_TOOLS + 1]


@asynccontextmanager
async def _without_bad_tools(transport: Any, server: _Server) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the streams of a transport, with unusable tools removed from tool lists.

    The client of the mcp package (2.3.0) rejects a whole list for one invalid entry. Output schemas are removed as
    well: a result that violates its schema is still a result.
    """

    async def pass_on(incoming: Any, checked: MemoryObjectSendStream[Any]) -> None:
        async with checked:
            async for message in incoming:
                result = getattr(getattr(message, "message", None), "result", None)
                if isinstance(result, dict) and isinstance(result.get("tools"), list):
                    result["tools"] = list(_usable(result["tools"], server.refused))
                await checked.send(message)

    async with transport as (incoming, outgoing):
        checked, read = anyio.create_memory_object_stream[Any](0)
        async with anyio.create_task_group() as group:
            group.start_soon(pass_on, incoming, checked)
            yield read, outgoing
            group.cancel_scope.cancel()


def _usable(tools: list[Any], refused: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the tools that can be offered; adds the reasons for all others to `refused`."""
    for told in tools:
        name = told.get("name") if isinstance(told, dict) else None
        schema = told.get("inputSchema") if isinstance(told, dict) else None
        why = ""
        if not isinstance(name, str) or not _NOT_A_NAME.sub("", name) or len(name) > 256:
            why = "its name must contain a letter, digit, _ or - and have at most 256 characters"
        elif not isinstance(schema, dict) or schema.get("type") != "object":
            why = "its input schema must be an object schema"
        elif len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
            why = f"its schema is longer than {MAX_SCHEMA_CHARS:,} characters"
        elif not all(isinstance(told.get(key) or "", str) for key in ("description", "title")):
            why = "its description must be text"
        if why:
            refused.append(f"skipping the tool {clean_line(str(name))[:64]}: {why}")
            continue
        yield {key: told[key] for key in ("name", "title", "description", "inputSchema") if told.get(key) is not None}


def _unique(own: str, server: str, taken: set[str]) -> str:
    """Return a valid, unique name: the tool's own, else prefixed with its server's name, else also numbered."""
    plain = _NOT_A_NAME.sub("_", own)[:64]
    if plain not in taken:
        return plain
    joined = f"{_NOT_A_NAME.sub('_', server)[:24]}__{plain}"[:60]
    candidates = [joined, *(f"{joined}_{n}" for n in range(2, MAX_TOOLS + 2))]
    return next(name for name in candidates if name not in taken)


def _result(answer: Any) -> Result:
    parts = [_part(block) for block in answer.content or ()]
    structured = getattr(answer, "structured_content", None)
    if not any(parts) and structured is not None:
        parts = [json.dumps(structured, ensure_ascii=False)]
    text = clean("\n".join(part for part in parts if part))
    cut = max(0, len(text) - MAX_RESULT_CHARS)
    if cut:
        text = f"{text[:MAX_RESULT_CHARS]}\n[truncated: {counted(cut, 'more character')}]"
    return Result(text or "(no output)", bool(answer.is_error))


def _part(block: Any) -> str:
    """Return a part of a result as text; for other content, a placeholder that names its type."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and getattr(block.resource, "text", None) is not None:
        return str(block.resource.text)
    if block.type == "resource_link":
        return f"[link: {clean_line(str(block.uri))}]"
    return f"[{block.type}: not shown]"


def _why(error: BaseException) -> str:
    """Describe an error in one line; for a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    if isinstance(error, FileNotFoundError):
        return f"{clean_line(str(error.filename or ''))} is not installed"
    return clean_line(str(error))[:300] or type(error).__name__
