"""HTTP client for streamable MCP servers, with a limit on the size of a response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import httpx2

MAX_RESPONSE = 64 << 20  # bytes; the mcp package (2.3.0) limits events but not JSON bodies


def new_client(headers: Mapping[str, str], connect_s: float, read_s: float) -> httpx2.AsyncClient:
    """Create the client, an async context manager; times in seconds."""
    timeout = httpx2.Timeout(connect_s, read=read_s)
    return httpx2.AsyncClient(headers=dict(headers), timeout=timeout, transport=_Limited())


class _Limited(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Counted(response.stream)
        return response


class _Counted(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total = 0
        async for data in self._inner:
            total += len(data)
            if total > MAX_RESPONSE:
                raise httpx2.ReadError(f"the response is larger than {MAX_RESPONSE >> 20} MiB")
            yield data

    async def aclose(self) -> None:
        await self._inner.aclose()
