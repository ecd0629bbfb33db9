"""Admission queue in front of a model's engine. Requests reserve a place before tokenization, or get a 429 at once.

The engine holds at most `parallel` sequences, plus `ahead` more to keep it from running idle; up to `max_queue`
requests wait here, ordered by priority, then by the client's running sequences and last turn (fewest and oldest first),
then by deadline and arrival. There is one queue per model, used only from the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from .errors import ApiError, shutting_down

MAX_CLIENTS = 4096  # clients whose last turn is kept


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place in the queue: reserved, then granted, then released. Releasing twice does nothing."""

    queue: Admission
    client: str
    priority: int
    cost: int  # sequences the engine will run for it
    deadline: float | None  # on the monotonic clock
    number: int
    is_part: bool = False  # one sequence of a request; the request's own ticket holds the place
    is_granted: bool = False
    is_released: bool = False
    _granted: asyncio.Future[None] | None = None

    async def granted(self) -> None:
        """Wait for the request's turn. Raises ApiError 503 if the deadline or shutdown comes first."""
        self.queue.enter(self)
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if self.is_granted and (left is None or left > 0):
            return
        self._granted = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(left):  # `wait_for` of Python 3.11 may ignore that the client left
                await self._granted
        except TimeoutError:
            message = "The deadline passed before generation started."
            raise ApiError(503, message, "timeout_error", "deadline_exceeded") from None

    def part(self) -> Ticket:
        """Ticket for one of the request's sequences, which waits for its own turn."""
        return Ticket(self.queue, self.client, self.priority, 1, self.deadline, self.number, is_part=True)

    def release(self) -> None:
        if not self.is_released:
            self.is_released = True
            self.queue.leave(self)

    def grant(self) -> None:
        """Let the request proceed; called by the queue."""
        self.is_granted = True
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    def refuse(self) -> None:
        """Fail the wait, because the queue has closed; called by the queue."""
        if self._granted is not None and not self._granted.done():
            self._granted.set_exception(shutting_down())


class Admission:
    """The queue in front of one model's engine."""

    def __init__(self, parallel: int, max_queue: int, ahead: int | None = None) -> None:
        """`ahead`: sequences handed to the engine beyond `parallel`; by default a quarter of it, at least one."""
        self.parallel = parallel
        self.max_queue = max_queue
        self.ahead = max(1, parallel // 4) if ahead is None else ahead
        self.num_reserved = 0  # requests that hold a place, waiting or not
        self.num_running = 0  # sequences handed to the engine
        self._waiting: list[Ticket] = []
        self._is_closed = False
        self._per_client: Counter[str] = Counter()
        self._served: dict[str, int] = {}  # client -> number of its last grant
        self._numbers = 0
        self._grants = 0

    @property
    def num_waiting(self) -> int:
        """Number of requests not yet handed to the engine."""
        return len(self._waiting)

    def reserve(self, client: str, *, priority: int = 0, cost: int = 1, deadline: float | None = None) -> Ticket:
        """Reserve a place for a request. Raises ApiError 429 when the queue is full."""
        self.check()
        self.num_reserved += 1
        self._numbers += 1
        return Ticket(self, client, priority, cost, deadline, self._numbers)

    def check(self) -> None:
        """Raise ApiError 429 when the queue is full."""
        if self.num_reserved >= self.parallel + self.max_queue:
            full = f"{self.num_reserved} requests are running or waiting, which is the limit"
            raise ApiError(
                429, f"The server is busy: {full}.", "rate_limit_error", "queue_full",
                retry_after=1 + min(4, self.max_queue // max(1, 4 * self.parallel)),
            )  # fmt: skip

    def enter(self, ticket: Ticket) -> None:
        """Add a ticket to the queue, and grant every ticket that fits. Raises ApiError 503 once the queue is closed."""
        if self._is_closed:
            raise shutting_down()
        self._waiting.append(ticket)
        self._grant()

    def close(self) -> None:
        """Refuse all waiting and all future tickets."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            ticket.refuse()

    def _grant(self) -> None:
        while self._waiting and self.num_running < self.parallel + self.ahead:
            ticket = min(self._waiting, key=self._order)
            self._waiting.remove(ticket)
            self.num_running += ticket.cost
            self._per_client[ticket.client] += ticket.cost
            self._grants += 1
            self._served.pop(ticket.client, None)
            self._served[ticket.client] = self._grants
            if len(self._served) > MAX_CLIENTS:
                del self._served[next(iter(self._served))]
            ticket.grant()

    def _order(self, ticket: Ticket) -> tuple[float, ...]:
        return (
            ticket.priority,
            self._per_client[ticket.client],
            self._served.get(ticket.client, 0),
            ticket.deadline if ticket.deadline is not None else float("inf"),
            ticket.number,
        )

    def leave(self, ticket: Ticket) -> None:
        """Give a place back, granted or not."""
        self.num_reserved -= not ticket.is_part
        if ticket.is_granted:
            self.num_running -= ticket.cost
            self._per_client[ticket.client] -= ticket.cost
            if self._per_client[ticket.client] <= 0:
                del self._per_client[ticket.client]
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        self._grant()
