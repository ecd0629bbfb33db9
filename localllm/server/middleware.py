"""What every request passes before a route sees it: host, origin, key, sizes, room. Plain ASGI, streams unbuffered.

Decisions look at `scope`, never at a URL rebuilt from headers. What takes time,
slow headers and bodies, is cut in `protocol.py`.
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
SMALL_BODY_BYTES = 64 << 10  # up to here a body is read whatever else is held
MAX_BODY_BYTES = 16 << 20
MAX_BODIES = 16  # of the largest size: together no more bytes are held, until their requests have ended


def host_is_local(host: str) -> bool:
    """Whether a Host header names this machine: loopback, an IP address literal, localhost and the local suffixes."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name.endswith(LOCAL_SUFFIXES) or is_loopback(name)


def is_loopback(host: str) -> bool:
    """Whether an address to bind is this machine's alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_at(scope: Scope, address: tuple[str, int] | None) -> bool:
    """Whether a request came in at that address of ours. It is the socket's own: no header says so."""
    return address is not None and tuple(scope.get("server") or ()) == address


@dataclass(frozen=True, slots=True)
class AppOptions:
    """How the server treats its callers."""

    loopback: bool = True  # reachable from this machine only: Host must be local
    api_keys: tuple[str, ...] = ()  # one of them must come with every request; none: no key is needed
    origins: tuple[str, ...] = ()  # browser origins that may call
    log_format: str = "text"  # text | json
    ollama: tuple[str, int] | None = None  # a second address, of this machine only, where models may be changed, too
    library: Library | None = None  # what changes them
    token: str = ""  # counts as a key, and is the only one for the routes that manage models; "" for no such routes


class Gate:
    """Refuses what may not enter, and what there is no room for before any route is looked for: thrice the capacity may
    be asked for, and each refusal takes time from an answer.

    `check_room` raises ApiError where the queue is full, which matters to the `crowded` paths.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[bytes], options: AppOptions, check_room: Callable[[], None],
        crowded: frozenset[str],
    ) -> None:  # fmt: skip
        self.app, self.api_keys, self.check_room, self.crowded = app, tuple(api_keys), check_room, crowded
        self.loopback, self.ollama, self.origins = options.loopback, options.ollama, options.origins
        self.held_bytes = 0  # of bodies whose requests have not ended
        self._full: dict[tuple[str, str], Response] = {}  # the last refusal by message and path, which many get

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: Headers = scope["headers"]
        origin = next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)
        error = _malformed(scope, headers) or self._refusal(scope, headers, origin)
        if error is not None:
            await refuse(scope, error)(scope, receive, send)
            return
        if origin is not None:  # the gate let it in: the browser may read the answer
            extra = [
                (b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin"),
                (b"access-control-expose-headers", EXPOSED_HEADERS),
            ]  # fmt: skip
            send = with_headers(send, lambda _: extra)
            if scope["method"] == "OPTIONS":
                # whatever the client's SDK adds: the origin is one that the owner named
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
        """Whether exactly one key came, as `Authorization: Bearer` or as `x-api-key`, and it is one of ours."""
        given: list[tuple[bytes, bytes]] = []
        for name, value in headers:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                given.append((name, key.strip() if scheme.lower() == b"bearer" else b""))
            elif name == b"x-api-key":
                given.append((name, value))
        keys = {key for _, key in given}
        # one of each kind may come: the anthropic SDK sends both when both are configured
        if len(keys) != 1 or len(dict(given)) < len(given):
            return False
        matches = [hmac.compare_digest(given[0][1], key) for key in self.api_keys]  # all of them: no early way out
        return any(matches)


def _malformed(scope: Scope, headers: Headers) -> ApiError | None:
    """What HTTP itself forbids, and sizes that no client needs."""
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
