"""Checks on every request before routing: host, origin, key, sizes, capacity. Plain ASGI; streams are not buffered.

Decisions use `scope`, never a URL rebuilt from headers. `protocol.py` times out slow headers and bodies.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, respond
from .exchange import Headers, note_error, refuse, with_headers
from .served_model import Library

PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE",
    "Access-Control-Max-Age": "600",
}
ALLOWED_HEADERS = "authorization, content-type, x-api-key, anthropic-version, x-request-id"
HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(, ?[A-Za-z0-9-]+)*")
EXPOSED_HEADERS = b"x-request-id, request-id, retry-after, retry-after-ms, openai-processing-ms"
OPEN_PATHS = {"/health", "/ping"}
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10  # all header lines together
MAX_TARGET_BYTES = 8 << 10  # path and query
SMALL_BODY_BYTES = 64 << 10  # bodies up to this size are always read
MAX_BODY_BYTES = 16 << 20
MAX_BODIES = 16  # the bodies of unfinished requests may hold this many times MAX_BODY_BYTES together


def host_is_local(host: str) -> bool:
    """Whether a Host header names this machine: loopback, an IP address literal, localhost and the local suffixes."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name.endswith(LOCAL_SUFFIXES) or is_loopback(name)


def is_loopback(host: str) -> bool:
    """Whether an address to bind is reachable from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_at(scope: Scope, address: tuple[str, int] | None) -> bool:
    """Whether a request arrived at this address, as the socket reports it; no header can fake that."""
    return address is not None and tuple(scope.get("server") or ()) == address


@dataclass(frozen=True, slots=True)
class AppOptions:
    """Access rules of the server."""

    loopback: bool = True  # reachable from this machine only: Host must be local
    api_keys: tuple[str, ...] = ()  # every request must carry one of them; empty: no key is needed
    origins: tuple[str, ...] = ()  # browser origins that may send requests
    log_format: str = "text"  # text | json
    ollama: tuple[str, int] | None = None  # second loopback address, where models can also be pulled and deleted
    library: Library | None = None  # carries out those changes
    token: str = ""  # the owner's: also valid as a key, and the only one for management routes; "" disables them


class Gate:
    """Rejects forbidden requests, and requests to a full queue, before routing.

    Under overload, there may be several rejections per accepted request, and each one takes CPU time from generation.
    `check_room` raises ApiError if the queue is full; it is called only for the `crowded` paths.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[bytes], options: AppOptions, check_room: Callable[[], None],
        crowded: frozenset[str],
    ) -> None:  # fmt: skip
        self.app, self.api_keys, self.check_room, self.crowded = app, tuple(api_keys), check_room, crowded
        self.loopback, self.ollama, self.origins = options.loopback, options.ollama, options.origins
        self.held_bytes = 0  # body bytes of unfinished requests
        self._full: dict[tuple[str, str], Response] = {}  # the last 429 by message and path, reused for many requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: Headers = scope["headers"]
        origin = next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)
        if origin is not None and origin in self.origins:  # let the browser read the response, also an error
            extra = [
                (b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin"),
                (b"access-control-expose-headers", EXPOSED_HEADERS),
            ]  # fmt: skip
            send = with_headers(send, lambda _: extra)
        error = _malformed(scope, headers)
        if error is not None:  # what follows on the connection cannot be told apart from this request's body
            send = with_headers(send, lambda _: [(b"connection", b"close")])
        error = error or self._refusal(scope, headers, origin)
        if error is not None:
            await refuse(scope, error)(scope, receive, send)
            return
        if origin is not None and scope["method"] == "OPTIONS":
            # allow any header that the client's SDK adds: the owner has allowed the origin
            asked = next((v.decode("latin-1") for n, v in headers if n == b"access-control-request-headers"), "")
            names = asked if HEADER_NAMES.fullmatch(asked) else ALLOWED_HEADERS
            preflight = PREFLIGHT | {"Access-Control-Allow-Headers": names}
            await Response(status_code=204, headers=preflight)(scope, receive, send)
            return
        if scope["method"] == "POST" and scope["path"] in self.crowded:
            try:
                self.check_room()
            except ApiError as full:
                await self._refused(scope, full)(scope, receive, send)
                return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            got = len(message.get("body", b""))
            seen += got
            self.held_bytes += got
            if seen > MAX_BODY_BYTES:
                raise _too_large()
            if seen > SMALL_BODY_BYTES and self.held_bytes > MAX_BODIES * MAX_BODY_BYTES:
                raise ApiError(
                    503, f"Request bodies hold more than {MAX_BODIES * MAX_BODY_BYTES} bytes of memory; retry later.",
                    "unavailable_error", "overloaded",
                )  # fmt: skip
            return message

        try:
            await self.app(scope, limited, send)
        finally:
            self.held_bytes -= seen

    def _refused(self, scope: Scope, full: ApiError) -> Response:
        note_error(scope, full)
        key = full.message, scope["path"]
        if key not in self._full:
            self._full = {key: respond(full, scope["path"])}
        return self._full[key]

    def _refusal(self, scope: Scope, headers: Headers, origin: str | None) -> ApiError | None:
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1:
            return ApiError(400, f"The request has {len(hosts)} Host headers; exactly one is required.")
        if (self.loopback or is_at(scope, self.ollama)) and not host_is_local(hosts[0]):
            return ApiError(403, "This host name is not allowed.", "permission_error", "host_not_allowed")
        if origin is not None and origin not in self.origins:
            return ApiError(403, "This origin is not allowed.", "permission_error", "origin_not_allowed")
        preflight = origin is not None and scope["method"] == "OPTIONS"  # browsers send these without the key
        if self.api_keys and scope["path"] not in OPEN_PATHS and not preflight and not self._has_key(headers):
            return ApiError(401, "The API key is missing or wrong.", "authentication_error", "invalid_api_key")
        if any(name == b"content-encoding" and value.lower() != b"identity" for name, value in headers):
            return ApiError(415, "Bodies with a Content-Encoding are not accepted.", code="unsupported_media_type")
        return None

    def _has_key(self, headers: Headers) -> bool:
        """Whether the request carries exactly one key, as `Authorization: Bearer` or `x-api-key`, and it is valid."""
        given: list[tuple[bytes, bytes]] = []
        for name, value in headers:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                given.append((name, key.strip() if scheme.lower() == b"bearer" else b""))
            elif name == b"x-api-key":
                given.append((name, value))
        keys = {key for _, key in given}
        # the same key may come in both headers: the Anthropic SDK sends both when both are configured
        if len(keys) != 1 or len(dict(given)) < len(given):
            return False
        matches = [hmac.compare_digest(given[0][1], key) for key in self.api_keys]  # compare all, in constant time
        return any(matches)


def _malformed(scope: Scope, headers: Headers) -> ApiError | None:
    """The error for a request that violates HTTP or exceeds a size limit; None if it does neither."""
    if len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") > MAX_TARGET_BYTES:
        return ApiError(414, f"The URL is longer than {MAX_TARGET_BYTES} bytes.", code="uri_too_long")
    if len(headers) > MAX_HEADERS or sum(len(n) + len(v) for n, v in headers) > MAX_HEADER_BYTES:
        return ApiError(
            431, f"The request has more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them.",
            code="headers_too_large",
        )  # fmt: skip
    if not scope["path"].startswith("/"):
        return ApiError(400, "The request path does not start with a slash.")
    lengths = [value for name, value in headers if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in headers)
    if len(set(lengths)) > 1 or (lengths and chunked):
        return ApiError(400, "The request states its body length in two conflicting ways.")
    if lengths and not (lengths[0].isdigit() and len(lengths[0]) < 20):
        return ApiError(400, "Content-Length is not a number.")
    if lengths and int(lengths[0]) > MAX_BODY_BYTES:
        return _too_large()
    return None


def _too_large() -> ApiError:
    return ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.", code="content_too_large")
