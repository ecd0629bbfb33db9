"""One replica: a loaded model behind the server's application, asked through a handle of Ray instead of a socket."""

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

OWNER = "the door's"  # the token of its application: only handles reach it, and the door has checked who asks
LEFT: Message = {"type": "http.disconnect"}


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """What a replica loads. Another value is another version of the application: Ray replaces its replicas."""

    model: str  # a name or a path, found on the replica's machine
    names: tuple[str, ...] = ()  # what clients call it; none: `model`
    engine: EngineOptions = EngineOptions()
    service: ServiceOptions = ServiceOptions()
    system_prompts: tuple[str, ...] = ()  # whose pages are evicted last
    offline: bool = False  # False: a model that is not there is downloaded


@dataclass(frozen=True, slots=True)
class Call:
    """A request on its way to a replica, and what came of it on its way back."""

    scope: dict[str, Any]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Ended:
    """What the door's log tells of an answer."""

    counts: dict[str, Any] = field(default_factory=dict)


COUNTED = ("model", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_s", "decode_tps", "finish", "note")


class Replica:
    """What Ray runs, several times."""

    def __init__(self, options: ReplicaOptions) -> None:
        self.name = serve.get_replica_context().replica_id.unique_id
        tag_ids(tag_of(self.name))
        self._app: Any = None
        llm = LLM(options.model, options.engine, offline=options.offline)
        llm.keeps_pace, llm.keeps_weights = True, False  # an end is waited for
        llm.output_rules.prepare()
        pin_system_prompts(llm, options.system_prompts)
        self._llm = llm
        pool = ModelPool.holding(llm, options.names or (options.model,))
        pool.models()
        self._service = Service(pool, options.service)
        self._app = create_app(self._service, AppOptions(loopback=False, token=OWNER))
        gc.freeze()

    def __del__(self) -> None:
        """Called by Ray when its last answer has ended."""
        if self._app is not None:
            self._service.close()
            self._llm.close()

    def check_health(self) -> None:
        """Raises DeviceError when its engine is dead for good: Ray starts another one in its place."""
        if broken := self._service.pool.broken:
            raise DeviceError(broken, "see the replica's log")

    async def answer(self, prefix: Prefix, call: Call) -> AsyncIterator[list[Any]]:
        """What the application sends, as much at a time as there is; `Ended` comes before the last. `prefix` is the
        router's.
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
            last: list[Message] = []  # goes out when it is known what came of the request
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
        """(its name, status, body) of one of its own routes."""
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
        """End all answers with what they have."""
        self._service.cut_all()
