"""Answers seen from the event loop: deltas come once per step, wait for a slow reader merged, and end exactly once."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from localllm.llm.outputs import OutputDelta, RequestOutput, ResponseStream
from localllm.request import FinishReason

log = logging.getLogger(__name__)

MAX_PENDING = 64  # deltas that wait for their reader before new ones are merged into them


class Listener:
    """What an engine's thread gives the deltas of one request to: counts them, and sends them to the event loop.

    count    called for every delta, read or not
    streams  each at once; else all of an answer when it has ended
    """

    def __init__(
        self, mailbox: Mailbox, stream: AsyncResponseStream, count: Callable[[OutputDelta], None], *, streams: bool
    ) -> None:
        self._mailbox, self._stream, self._count, self._streams = mailbox, stream, count, streams
        self._held: list[OutputDelta] = []

    def __call__(self, delta: OutputDelta) -> None:
        """Count one, and send it when it is time."""
        self._count(delta)
        if self._streams:
            self._mailbox.put(self._stream, [delta])
            return
        keep(self._held, delta)
        if delta.finish_reason is not None:
            self._mailbox.put(self._stream, self._held)
            self._held = []


class Mailbox:
    """Deltas from engine threads to one event loop, which is woken once however many there are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[AsyncResponseStream, list[OutputDelta]]] = deque()
        self._is_due = False

    def put(self, stream: AsyncResponseStream, deltas: list[OutputDelta]) -> None:
        """Called in an engine's thread."""
        self._items.append((stream, deltas))
        if not self._is_due and not self._loop.is_closed():
            self._is_due = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_due = False  # before the queue is looked at: a delta that comes later wakes us again
        for _ in range(len(self._items)):  # not until it is empty: a quick engine would never let it be
            stream, deltas = self._items.popleft()
            try:
                for delta in deltas:
                    stream.take(delta)
            except Exception:
                log.exception("a delta could not be delivered")


class AsyncResponseStream:
    """The answers to one prompt, being made.

    num_answers  how many there are
    on_end       called once, when the last of them has ended, read or not
    """

    def __init__(self, num_answers: int, on_end: Callable[[AsyncResponseStream], None]) -> None:
        self.num_answers = num_answers
        self.prompt_token_ids: Sequence[int] = ()
        self.is_late = False  # ended by its deadline
        self._on_end = on_end
        self._stream: ResponseStream | None = None
        self._open = self._unread = num_answers
        self._pending: list[OutputDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._abandoned = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_pending(self) -> int:
        """Deltas that wait for their reader."""
        return len(self._pending)

    @property
    def has_ended(self) -> bool:
        """Whether every answer has ended, read or not."""
        return self._open <= 0

    def started(self, stream: ResponseStream, deadline: float | None = None) -> None:
        """The engine has taken it. `deadline` on the monotonic clock: then it ends with what it has."""
        self._stream = stream
        self.prompt_token_ids = stream.prompt_token_ids
        if self._abandoned:
            stream.abort()
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left, self.cut, "its deadline passed")

    def take(self, delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            self._open -= 1
            if self.is_late and delta.finish_reason is FinishReason.ABORT:
                delta.finish_reason, delta.stop_reason = FinishReason.LENGTH, "deadline"
        if not self._abandoned:
            keep(self._pending, delta)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        if self._open == 0:
            self._open = -1
            if self._timer is not None:
                self._timer.cancel()
            self._on_end(self)

    async def ready(self) -> None:
        """Wait until there is a delta. Raises the error of an answer that failed before it had any."""
        await self._arrival()
        if (error := self._pending[0].error) is not None:
            raise error

    async def batches(self) -> AsyncIterator[list[OutputDelta]]:
        """All deltas, as many at a time as there are; leaving early ends the request."""
        try:
            while self._unread > 0:
                await self._arrival()
                deltas, self._pending = self._pending, []
                self._unread -= sum(delta.finish_reason is not None for delta in deltas)
                yield deltas
        finally:
            self.abort()

    async def _arrival(self) -> None:
        while not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def output(self) -> RequestOutput:
        """Everything at once. Raises the error that ended it."""
        output = RequestOutput(list(self.prompt_token_ids), self.num_answers)
        async for deltas in self.batches():
            for delta in deltas:
                output.take(delta)
        return output

    def abort(self) -> None:
        """End it now if it has not ended; nobody reads it any more."""
        self._abandoned = True
        self._pending.clear()
        if self._stream is not None and self._open > 0:
            self._stream.abort()

    def cut(self, why: str) -> None:
        """End it now with what it has; its reader gets a regular end."""
        self.is_late = True
        if self._stream is not None and self._open > 0:
            log.info("an answer was cut: %s", why)
            self._stream.abort()


async def merged(streams: Sequence[AsyncResponseStream]) -> AsyncIterator[tuple[int, list[OutputDelta]]]:
    """The deltas of several streams as they come, with the number of the stream. Raises the error that ended one."""
    if len(streams) == 1:
        async for deltas in streams[0].batches():
            yield 0, deltas
        return
    queue: asyncio.Queue[tuple[int, list[OutputDelta] | None]] = asyncio.Queue(maxsize=2 * len(streams))

    async def forward(number: int, stream: AsyncResponseStream) -> None:
        async for deltas in stream.batches():
            await queue.put((number, deltas))
        await queue.put((number, None))

    tasks = [asyncio.create_task(forward(i, stream)) for i, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            number, some = await queue.get()
            if some is None:
                num_open -= 1
            else:
                yield number, some
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def rendered(
    streams: Sequence[AsyncResponseStream], render: Callable[[int, OutputDelta], list[bytes]]
) -> AsyncIterator[bytes]:
    """What `render` makes of every delta and the number of its stream. Raises the error that ended an answer."""
    async for number, deltas in merged(streams):
        chunks: list[bytes] = []
        for delta in deltas:
            if delta.error is not None:
                raise delta.error
            chunks += render(number, delta)
        if chunks:
            yield b"".join(chunks)


class Blocks:
    """Which block of an answer a part belongs to: another begins when the kind of text changes, or the call."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def read(self, kind: str, text: str) -> tuple[bool, dict[str, Any]]:
        """(whether another block begins, the part: a call's delta or {"text": text})"""
        part: dict[str, Any] = json.loads(text) if kind == "tool_call" else {"text": text}
        block = (kind, part.get("index", -1))
        begins, self._last = block != self._last, block
        return begins, part


def keep(pending: list[OutputDelta], delta: OutputDelta) -> None:
    """Add a delta to those that wait; when there are many, to the last of the same answer."""
    if len(pending) >= MAX_PENDING:
        for other in reversed(pending):
            if other.index == delta.index:
                merge(other, delta)
                return
    pending.append(delta)


def merge(first: OutputDelta, later: OutputDelta) -> None:
    """Add what came later to a delta of the same answer."""
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
