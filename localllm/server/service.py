"""What the routes share: the models behind them, who may be answered next, and the way from a request to a turn.

The order is the same for every API: find the model (404), see that requests are taken (503), reserve a place (429),
wait for the model to be loaded, make token ids off the event loop, wait for its turn, hand it to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from localllm.errors import LocalLLMError
from localllm.llm.llm import LLM
from localllm.server.openai.responses_store import ResponseStore

from .admission import Admission, Ticket
from .errors import ApiError, from_error
from .exchange import Exchange, exchange_of
from .metrics import Metrics
from .pool import Lease, ModelPool
from .response_stream import AsyncTurn, Mailbox, Post
from .served_model import ServedModel, State

T = TypeVar("T")
log = logging.getLogger(__name__)

STALL_S = 12.0
"""a step older than this, and than three of the longest so far, means that nothing is being answered"""
TEXT_THREADS = 4
"""threads that render and tokenise"""
INLINE_CHARS = 2000
"""shorter texts are tokenised in the event loop: a thread would cost more (0.1 ms) than they do"""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """How many requests are taken."""

    parallel: int = 4
    """sequences a model answers side by side"""
    max_queue: int = 256
    """requests that may wait, per model"""
    default_model: str = ""
    """the id meant by a request that names none; "" for the first offered"""


@dataclass(slots=True)
class Place:
    """A request's place with a model: reserved, and later loaded."""

    model: ServedModel
    ticket: Ticket
    asked: Exchange
    lease: Lease | None = None
    turns: list[AsyncTurn] = field(default_factory=list)
    """those it was reserved for, once they are with the engine"""

    @property
    def llm(self) -> LLM:
        """The loaded model."""
        assert self.lease is not None
        return self.lease.llm

    def release(self) -> None:
        """Give both back; twice does nothing."""
        self.ticket.release()
        if self.lease is not None:
            self.lease.release()


@dataclass(slots=True)
class Wish:
    """What a turn is started with, beside its prompt."""

    streams: bool = False
    """pieces are wanted as they come"""
    splits_reasoning: bool = False
    cache_salt: str = ""
    generates: bool = True
    """False: only the prompt is scored, the token that the engine makes for it is dropped"""
    more: dict[str, Any] = field(default_factory=dict)
    """further arguments of `LLM.submit`"""


class Service:
    """The models and the order of their requests. Used from one event loop."""

    def __init__(self, pool: ModelPool, options: ServiceOptions | None = None) -> None:
        self.pool = pool
        self.options = options or ServiceOptions()
        self.created = int(time.time())
        self.queues: dict[str, Admission] = {}
        self.metrics = Metrics(pool, self.queues)
        self.responses = ResponseStore()
        self.is_draining = False
        self.is_loading = False
        """the models that were named at the start are not there yet"""
        self._turns: set[AsyncTurn] = set()
        self._mailbox: Mailbox | None = None
        self._text = ThreadPoolExecutor(TEXT_THREADS, "text")

    def close(self) -> None:
        """End the threads; the models are their owner's."""
        self._text.shutdown(wait=False, cancel_futures=True)

    # --- models ------------------------------------------------------------------------------------------------------

    async def models(self) -> tuple[ServedModel, ...]:
        """Every model that may be asked for."""
        return await asyncio.get_running_loop().run_in_executor(self._text, self.pool.models)

    async def find(self, asked: str | None) -> ServedModel:
        """The model a request means. Raises ApiError 404."""
        name = asked if asked is not None else self.options.default_model
        known = self.pool.known(name) if name else None
        if known is not None:
            return known
        if not name:
            models = await self.models()
            if not models:
                raise ApiError(404, "No model is on this machine.", code="model_not_found", param="model")
            return models[0]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._text, self.pool.find, name)
        except LocalLLMError as error:
            raise from_error(error) from None

    # --- readiness ---------------------------------------------------------------------------------------------------

    def check_ready(self) -> None:
        """Raise ApiError 503 when nothing new is taken."""
        if self.is_draining:
            raise ApiError(503, "The server is shutting down.", "unavailable_error", "shutting_down", retry_after=5)
        if self.is_loading:
            raise ApiError(503, "The model is being loaded.", "unavailable_error", "model_loading")
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
                raise ApiError(503, f"The engine of {row.name} is being restarted.", "server_error", "engine_dead")

    # --- from a request to a turn ------------------------------------------------------------------------------------

    def admission(self, name: str) -> Admission:
        """The queue of one model."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Admission(self.options.parallel, self.options.max_queue)
        return queue

    def check_room(self) -> None:
        """Raise ApiError 503 or 429 where that is certain before a request is read: most refusals are made here."""
        if self.is_draining:
            self.check_ready()
        only = self.pool.only
        if only is not None:
            self.admission(only.name).check()

    @asynccontextmanager
    async def place(
        self,
        request: Request,
        name: str | None,
        *,
        user: str = "",
        priority: int | None = None,
        cost: int = 1,
        deadline: float | None = None,
    ) -> AsyncIterator[Place]:
        """A reserved place with a loaded model, given back at the end of the block unless a turn has taken it over.

        deadline  on the monotonic clock
        """
        model = await self.find(name)
        self.check_ready()
        asked = exchange_of(request)
        asked.model = model.name
        client = asked.client_of(user)
        ticket = self.admission(model.name).reserve(client, priority=priority or 0, cost=cost, deadline=deadline)
        place = Place(model, ticket, asked)
        try:
            await asyncio.sleep(0)  # whoever came at the same time is refused before anybody's text is read
            place.lease = await self.lease(model)
            yield place
        except BaseException:
            for turn in place.turns:
                turn.abort()
            raise
        finally:
            if not place.turns:  # else the last of them gives it back
                place.release()

    async def lease(self, model: ServedModel) -> Lease:
        """A loaded model; waits for it. Raises what loading failed with."""
        future = self.pool.acquire(model)
        if future.done():
            return future.result()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel() and future.done() and future.exception() is None:
                future.result().release()
            raise

    async def text_work(self, size: int, work: Callable[[], T]) -> T:
        """Make token ids (or text): short ones here, others in a thread. `size` in characters."""
        if size <= INLINE_CHARS:
            return work()
        return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Whatever may take long, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._text, work)

    async def start(self, place: Place, prompts: Sequence[Sequence[int]], params: Any, wish: Wish) -> list[AsyncTurn]:
        """Wait for its turn and hand every prompt to the engine. The place is given back when the last turn ends."""
        for prompt in prompts:
            place.llm.check_prompt(prompt, params)
        await place.ticket.granted()
        self._mailbox = mailbox = self._mailbox or Mailbox(asyncio.get_running_loop())
        remaining = len(prompts)

        def on_end(turn: AsyncTurn) -> None:
            nonlocal remaining
            self._turns.discard(turn)
            remaining -= 1
            if remaining == 0:
                place.release()

        for number, prompt in enumerate(prompts):
            meter = self.metrics.turn(place.model.name, params, place.asked, generates=wish.generates)
            turn = AsyncTurn(params.n, on_end)
            try:
                started = place.llm.submit(
                    prompt,
                    params,
                    splits_reasoning=wish.splits_reasoning,
                    cache_salt=wish.cache_salt,
                    priority=-place.ticket.priority,
                    listener=Post(mailbox, turn, meter, streams=wish.streams),
                    **wish.more,
                )
            except BaseException:
                remaining -= len(prompts) - number  # these never start; `place` aborts those that did
                raise
            self._turns.add(turn)
            place.turns.append(turn)
            turn.started(started, place.ticket.deadline)
        return place.turns

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def num_turns(self) -> int:
        """Requests that are with an engine."""
        return len(self._turns)

    @property
    def num_reserved(self) -> int:
        """Requests that hold a place, with an engine or not."""
        return sum(queue.num_reserved for queue in self.queues.values())

    def cut_all(self) -> None:
        """End every turn with what it has: the time to drain is over."""
        for turn in list(self._turns):
            turn.cut("the server is shutting down")
