"""MCP servers whose tools clients may call, configured by this server's owner: `serve --mcp FILE`."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from localllm.chat.mcp.servers import ServerEntry

if TYPE_CHECKING:
    from localllm.chat.mcp.client import McpTools, Result

CALL_THREADS = 32  # a call may take minutes, so it must not block asyncio's few threads, which parse bodies
MAX_RESULTS = 256  # results of approved calls kept, to make each call only once


class OwnersTools:
    """Tools of the configured MCP servers, connected at first use. Used from one event loop."""

    def __init__(self, entries: Sequence[ServerEntry]) -> None:
        self._entries = entries
        self._lock = asyncio.Lock()
        self._tools: McpTools | None = None
        self._threads = ThreadPoolExecutor(CALL_THREADS, "mcp")
        self._once: OrderedDict[tuple[str, str, str], asyncio.Task[Result]] = OrderedDict()  # approved calls

    @property
    def labels(self) -> list[str]:
        return [entry.name for entry in self._entries]

    async def tools(self) -> McpTools:
        """Return the tools; the first call connects, up to 20 s. Raises ConfigError if the mcp package is missing."""
        async with self._lock:
            if self._tools is None:
                self._tools = await asyncio.to_thread(self._connected)
            return self._tools

    def _connected(self) -> McpTools:
        from localllm.chat.mcp.client import McpTools

        made = McpTools(self._entries)
        made.connect()
        return made

    async def call(self, name: str, arguments: str) -> Result:
        """Call a tool; a failure is returned as a result. Cancelling this coroutine ends the call."""
        tools, cancel = await self.tools(), threading.Event()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, tools.call, name, arguments, cancel)
        finally:
            cancel.set()

    async def call_once(self, approval: str, name: str, arguments: str) -> Result:
        """Like `call`, but an approval that is sent again, meanwhile or after a lost response, gets the first result.

        Cancelling this coroutine does not end the call, whose result another request may be waiting for.
        """
        key = (approval, name, arguments)
        task = self._once.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            self._once[key] = task = asyncio.create_task(self.call(name, arguments))
            if len(self._once) > MAX_RESULTS:
                self._once.popitem(last=False)
        return await asyncio.shield(task)

    def close(self) -> None:
        """Stop all server processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._tools is not None:
            self._tools.close()
