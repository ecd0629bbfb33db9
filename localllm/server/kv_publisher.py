"""`serve --kv-events tcp://HOST:PORT`: prefix cache events over ZMQ, in vLLM's format.

A message is (topic, sequence number in 8 bytes, msgpack of [ts, events, 0]); the topic is the model's name. Subscribers
that missed messages request a replay at PORT + 1: they send the first sequence number, and receive all kept messages
from it on, then an empty one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

from localllm.errors import ConfigError, ServerError
from localllm.llm.llm import LLM
from localllm.request import extra_hint

from .middleware import is_loopback

log = logging.getLogger(__name__)

KEPT, KEPT_BYTES = 10_000, 64 << 20  # limits on the messages kept for replay
UNREAD = 100_000  # messages queued for a slow subscriber, which loses later ones
END = (-1).to_bytes(8, "big", signed=True)


def read_endpoint(text: str, *, insecure: bool = False) -> tuple[str, int]:
    """Parse `tcp://HOST:PORT` into (address, port).

    Raises ConfigError, also for a public address without `insecure`, because events contain the tokens of prompts.
    """
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ConfigError(f"--kv-events: {text!r} is not an address", "--kv-events tcp://127.0.0.1:5557")
    if not is_loopback(host.strip("[]")) and not insecure:
        raise ConfigError(
            f"--kv-events: {host} can be reached from the network, and events contain the tokens of prompts",
            "--kv-events tcp://127.0.0.1:5557, or --insecure if you mean it",
        )
    return ("127.0.0.1" if host == "localhost" else host), int(port)


class KVPublisher:
    """Publisher on two ports until `close`; call `attach` whenever a model has a new engine."""

    def __init__(self, endpoint: str, *, insecure: bool = False) -> None:
        """Raises ConfigError, or ServerError if a port is in use."""
        host, port = read_endpoint(endpoint, insecure=insecure)
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError(f"--kv-events needs the package {error.name}", extra_hint("zmq")) from None
        self._encode = msgspec.msgpack.encode
        self._lock = threading.Lock()  # the engines of several models publish
        self._number, self._size = 0, 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._context = zmq.Context()
        self._sending, self._asked = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        try:
            for index, sock in enumerate((self._sending, self._asked)):
                sock.setsockopt(zmq.SNDHWM, UNREAD)
                sock.setsockopt(zmq.LINGER, 0)
                sock.bind(f"tcp://{host}:{port + index}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            where = f"{host} port {port} or {port + 1}"
            raise ServerError(f"--kv-events: cannot listen on {where}: {error}", "choose two other ports") from error
        self._ended = zmq.ContextTerminated
        self._thread = threading.Thread(target=self._replay, name="kv-events", daemon=True)
        self._thread.start()

    def attach(self, model: str, llm: LLM) -> None:
        """Publish the page events of the model's engine from now on, until the engine ends."""
        topic = model.encode()
        llm.engine.watch_pages(lambda batch: self._publish(topic, batch) if batch else None)

    def _publish(self, topic: bytes, batch: dict[str, Any]) -> None:
        """Called in an engine's thread."""
        if not batch["events"]:
            return
        message = self._encode([batch["ts"], [list(event.values()) for event in batch["events"]], 0])
        with self._lock:
            if self._sending.closed:
                return
            self._sending.send_multipart((topic, self._number.to_bytes(8, "big"), message))
            self._kept.append((self._number, message))
            self._number += 1
            self._size += len(message)
            while len(self._kept) > KEPT or self._size > KEPT_BYTES:
                self._size -= len(self._kept.popleft()[1])

    def _replay(self) -> None:
        try:
            while True:
                frames = self._asked.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    log.warning("ignored a malformed replay request of %d parts", len(frames))
                    continue
                client, _, first = frames
                with self._lock:
                    kept = [one for one in self._kept if one[0] >= int.from_bytes(first, "big")]
                for number, message in kept:
                    self._asked.send_multipart((client, b"", number.to_bytes(8, "big"), message))
                self._asked.send_multipart((client, b"", END, b""))
        except self._ended:
            pass
        finally:  # `close` waits for this
            self._asked.close(0)

    def close(self) -> None:
        """Close both ports."""
        with self._lock:
            self._sending.close(0)
        self._context.term()
        self._thread.join()
