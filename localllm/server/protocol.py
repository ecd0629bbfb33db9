"""uvicorn's HTTP/1.1 connection plus deadlines for headers, bodies and readers, and a connection limit.

Without them, a client that sends nothing, sends one byte per second, or never reads would hold its connection forever.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError, error_body

HEADER_S = 15.0  # from when a request may arrive to the end of its headers
BODY_S = 20.0  # for a body, plus its size at `BODY_RATE`
BODY_RATE = 64 << 10  # bytes per second
READER_S = 30.0  # how long a client may leave written data unread
DISCARD_S = 3.0
# how much of a rejected body is read and discarded, so that the client gets to read the error
DISCARD_BYTES = 64 << 20
MAX_CONNECTIONS = 2048


class OneWrite:
    """Transport that holds the headers of a response of known length until its body, to send both in one call.

    Each system call releases the GIL to other threads, and getting it back takes a while.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send the data now, or together with the next write."""
        if not self._held and data.startswith(b"HTTP/1.1 ") and b"\r\ncontent-length: " in data:
            self._held = data
        else:
            data, self._held = self._held + data, b""
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        if self._held:
            self.write(b"")


class Connection(H11Protocol):
    """One client connection."""

    max_connections = MAX_CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = ""  # what the client has to send: header, body, discard, or nothing
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._phase_bytes = 0
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(OneWrite(transport))  # type: ignore[arg-type]
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._enter_phase("header")

    def data_received(self, data: bytes) -> None:
        self._phase_bytes += len(data)
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # invalid data while a response is being sent
            self.transport.abort()
            return
        self._update()

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()
        if not self.transport.is_closing():
            self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter_phase("")
        self._stop_write_timer()
        super().connection_lost(exc)

    def _update(self) -> None:
        if self.transport.is_closing():
            self._enter_phase("")
        elif self.conn.their_state is h11.SEND_BODY:
            self._enter_phase("discard" if self.conn.our_state in (h11.DONE, h11.MUST_CLOSE) else "body")
            if self._phase == "discard" and self._phase_bytes > DISCARD_BYTES:
                self.transport.abort()
        elif self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            waits_idle = self.timeout_keep_alive_task is not None  # uvicorn closes idle connections itself
            self._enter_phase("" if waits_idle else "header")
        else:
            self._enter_phase("")

    def _enter_phase(self, phase: str) -> None:
        if phase == self._phase:
            return
        self._phase, self._phase_bytes = phase, 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if phase:
            seconds = {"header": HEADER_S, "body": BODY_S, "discard": DISCARD_S}[phase]
            self._deadline = self.loop.time() + seconds
            self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        self._timer = None
        if self._phase == "body":  # a large body may take longer while data keeps arriving
            left = self._deadline + self._phase_bytes / BODY_RATE - self.loop.time()
            if left > 0:
                self._timer = self.loop.call_later(left, self._on_timeout)
                return
        if self._phase == "discard" or self.transport.is_closing():
            self.transport.abort()
        elif self._phase == "header" and not self.conn.trailing_data[0]:
            self.transport.close()  # the client sent nothing, so there is nothing to answer
        else:
            what = "headers" if self._phase == "header" else "body"
            error = ApiError(408, f"The request {what} took too long to arrive.", "timeout_error", "request_timeout")
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._refuse(error)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with the same error shape as any other error."""
        too_large = self._phase == "header" and self._phase_bytes >= (self.config.h11_max_incomplete_event_size or 0)
        if too_large:
            self._refuse(ApiError(431, "The request headers are too large.", code="headers_too_large"))
        else:
            self._refuse(ApiError(400, "This is not a valid HTTP request.", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self.transport.is_closing():
            self.transport.abort()
            return
        path = self.scope["path"] if self.scope is not None and self._phase != "header" else ""
        body = json.dumps(error_body(error, path)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events = (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        try:
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            self.transport.abort()
            return
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(READER_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
