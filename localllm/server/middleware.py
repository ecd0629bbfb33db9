"""What every request passes before a route sees it: host, origin, key, body size. Plain ASGI, streams unbuffered.

Decisions look at `scope`, never at a URL rebuilt from headers (SEC-02 to SEC-05, LIM-09).
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, respond

PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "authorization, content-type",
    "Access-Control-Max-Age": "600",
}
OPEN_PATHS = {"/health", "/ping"}
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")


def host_is_local(host: str) -> bool:
    """Whether a Host header names this machine: loopback, an IP address literal, localhost and the local suffixes."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(LOCAL_SUFFIXES):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _one(headers: list[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in headers if name == wanted), None)


def _with_origin(send: Send, origin: str) -> Send:
    """Tell the browser that this origin, which the gate let in, may read the answer."""
    extra = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return sending


class Gate:
    """Refuses what may not enter.

    loopback    bound to a loopback address: only local Host headers pass
    api_key     bytes, or None for no key
    origins     browser origins that may call; none by default
    max_body    bytes
    """

    def __init__(
        self, app: ASGIApp, loopback: bool, api_key: bytes | None, origins: tuple[str, ...], max_body: int
    ) -> None:
        self.app, self.loopback, self.api_key, self.origins, self.max_body = app, loopback, api_key, origins, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        error = self._refusal(scope["path"], scope["method"], headers)
        if error is not None:
            await respond(error)(scope, receive, send)
            return
        origin = _one(headers, b"origin")
        if origin is not None:
            send = _with_origin(send, origin)
            if scope["method"] == "OPTIONS":
                await Response(status_code=204, headers=PREFLIGHT)(scope, receive, send)
                return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body:
                raise ApiError(413, f"The body is larger than {self.max_body} bytes.", code="content_too_large")
            return message

        await self.app(scope, limited, send)

    def _refusal(self, path: str, method: str, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1:
            return ApiError(400, f"{len(hosts)} Host headers, there must be one.")
        if self.loopback and not host_is_local(hosts[0]):
            return ApiError(403, "This host name is not allowed.", "permission_error", "host_not_allowed")
        origin = _one(headers, b"origin")
        if origin is not None and origin not in self.origins:
            return ApiError(403, "This origin is not allowed.", "permission_error", "origin_not_allowed")
        preflight = origin is not None and method == "OPTIONS"  # browsers send these without the key
        if self.api_key is not None and path not in OPEN_PATHS and not preflight and not self._has_key(headers):
            return ApiError(401, "The API key is missing or wrong.", "authentication_error", "invalid_api_key")
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if not length.isdigit():
            return ApiError(400, "Content-Length is not a number.")
        if int(length) > self.max_body:
            return ApiError(413, f"The body is larger than {self.max_body} bytes.", code="content_too_large")
        if any(name == b"content-encoding" and value != b"identity" for name, value in headers):
            return ApiError(415, "Encoded bodies are not accepted.", code="unsupported_media_type")
        return None

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1 or self.api_key is None:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.api_key)
