"""One replica: a loaded model behind the server's application, called through a Ray handle instead of a socket."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ray import serve
from starlette.types import Message

from localllm.config import EngineOptions
from localllm.errors import DeviceError
from localllm.llm.llm import LLM
from localllm.server.app import create_app
from localllm.server.exchange import KEY, Exchange
from localllm.server.middleware import AppOptions
from localllm.server.openai.output import tag_ids
from localllm.server.pool import ModelPool
from localllm.server.prefixes import pin_system_prompts
from localllm.server.service import Service, ServiceOptions

from .affinity import Prefix, tag_of

OWNER = "the door's"  # owner's token of the application: only Ray handles reach it, and the door checks access
LEFT: Message = {"type": "http.disconnect"}


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """What a replica loads. When it changes, Ray deploys a new version of the application and replaces its replicas."""

    model: str  # a name or path on the replica's machine
    names: tuple[str, ...] = ()  # ids for clients; empty: `model`
    engine: EngineOptions = EngineOptions()
    service: ServiceOptions = ServiceOptions()
    system_prompts: tuple[str, ...] = ()  # pinned: their pages are evicted last
    offline: bool = False  # False: download a missing model


@dataclass(frozen=True, slots=True)
class Call:
    """A request for a replica."""

    scope: dict[str, Any]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Ended:
    """The facts about a finished response, for the door's log."""

    counts: dict[str, Any] = field(default_factory=dict)


COUNTED = ("model", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_s", "decode_tps", "finish", "note")


class Replica:
    """The Ray actor of one replica."""

    def __init__(self, options: ReplicaOptions) -> None:
        self.name = serve.get_replica_context().replica_id.unique_id
        tag_ids(tag_of(self.name))
        self._app: Any = None
        llm = LLM(options.model, options.engine, offline=options.offline)
        llm.keeps_pace, llm.keeps_weights = True, False  # Ray waits for a replica to stop
        llm.output_rules.prepare()
        pin_system_prompts(llm, options.system_prompts)
        self._llm = llm
        pool = ModelPool.holding(llm, options.names or (options.model,))
        pool.models()
        self._service = Service(pool, options.service)
        self._app = create_app(self._service, AppOptions(loopback=False, token=OWNER))
        gc.freeze()

    def __del__(self) -> None:
        """Called by Ray after the last response has ended."""
        if self._app is not None:
            self._service.close()
            self._llm.close()

    def check_health(self) -> None:
        """Raise DeviceError if the engine is dead for good: Ray then replaces the replica."""
        if broken := self._service.pool.broken:
            raise DeviceError(broken, "see the replica's log")

    async def answer(self, prefix: Prefix, call: Call) -> AsyncIterator[list[Any]]:
        """Yield the application's messages in batches of what is available, with `Ended` before the last message.

        `prefix` is read only by the router.
        """
        left = asyncio.Event()
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        asked: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await left.wait()
            return LEFT

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", **call.scope}
        task = asyncio.ensure_future(self._app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            last: list[Message] = []  # held back until the counts of the request are known
            while True:
                batch = [*last, await sent.get()]
                while not sent.empty():
                    batch.append(sent.get_nowait())
                messages = [message for message in batch if message is not None]
                if len(messages) < len(batch):
                    break
                last = [one for one in messages if one["type"] == "http.response.body" and not one.get("more_body")]
                if messages := messages[: len(messages) - len(last)]:
                    yield messages
            exchange = scope.get(KEY)
            counts = {name: getattr(exchange, name) for name in COUNTED} if isinstance(exchange, Exchange) else {}
            yield [Ended(counts), *messages]
        finally:
            left.set()

    async def tell(self, path: str) -> tuple[str, int, bytes]:
        """Return (replica name, status, body) of a GET on one of its routes."""
        headers = [(b"host", b"replica"), (b"authorization", f"Bearer {OWNER}".encode())]
        scope = {"method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        status, body = 0, b""
        async for messages in self.answer(Prefix(), Call(scope)):
            for message in messages:
                if not isinstance(message, Ended):
                    status = message.get("status", status)
                    body += message.get("body", b"")
        return self.name, status, body

    async def cut(self) -> None:
        """End all responses with the text so far."""
        self._service.cut_all()
