"""State shared by all routes: the models, their queues, and the single path from a request to the engine.

The order is the same for every API: find the model (404), check that requests are accepted (503), reserve a place
(429), wait until the model is loaded, tokenize off the event loop, wait for the request's turn, submit to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from localllm.chat.mcp.servers import ServerEntry
from localllm.errors import ContextTooLong
from localllm.llm.llm import LLM
from localllm.server.openai.responses_store import ResponseStore

from .adapters import AdapterNames
from .admission import Admission, Ticket
from .errors import ApiError, invalid, shutting_down
from .exchange import Exchange, exchange_of
from .generation import Conversation, Generation
from .mcp import OwnersTools
from .metrics import Metrics, RequestMeter
from .pool import ModelPool
from .response_stream import AsyncResponseStream, Mailbox
from .served_model import Lease, ServedModel, State

T = TypeVar("T")
log = logging.getLogger(__name__)

# how long an engine may take to end a request when the server shuts down; a second before connections are closed
CUT_WAIT_S = 5.0
STALL_S = 12.0  # the engine is stalled if a step takes longer than this and than three times the longest step so far
TEXT_THREADS = 4  # threads that render templates and tokenize
INLINE_CHARS = 2000  # shorter texts are tokenized in the event loop: handing them to a thread costs more (0.1 ms)


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Limits and defaults for requests."""

    parallel: int = 4  # sequences that a model runs concurrently
    max_queue: int = 256  # requests that may wait, per model
    default_model: str = ""  # the id for requests that name no model, if several are served
    mcp: tuple[ServerEntry, ...] = ()  # MCP servers whose tools clients may call
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> folder, for the model `adapted`
    adapted: str = ""


@dataclass(slots=True)
class Reservation:
    """A request's hold on a model: a queue ticket, then the lease, then the stream of its responses."""

    model: ServedModel
    ticket: Ticket
    exchange: Exchange
    lease: Lease | None = None
    running: AsyncResponseStream | None = None
    adapter: str = ""  # name of the LoRA adapter

    @property
    def name(self) -> str:
        """The model name that responses show: the adapter's, else the model's."""
        return self.adapter or self.model.name

    @property
    def llm(self) -> LLM:
        assert self.lease is not None
        return self.lease.llm

    @property
    def stream(self) -> AsyncResponseStream:
        assert self.running is not None
        return self.running

    def abort(self) -> None:
        if self.running is not None:
            self.running.abort()

    def release(self) -> None:
        """Release the ticket and the lease; a second call does nothing."""
        self.ticket.release()
        if self.lease is not None:
            self.lease.release()


class Service:
    """The models and the queues of their requests. Used from one event loop."""

    def __init__(self, pool: ModelPool, options: ServiceOptions | None = None) -> None:
        self.pool = pool
        self.options = options or ServiceOptions()
        self.created = int(time.time())
        queue = partial(Admission, self.options.parallel, self.options.max_queue)
        self.queues: defaultdict[str, Admission] = defaultdict(queue)  # by model
        self.metrics = Metrics(pool, self.queues)
        self.adapters = AdapterNames(pool, self.options.adapted, self.options.adapters)
        self.responses = ResponseStore()
        self.mcp = OwnersTools(self.options.mcp) if self.options.mcp else None
        self.is_draining = False
        self.is_loading = False  # the models named at startup are not loaded yet
        self._streams: set[AsyncResponseStream] = set()
        self._mailbox: Mailbox | None = None
        self._text = ThreadPoolExecutor(TEXT_THREADS, "text")
        # separate from asyncio's few threads, which parse bodies: jobs wait for each other, up to two seconds each
        self._rules = ThreadPoolExecutor(TEXT_THREADS, "rules")

    def close(self) -> None:
        """Stop the threads and the MCP servers; the models belong to the caller."""
        if self.mcp is not None:
            self.mcp.close()
        for threads in (self._text, self._rules):
            threads.shutdown(wait=False, cancel_futures=True)

    async def models(self) -> tuple[ServedModel, ...]:
        return await self.in_thread(self.pool.models)

    async def find(self, asked: str | None) -> ServedModel:
        """Find the model of a request; one that names none gets the default or the only one. Raises LocalLLMError."""
        if asked:
            known, adapter = self.pool.known(asked), self.adapters.find(asked)
            name = asked if adapter is None else adapter.model
            return known if known is not None else await self.in_thread(lambda: self.pool.find(name))
        models = await self.models()
        if not models:
            raise ApiError(404, "There are no models on this machine.", code="model_not_found", param="model")
        default = self.pool.known(self.options.default_model) if self.options.default_model else None
        if default is None and len(models) > 1:
            names = ", ".join(model.name for model in models[:8])
            message = f"The request must name a model, since several are served: {names}"
            raise invalid(message, "model", "missing_required_parameter")
        return default or models[0]

    def refuse_adapter(self, asked: str | None) -> None:
        """Raise ApiError 400 if an embedding request names an adapter."""
        if (adapter := self.adapters.find(asked)) is not None:
            raise invalid(f"Embeddings do not support adapters: use the model name {adapter.model} alone.", "model")

    def check_ready(self) -> None:
        """Raise ApiError 503 while no new requests are accepted."""
        if self.is_draining:
            raise shutting_down()
        if self.is_loading:
            raise ApiError(503, "The model is still loading.", "unavailable_error", "model_loading")
        if broken := self.pool.broken:
            raise ApiError(503, f"{broken}; restart the server.", "server_error", "engine_dead")
        for row in self.pool.loaded():
            if row.llm is None or row.state is not State.READY:
                continue
            if row.llm.is_stalled(STALL_S):
                raise ApiError(
                    503, f"The engine of {row.name} is stuck in a step.", "unavailable_error", "engine_stalled"
                )
            if row.llm.is_dead:
                self.pool.restart_dead()
                raise ApiError(503, f"The engine of {row.name} has stopped.", "server_error", "engine_dead")

    def check_room(self) -> None:
        """Raise ApiError 503 or 429 before a request is read, if that is already certain, as it is for most of them."""
        if self.is_draining:
            self.check_ready()
        only = self.pool.only
        if only is not None:
            self.queues[only.name].check()

    @asynccontextmanager
    async def reserve(
        self, request: Request, name: str | None, *, user: str = "", priority: int = 0, cost: int = 1,
        deadline: float | None = None,
    ) -> AsyncIterator[Reservation]:  # fmt: skip
        """Hold a place and a loaded model during the block (see `Ticket`), unless a stream takes them over."""
        model = await self.find(name)
        self.check_ready()
        exchange = exchange_of(request.scope)
        exchange.model = model.name
        client = exchange.client_of(user)
        ticket = self.queues[model.name].reserve(client, priority=priority, cost=cost, deadline=deadline)
        reservation = Reservation(model, ticket, exchange)
        try:
            await asyncio.sleep(0)  # let requests that arrived together be rejected before any text is tokenized
            reservation.lease = await self.lease(model)
            yield reservation
        except BaseException:
            reservation.abort()
            raise
        finally:
            if reservation.running is None:  # otherwise the end of its stream releases it
                reservation.release()

    async def lease(self, model: ServedModel) -> Lease:
        """Wait until the model is loaded and lease it. Raises the error that loading failed with."""
        future = self.pool.acquire(model)
        if future.done():
            return future.result()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            future.add_done_callback(_give_back)  # another thread may grant it in the meantime
            raise

    async def text_work(self, size: int, work: Callable[[], T]) -> T:
        """Run tokenization work, in a thread if it is long. `size` is in characters."""
        if size <= INLINE_CHARS:
            return work()
        return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run work that may take long off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._text, work)

    async def encode(self, llm: LLM, prompts: Conversation | Sequence[str | list[int]]) -> list[list[int]]:
        """Return the token ids of every prompt; conversations and long texts are encoded off the event loop."""
        if isinstance(prompts, Conversation):
            return [await self.in_thread(lambda: prompts.encode(llm))]
        size = sum(len(p) for p in prompts if isinstance(p, str))
        return await self.text_work(size, lambda: [llm.encode_prompt(p) for p in prompts])

    async def open(self, request: Request, asked: Generation) -> Reservation:
        """Reserve, tokenize and submit; returns a reservation with a stream. Raises LocalLLMError."""
        while True:
            try:
                return await self._open(request, asked)
            except ContextTooLong as error:
                shorter = asked.shorter(error)
                if shorter is None:
                    raise
                asked = shorter

    async def _open(self, request: Request, asked: Generation) -> Reservation:
        is_chat = isinstance(asked.prompts, Conversation)
        if is_chat:
            (await self.find(asked.model)).check_chats()
        async with self.reserve(
            request, asked.model, user=asked.user, priority=asked.priority, cost=asked.num_sequences,
            deadline=asked.deadline,
        ) as reservation:  # fmt: skip
            llm = reservation.llm
            adapter = self.adapters.find(asked.model)
            if adapter is not None:
                await self.in_thread(lambda: adapter.ensure(llm))
                reservation.adapter = adapter.name
            params = replace(llm.default_params(), **asked.sampling)
            prompts = await self.encode(llm, asked.prompts)
            more: dict[str, Any] = {"splits_reasoning": is_chat, "cache_salt": asked.cache_salt}
            more["adapter"] = reservation.adapter
            if asked.constraint is not None or asked.tool_use is not None:
                spec = partial(
                    llm.output_rules.spec, prompts[0] if is_chat else (), chat=is_chat, constraint=asked.constraint,
                    tool_use=asked.tool_use,
                )  # fmt: skip
                more["spec"] = await asyncio.get_running_loop().run_in_executor(self._rules, spec)
            try:
                for prompt in prompts:
                    llm.check_prompt(prompt, params)
            except ContextTooLong as error:
                error.param = error.param if is_chat else "prompt"
                raise
            await reservation.ticket.granted()
            self._mailbox = self._mailbox or Mailbox(asyncio.get_running_loop())

            def on_end(stream: AsyncResponseStream) -> None:
                self._streams.discard(stream)
                reservation.release()

            stream = AsyncResponseStream(self._mailbox, params.n, on_end, streams=asked.streams)
            for prompt in prompts:
                meter = RequestMeter(
                    self.metrics, reservation.model.name, params, reservation.exchange, generates=asked.generates
                )
                listener = stream.listener(meter.take)
                stream.started(llm.submit(prompt, params, priority=-asked.priority, listener=listener, **more))
                self._streams.add(stream)
                reservation.running = stream  # from now on the end of the stream releases the reservation
            if asked.deadline is not None:
                stream.end_at(asked.deadline)
        return reservation

    @property
    def num_reserved(self) -> int:
        """Number of requests that hold a place, running or waiting."""
        return sum(queue.num_reserved for queue in self.queues.values())

    def cut_all(self) -> None:
        """End every stream with the text so far, and refuse waiting requests: the drain period is over."""
        for queue in self.queues.values():
            queue.close()
        self.pool.refuse_waiting()
        for stream in list(self._streams):
            stream.cut("shutdown", CUT_WAIT_S)


def _give_back(future: Future[Lease]) -> None:
    """Release a lease whose waiter is gone."""
    if not future.cancelled() and future.exception() is None:
        future.result().release()


def service_of(request: Request) -> Service:
    """The service of the application that handles a request."""
    service: Service = request.app.state.service
    return service
