"""One request and its response for the operator: id, client, token counts, and a log line without prompt text."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.errors import LocalLLMError
from localllm.terminal import escaped

from .errors import ClientLeft, bug, respond

log = logging.getLogger(__name__)
access = logging.getLogger("localllm.access")

ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
KEY = "localllm.exchange"
POLLED = {"/health", "/ping", "/metrics"}  # polled every few seconds by monitors, so logged only at debug level
# rejections by a full queue are logged this often, with their number: a log line costs a fifth of a rejection
REFUSALS_S = 1.0
Headers = list[tuple[bytes, bytes]]
MAX_LOGGED = 120  # characters of a path or model name that a log line shows


@dataclass(slots=True)
class Exchange:
    """The facts about one request."""

    request_id: str
    method: str
    path: str
    peer: str  # address, or "unix"
    agent: str = ""  # the User-Agent header, to distinguish the clients of one address
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    decode_tps: float = 0.0
    finish: str = ""
    note: str = ""  # an error's code
    more: int = 0  # earlier rejections that were not logged

    def client_of(self, user: str = "") -> str:
        """Identify the client for fairness: a hash of its address and its user, or else its User-Agent."""
        return hashlib.blake2b(f"{self.peer}\0{user or self.agent}".encode(), digest_size=8).hexdigest()

    def as_json(self, seconds: float) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "id": self.request_id, "method": self.method,
            "path": self.path[:MAX_LOGGED], "status": self.status, "seconds": round(seconds, 4), "peer": self.peer,
        }  # fmt: skip
        if self.model:
            fields |= {
                "model": self.model[:MAX_LOGGED], "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens, "completion_tokens": self.completion_tokens,
            }  # fmt: skip
        if self.ttft_s is not None:
            fields |= {"ttft_s": round(self.ttft_s, 4), "decode_tps": round(self.decode_tps, 1)}
        more = {"finish": self.finish, "error": self.note, "more": self.more}
        return fields | {name: value for name, value in more.items() if value}

    def as_text(self, seconds: float) -> str:
        """The log line as readable text."""
        parts = [time.strftime("%H:%M:%S"), escaped(self.path[:MAX_LOGGED]), str(self.status)]
        if self.note:
            parts.append(f"{self.note} (and {self.more:,} more)" if self.more else self.note)
        if self.prompt_tokens:
            cached = f" (cached {self.cached_tokens:,})" if self.cached_tokens else ""
            parts.append(f"in {self.prompt_tokens:,}{cached} out {self.completion_tokens:,}")
        if self.ttft_s is not None:
            parts.append(f"ttft {self.ttft_s * 1000:.0f} ms")
        if self.decode_tps:
            parts.append(f"{self.decode_tps:.1f} tok/s")
        parts += [f"{seconds:.2f} s", self.peer, self.request_id]
        return "  ".join(parts)


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange of a request, created at the first call."""
    found = scope.get(KEY)
    if isinstance(found, Exchange):
        return found
    given = agent = ""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
        elif name == b"user-agent":
            agent = value[:200].decode("latin-1")
    request_id = given if ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
    client = scope.get("client")
    made = Exchange(request_id, scope["method"], scope["path"], client[0] if client else "unix", agent)
    scope[KEY] = made
    return made


def note_error(scope: Scope, error: LocalLLMError) -> None:
    """Note an error's code for the log."""
    exchange_of(scope).note = error.api_code or ""


def refuse(scope: Scope, error: LocalLLMError) -> Response:
    """Build the response for an error, and note the error for the log."""
    note_error(scope, error)
    return respond(error, scope["path"], exchange_of(scope).request_id, scope["headers"])


def with_headers(send: Send, headers: Callable[[Message], Headers]) -> Send:
    """Wrap `send` to add headers to the response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *headers(message)]}
        await send(message)

    return sending


class Exchanges:
    """Outermost ASGI layer: assigns request ids, adds them to responses, logs requests, and catches all errors."""

    def __init__(self, app: ASGIApp, on_end: Callable[[Exchange], None], log_format: str = "text") -> None:
        self.app, self.on_end = app, on_end  # `on_end` gets the finished exchange, for the counters
        self.as_json = log_format == "json"
        self._refusal_at = -REFUSALS_S
        self._refusals = 0  # not logged since then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = exchange_of(scope)

        def begin(message: Message) -> Headers:
            exchange.status = message["status"]
            took = 1000 * (time.monotonic() - exchange.started)
            number = exchange.request_id.encode()
            return [
                (b"x-request-id", number), (b"request-id", number), (b"openai-processing-ms", f"{took:.0f}".encode()),
            ]  # fmt: skip

        send = with_headers(send, begin)
        try:
            await self.app(scope, receive, send)
        except (ClientLeft, ClientDisconnect):
            exchange.status, exchange.note = 499, ""
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            exchange.note = "internal_error"
            if not exchange.status:
                await refuse(scope, bug())(scope, receive, send)
        finally:
            self._ended(exchange)

    def _ended(self, exchange: Exchange) -> None:
        seconds = time.monotonic() - exchange.started
        self.on_end(exchange)
        level = logging.DEBUG if exchange.path in POLLED and exchange.method == "GET" else logging.INFO
        if not access.isEnabledFor(level):
            return
        if exchange.note == "queue_full":
            now = time.monotonic()
            if now - self._refusal_at < REFUSALS_S:
                self._refusals += 1
                return
            exchange.more, self._refusal_at, self._refusals = self._refusals, now, 0
        line = json.dumps(exchange.as_json(seconds)) if self.as_json else exchange.as_text(seconds)
        access.log(level, "%s", line)
