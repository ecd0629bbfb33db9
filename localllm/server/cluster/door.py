"""The door: the endpoint in front of the replicas, with access checks, routing, and errors for lost replicas.

Plain ASGI behind the same layers as the application of a single server. It rejects a request or forwards it as a whole.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from localllm.errors import LocalLLMError
from localllm.server.anthropic.messages import ANTHROPIC_EVENTS
from localllm.server.app import ROUTES, document
from localllm.server.body import INLINE_BYTES
from localllm.server.errors import ApiError, ClientLeft, bug, is_anthropic, is_ollama, openai_body, shutting_down
from localllm.server.exchange import Exchange, Exchanges, exchange_of, refuse
from localllm.server.middleware import AppOptions, Gate
from localllm.server.ollama.library import OLLAMA_LINES
from localllm.server.other.status import METRICS_TYPE, check_token
from localllm.server.reply import EVENTS, named, unless_left

from .affinity import Fleet, Prefix, prefix_of
from .replica import Call, Ended

log = logging.getLogger(__name__)

TELL_S = 10.0  # timeout for status requests to replicas
NOT_SENT_ON = {"authorization", "x-api-key", "connection", "host", "origin", "content-length", "transfer-encoding"}
# rejected, because these would change only one replica
CHANGES = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/localllm/unload", "/localllm/park"}
LOST = (RayError, RayServeException)


class Door:
    """The endpoint. Used from one event loop; the streaming `handle` is set when the replicas are ready."""

    def __init__(self, options: AppOptions, token: str = "") -> None:
        self.handle: Any = None
        self.token = token
        self.cluster = ""  # address of the Ray cluster
        self.is_draining = False
        self.num_reserved = 0  # requests being handled by replicas
        self.ends_answers = False  # whether `cut_all` may end the requests of all doors
        self._cuts: list[asyncio.Future[Any]] = []
        registry = CollectorRegistry()
        text = "HTTP requests by status class, as clients see them."
        self._http = Counter("localllm:door_requests", text, ("status",), registry=registry)
        self._registry = registry
        keys = [key.encode() for key in options.api_keys]
        if keys and token:
            keys.append(token.encode())
        crowded = frozenset(route.path for route in ROUTES if route.needs_room)
        gate = Gate(self._enter, keys, options, self.check_ready, crowded)
        self.app = Exchanges(gate, self._count, options.log_format)

    @property
    def num_replicas(self) -> int:
        return len(Fleet.running)

    def check_ready(self) -> None:
        """Raise ApiError 503 while no replica can answer."""
        if self.is_draining:
            raise shutting_down()
        if self.handle is None or not Fleet.running:
            raise ApiError(503, "The model is still loading.", "unavailable_error", "model_loading")

    def cut_all(self) -> None:
        """End every response with the text so far: the drain period is over."""
        if self.ends_answers and self.handle is not None:
            told = self.handle.broadcast("cut").results_async(return_exceptions=True)
            self._cuts.append(asyncio.ensure_future(told))

    def _count(self, exchange: Exchange) -> None:
        self._http.labels(f"{exchange.status // 100}xx" if 100 <= exchange.status < 600 else "other").inc()

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _lifespan(receive, send)
            return
        own: dict[str, Callable[[Scope], Any]] = {
            "/health": self._health, "/ping": lambda _: JSONResponse({}), "/metrics": self._metrics,
            "/openapi.json": lambda _: JSONResponse(document()), "/localllm/ps": self._processes,
        }  # fmt: skip
        try:
            if scope["path"] in CHANGES:
                raise ApiError(
                    400, "Replicas can be changed only all at once: restart them with other options.",
                    "not_supported_error", "unsupported_feature",
                )  # fmt: skip
            if scope["method"] == "GET" and scope["path"] in own:
                response = own[scope["path"]](scope)
                response = response if isinstance(response, Response) else await response
                await response(scope, receive, send)
                return
            body = await _read(receive)
            if len(body) > INLINE_BYTES:
                prefix = await asyncio.to_thread(prefix_of, scope["path"], body)
            else:
                prefix = prefix_of(scope["path"], body)
            self.num_reserved += 1
            try:
                async with unless_left(receive):
                    await self._forward(scope, prefix, Call(_forwarded(scope), body), send)
            finally:
                self.num_reserved -= 1
        except LocalLLMError as error:
            await refuse(scope, error)(scope, receive, send)

    async def _forward(self, scope: Scope, prefix: Prefix, call: Call, send: Send) -> None:
        """Forward a request; if its replica is lost before the response begins, retry once on another."""
        for again in (True, False):
            self.check_ready()
            answer = _Answer(scope, send)
            try:
                await answer.take(self.handle.answer.remote(prefix, call))
                return
            except LOST as error:
                log.warning("%s: lost a replica: %s", exchange_of(scope).request_id, type(error).__name__)
                if answer.has_begun:
                    await answer.fail(replica_lost())
                    return
                if not again:
                    raise replica_lost() from error

    async def _health(self, scope: Scope) -> Response:
        self.check_ready()
        return JSONResponse({"status": "ok", "replicas": self.num_replicas})

    async def _metrics(self, scope: Scope) -> Response:
        """Return the metrics of all replicas, labelled by replica, and the door's own."""
        told = [(name, text.decode()) for name, status, text in await self._ask_replicas("/metrics") if status == 200]
        registry = CollectorRegistry()
        registry.register(_Collected([*labelled(told), *self._registry.collect()]))  # type: ignore[arg-type]
        return Response(generate_latest(registry), headers={"content-type": METRICS_TYPE})

    async def _processes(self, scope: Scope) -> Response:
        """List the models of all replicas, for the owner."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        check_token(self.token, given.decode("latin-1"))
        told = [
            (name, json.loads(text)) for name, status, text in await self._ask_replicas("/localllm/ps") if status == 200
        ]
        rows = [row | {"replica": name} for name, one in told for row in one["models"]]
        speeds: dict[str, float] = {}
        for _, one in told:
            speeds |= one["decode_tps"]
        return JSONResponse({"models": rows, "draining": self.is_draining, "decode_tps": speeds})

    async def _ask_replicas(self, path: str) -> list[tuple[str, int, bytes]]:
        """Return (name, status, body) of a route of each replica, without lost ones."""
        if self.handle is None or not Fleet.running:
            return []
        try:
            told = await self.handle.broadcast("tell", path).results_async(timeout_s=TELL_S, return_exceptions=True)
        except (TimeoutError, *LOST):
            return []
        return sorted(one for one in told if isinstance(one, tuple))


class _Answer:
    """Passes the messages of a replica on to the client."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.has_begun = False
        self._num_events = 0
        self._held: Message | None = None  # response start, held until a body arrives: the replica may die in between

    async def take(self, stream: Any) -> None:
        """Pass all messages on. Raises Ray's error if the replica is lost."""
        try:
            async for batch in stream:
                for message in batch:
                    if isinstance(message, Ended):
                        exchange = exchange_of(self._scope)
                        for name, value in message.counts.items():
                            setattr(exchange, name, value)
                    else:
                        await self._pass_on(message)
                if any(isinstance(message, Ended) for message in batch):
                    break  # at once: after the last message, a disconnect of the client no longer matters
        except BaseException:
            stream.cancel()
            raise
        if not self.has_begun:  # the application failed without a response
            await refuse(self._scope, bug())(self._scope, None, self._send)  # type: ignore[arg-type]

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._held = {**message, "headers": [pair for pair in message["headers"] if pair[0] not in _OWN]}
            return
        if self._held is not None:
            self.has_begun = True
            held, self._held = self._held, None
            await self._send(held)
        self._num_events += message.get("body", b"").count(b"\ndata: ")  # JSON has no line breaks of its own
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """End a stream that has begun with an error event of its API."""
        exchange_of(self._scope).note = error.api_code or ""
        end = stream_end(self._scope["path"], error, self._num_events)
        await self._send({"type": "http.response.body", "body": end, "more_body": False})


_OWN = {b"x-request-id", b"request-id", b"openai-processing-ms"}  # headers that the door's own layers set


def replica_lost() -> ApiError:
    """503 for a request whose replica was lost."""
    return ApiError(
        503, "The replica that handled this request stopped; retry the request.", "server_error", "replica_lost"
    )


def stream_end(path: str, error: ApiError, num_events: int) -> bytes:
    """The last chunk of a failed stream, in the format of its API."""
    if path == "/v1/responses":
        shown = openai_body(error)["error"]
        event = {"type": "error", "code": shown["code"], "message": shown["message"], "param": None}
        return named("error", event | {"sequence_number": num_events})
    form = ANTHROPIC_EVENTS if is_anthropic(path) else OLLAMA_LINES if is_ollama(path) else EVENTS
    return form.on_error(error) + form.done


def labelled(told: list[tuple[str, str]]) -> list[Metric]:
    """Merge the metrics of all replicas, given as (name, text), with the label `replica` on each sample."""
    found: dict[str, Metric] = {}
    for replica, text in told:
        for family in text_string_to_metric_families(text):
            kept = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                kept.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    return list(found.values())


class _Collected:
    """Prometheus collector of given metrics."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def _forwarded(scope: Scope) -> dict[str, Any]:
    """The part of the scope that a replica needs; API keys are not forwarded."""
    exchange = exchange_of(scope)
    headers = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in NOT_SENT_ON]
    headers += [(b"host", b"replica"), (b"x-request-id", exchange.request_id.encode())]
    kept = ("method", "path", "raw_path", "query_string", "client", "server", "scheme")
    return {name: scope[name] for name in kept if name in scope} | {"headers": headers}


async def _read(receive: Receive) -> bytes:
    """Read the whole body. Raises ClientLeft, or ApiError if it is too large."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _lifespan(receive: Receive, send: Send) -> None:
    """Answer lifespan events: Ray's proxy waits for the application to report startup and shutdown."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
