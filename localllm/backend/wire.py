"""Requests to a server, with the standard library's client: a larger one costs `run` 80 ms before its first token."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

CONNECT_S = 5.0
FAILURES = (OSError, http.client.HTTPException, ValueError)  # of a server that does not answer, or not as one


class Reply(NamedTuple):
    """An answer whose body is still to be read, and the socket it comes through."""

    status: int
    body: http.client.HTTPResponse
    socket: socket.socket

    def json(self) -> Any:
        """The body. Raises ValueError."""
        return json.loads(self.body.read())

    def lines(self) -> Iterator[str]:
        """The lines of the body as they come."""
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
    """The way to one server; no proxy of the environment stands between a chat and its own machine.

    url   http://host:port or https://..., without /v1, or unix:/path
    key   sent as a bearer token where the server wants one
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self._key = url, key

    @contextmanager
    def send(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Iterator[Reply]:
        """Ask, and hang up after the block. Raises one of FAILURES.

        timeout   seconds of silence; None waits for as long as the server lives
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
            connection.request(method, prefix + path, data, headers)
            with connection.getresponse() as response:  # it keeps the socket open where not all of it is read
                yield Reply(response.status, response, line)
        finally:
            connection.close()

    def get(self, path: str, timeout: float | None = CONNECT_S) -> tuple[int, bytes]:
        """(status, body) of a GET. Raises one of FAILURES."""
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
