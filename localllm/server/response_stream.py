"""Turns seen from the event loop: pieces arrive once per step, wait for a slow reader merged, and end exactly once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.requests import Request

from localllm.llm.outputs import OutputDelta, RequestOutput, ResponseStream
from localllm.request import FinishReason

from .errors import ClientLeft

log = logging.getLogger(__name__)

MAX_PENDING = 64
"""pieces that wait for their reader before new ones are merged into them"""


class Meter(Protocol):
    """What counts pieces (`metrics.TurnMeter`)."""

    def take(self, piece: OutputDelta) -> None:
        """Called in the engine's thread for every piece, read or not"""
        ...


class Post:
    """What an engine's thread gives the pieces of one turn to: counts them, and sends them to the event loop.

    streams  each at once; else all of an answer when it has ended
    """

    def __init__(self, mailbox: Mailbox, turn: AsyncTurn, meter: Meter | None, *, streams: bool) -> None:
        self._mailbox, self._turn, self._meter, self._streams = mailbox, turn, meter, streams
        self._held: list[OutputDelta] = []

    def __call__(self, piece: OutputDelta) -> None:
        """One piece."""
        if self._meter is not None:
            self._meter.take(piece)
        if self._streams:
            self._mailbox.put(self._turn, [piece])
            return
        keep(self._held, piece)
        if piece.finish_reason is not None:
            self._mailbox.put(self._turn, self._held)
            self._held = []


class Mailbox:
    """Pieces from engine threads to one event loop, which is woken once however many there are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[AsyncTurn, list[OutputDelta]]] = deque()
        self._is_due = False

    def put(self, turn: AsyncTurn, pieces: list[OutputDelta]) -> None:
        """Called in an engine's thread."""
        self._items.append((turn, pieces))
        if not self._is_due and not self._loop.is_closed():
            self._is_due = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_due = False  # before the queue is looked at: a piece that comes later wakes us again
        for _ in range(len(self._items)):  # not until it is empty: a quick engine would never let it be
            turn, pieces = self._items.popleft()
            try:
                for piece in pieces:
                    turn.take(piece)
            except Exception:
                log.exception("a piece could not be delivered")


class AsyncTurn:
    """One request in flight.

    num_answers  how many answers it has
    on_end       called once, when its last answer has ended, read or not
    """

    def __init__(self, num_answers: int, on_end: Callable[[AsyncTurn], None]) -> None:
        self.num_answers = num_answers
        self.prompt_token_ids: Sequence[int] = ()
        self.is_late = False
        """ended by its deadline"""
        self._on_end = on_end
        self._turn: ResponseStream | None = None
        self._open = num_answers
        self._unread = num_answers
        self._pending: list[OutputDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._abandoned = False
        self._timer: asyncio.TimerHandle | None = None

    def started(self, turn: ResponseStream, deadline: float | None = None) -> None:
        """The engine has taken it. `deadline` on the monotonic clock: then it ends with what it has."""
        self._turn = turn
        self.prompt_token_ids = turn.prompt_token_ids
        if self._abandoned:
            turn.abort()
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left, self._on_deadline)

    def take(self, piece: OutputDelta) -> None:
        """A piece, in the event loop."""
        if piece.finish_reason is not None:
            self._open -= 1
            if self.is_late and piece.finish_reason is FinishReason.ABORT:
                piece.finish_reason, piece.stop_reason = FinishReason.LENGTH, "deadline"
        if not self._abandoned:
            keep(self._pending, piece)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        if self._open == 0:
            self._open = -1
            if self._timer is not None:
                self._timer.cancel()
            self._on_end(self)

    async def ready(self) -> None:
        """Wait until there is a piece. Raises the error of an answer that failed before it had any."""
        while not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        first = self._pending[0]
        if first.error is not None:
            self.abort()
            raise first.error

    async def batches(self) -> AsyncIterator[list[OutputDelta]]:
        """All pieces, as many at a time as there are; leaving early ends the request."""
        try:
            while self._unread > 0:
                while not self._pending:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
                pieces, self._pending = self._pending, []
                self._unread -= sum(piece.finish_reason is not None for piece in pieces)
                yield pieces
        finally:
            self.abort()

    async def answer(self) -> RequestOutput:
        """Everything at once. Raises the error that ended it."""
        answer = RequestOutput(list(self.prompt_token_ids), self.num_answers)
        async for pieces in self.batches():
            for piece in pieces:
                answer.take(piece)
        return answer

    def abort(self) -> None:
        """End it now if it has not ended; nobody reads it any more."""
        self._abandoned = True
        self._pending.clear()
        if self._turn is not None and self._open > 0:
            self._turn.abort()

    def cut(self, why: str) -> None:
        """End it now with what it has; its reader gets a regular end."""
        self.is_late = True
        if self._turn is not None and self._open > 0:
            log.info("an answer was cut: %s", why)
            self._turn.abort()

    def _on_deadline(self) -> None:
        self.cut("its deadline passed")


def keep(pending: list[OutputDelta], piece: OutputDelta) -> None:
    """Add a piece to those that wait; when there are many, to the last of the same answer."""
    if len(pending) >= MAX_PENDING:
        for other in reversed(pending):
            if other.index == piece.index:
                merge(other, piece)
                return
    pending.append(piece)


def merge(first: OutputDelta, later: OutputDelta) -> None:
    """Add what came later to a piece of the same answer."""
    for kind, text in later.parts:
        if first.parts and first.parts[-1][0] == kind and kind != "tool_call":
            first.parts[-1] = (kind, first.parts[-1][1] + text)
        else:
            first.parts.append((kind, text))
    first.token_ids = [*first.token_ids, *later.token_ids]
    first.logprobs = [*first.logprobs, *later.logprobs]
    for name in ("finish_reason", "stop_reason", "prefill", "prompt_logprobs", "usage", "timing", "error"):
        if (value := getattr(later, name)) is not None:
            setattr(first, name, value)


@asynccontextmanager
async def unless_left(request: Request) -> AsyncIterator[None]:
    """The block ends with ClientLeft when the client leaves first. Not to be used while the body is still read."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
        raise ClientLeft from None
    finally:
        watcher.cancel()
