"""Requests to an OpenAI-compatible server, and the meaning of its responses.

Uses the standard library's client: a larger one costs `run` 80 ms before its first token.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from localllm.errors import LocalLLMError, ServerError
from localllm.request import Usage

CONNECT_S = 5.0
FAILURES = (OSError, http.client.HTTPException, ValueError)  # the server does not answer, or not in HTTP
_CODES = {
    "context_length_exceeded": "E901", "model_not_found": "E301", "invalid_api_key": "E401", "invalid_value": "E202",
    "invalid_json_schema": "E203", "does_not_fit": "E501", "engine_dead": "E601", "constraint_unmet": "E1001",
}  # fmt: skip


class Reply(NamedTuple):
    """A response whose body is still unread."""

    status: int
    body: http.client.HTTPResponse

    def json(self) -> Any:
        """Parse the body. Raises ValueError."""
        return json.loads(self.body.read())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the body as they arrive."""
        while line := self.body.readline():
            yield line.decode("utf-8", "replace").rstrip("\r\n")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Wire:
    """A connection to one server; proxy variables of the environment are ignored.

    url   http://host:port or https://..., without /v1, or unix:/path
    key   sent as a bearer token, if not empty
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self._key = url, key

    @contextmanager
    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float | None = None,
        opened: Callable[[socket.socket], None] = lambda _: None,
    ) -> Iterator[Reply]:
        """Send a request; the connection closes after the block. Raises one of FAILURES.

        timeout   seconds of silence; None waits as long as the server lives
        opened    gets the socket before the request is sent, so that another thread can shut it down
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"accept": "*/*", "connection": "close"}
        headers |= {"authorization": f"Bearer {self._key}"} if self._key else {}
        headers |= {"content-type": "application/json"} if data is not None else {}
        connection, prefix = self._connection()
        try:
            connection.connect()
            line: socket.socket = connection.sock
            line.settimeout(timeout)
            opened(line)
            connection.request(method, prefix + path, data, headers)
            with connection.getresponse() as response:  # closes the socket even if the body is not fully read
                yield Reply(response.status, response)
        finally:
            connection.close()

    def get(self, path: str, timeout: float | None = CONNECT_S) -> tuple[int, bytes]:
        """Return (status, body) of a GET. Raises one of FAILURES."""
        with self.send("GET", path, timeout=timeout) as reply:
            return reply.status, reply.body.read()

    def _connection(self) -> tuple[http.client.HTTPConnection, str]:
        if self.url.startswith("unix:"):
            return _UnixConnection(self.url.removeprefix("unix:")), ""
        parts = urlsplit(self.url)
        if not parts.hostname:
            raise ValueError("no host in the address")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname, parts.port, timeout=CONNECT_S), parts.path.rstrip("/")


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a server-sent event stream. Raises EOFError when the stream breaks off."""
    for line in lines:
        if line.startswith("data:"):
            text = line[5:].strip()
            if text == "[DONE]":
                return
            value = json.loads(text)
            if isinstance(value, dict):
                yield value
    raise EOFError("the stream broke off")


def usage_of(told: Mapping[str, Any]) -> Usage:
    """The `usage` of a response."""
    prompt, completion = told.get("prompt_tokens_details") or {}, told.get("completion_tokens_details") or {}
    return Usage(
        int(told.get("prompt_tokens") or 0), int(prompt.get("cached_tokens") or 0),
        int(told.get("completion_tokens") or 0), int(completion.get("reasoning_tokens") or 0),
    )  # fmt: skip


def refused(status: int, body: bytes) -> LocalLLMError:
    """Turn a server's error response into one of our errors."""
    try:
        error = json.loads(body)["error"]
        return meant(str(error["message"])[:500], error | ({"code": "invalid_api_key"} if status == 401 else {}))
    except (ValueError, KeyError, TypeError):
        return meant(f"the server returned HTTP {status}", {"code": "invalid_api_key" if status == 401 else ""})


def meant(message: str, error: Mapping[str, Any], hint: str = "localllm ps") -> LocalLLMError:
    """Turn a server's error object into one of our errors."""
    made = ServerError(message, hint, param=str(error.get("param") or ""))
    if known := _CODES.get(str(error.get("code") or "")):
        made.exit_code, made.number = int(known[1:-2]), int(known[-2:])
        made.hint = {"E401": "`export LOCALLLM_API_KEY=…`", "E901": "shorten the prompt"}.get(known, made.hint)
    return made
