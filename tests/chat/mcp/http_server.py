"""A server of the official package at http://127.0.0.1:PORT/mcp; it wants the header X-Key."""

from __future__ import annotations

import sys

import uvicorn
from mcp.server import MCPServer
from starlette.types import ASGIApp, Receive, Scope, Send

server = MCPServer("adder")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def keyed(app: ASGIApp) -> ASGIApp:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and dict(scope["headers"]).get(b"x-key") != b"secret":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no key"})
            return
        await app(scope, receive, send)

    return checked


if __name__ == "__main__":
    uvicorn.run(keyed(server.streamable_http_app()), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
