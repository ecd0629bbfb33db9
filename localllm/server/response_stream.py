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
Numbered = tuple[int, OutputDelta]  # with the number of the prompt that it answers


class Mailbox:
    """Deltas from engine threads to one event loop, which is woken once however many there are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[AsyncResponseStream, list[Numbered]]] = deque()
        self._is_due = False

    def put(self, stream: AsyncResponseStream, deltas: list[Numbered]) -> None:
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
                for number, delta in deltas:
                    stream.take(number, delta)
            except Exception:
                log.exception("a delta could not be delivered")


class AsyncResponseStream:
    """The answers to all prompts of one request, being made."""

    def __init__(
        self, mailbox: Mailbox, num_answers: int, on_end: Callable[[AsyncResponseStream], None], *, streams: bool
    ) -> None:
        """`on_end` is called once, when all have ended, read or not; without `streams` deltas come when theirs has."""
        self.num_answers = num_answers  # to each prompt
        self.prompts: list[Sequence[int]] = []  # the token ids of those that the engine has taken
        self._cut_by = ""  # what ended it before its time: deadline | shutdown
        self._mailbox, self._on_end, self._streams = mailbox, on_end, streams
        self._requests: list[ResponseStream] = []
        self._open = self._unread = 0
        self._pending: list[Numbered] = []
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

    def listener(self, count: Callable[[OutputDelta], None]) -> Callable[[OutputDelta], None]:
        """What the engine's thread gives the deltas of the next prompt to. `count` is told of each, read or not."""
        number = len(self._requests)
        held: list[Numbered] = []

        def tell(delta: OutputDelta) -> None:
            count(delta)
            if self._streams:
                self._mailbox.put(self, [(number, delta)])
                return
            keep(held, number, delta)
            if delta.finish_reason is not None:
                self._mailbox.put(self, held.copy())
                held.clear()

        return tell

    def started(self, request: ResponseStream) -> None:
        """The engine has taken the next prompt."""
        self._requests.append(request)
        self.prompts.append(request.prompt_token_ids)
        self._open += self.num_answers
        self._unread += self.num_answers

    def end_at(self, deadline: float) -> None:
        """End with what there is at this time, on the monotonic clock."""
        left = max(0.0, deadline - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left, self.cut, "deadline")

    def take(self, number: int, delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            self._open -= 1
            if self._cut_by and delta.finish_reason is FinishReason.ABORT:
                delta.finish_reason, delta.stop_reason = FinishReason.LENGTH, self._cut_by
        if not self._abandoned:
            keep(self._pending, number, delta)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        if self._open == 0 and delta.finish_reason is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._on_end(self)

    async def ready(self) -> None:
        """Wait until there is a delta. Raises the error of an answer that failed before it had any."""
        await self._arrival()
        if (error := self._pending[0][1].error) is not None:
            raise error

    async def batches(self) -> AsyncIterator[list[Numbered]]:
        """All deltas, as many at a time as there are; leaving early ends the request."""
        try:
            while self._unread > 0:
                await self._arrival()
                deltas, self._pending = self._pending, []
                self._unread -= sum(delta.finish_reason is not None for _, delta in deltas)
                yield deltas
        finally:
            self.abort()

    async def _arrival(self) -> None:
        while not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def outputs(self) -> list[RequestOutput]:
        """The whole answers, one per prompt. Raises the error that ended one."""
        outputs = [RequestOutput(list(ids), self.num_answers) for ids in self.prompts]
        async for deltas in self.batches():
            for number, delta in deltas:
                outputs[number].take(delta)
        return outputs

    async def rendered(self, render: Callable[[int, OutputDelta], list[bytes]]) -> AsyncIterator[bytes]:
        """What `render` makes of every delta and the number of its prompt. Raises the error that ended an answer."""
        async for deltas in self.batches():
            chunks: list[bytes] = []
            for number, delta in deltas:
                if delta.error is not None:
                    raise delta.error
                chunks += render(number, delta)
            if chunks:
                yield b"".join(chunks)

    def abort(self) -> None:
        """End it now if it has not ended; nobody reads it any more."""
        self._abandoned = True
        self._pending.clear()
        self._stop()

    def cut(self, by: str) -> None:
        """End it now with what it has; its reader gets a regular end, with `by` as its stop reason."""
        self._cut_by = self._cut_by or by
        if not self.has_ended:
            log.info("cut a response short: %s", by)
            self._stop()

    def _stop(self) -> None:
        if not self.has_ended:
            for request in self._requests:
                request.abort()


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


def keep(pending: list[Numbered], number: int, delta: OutputDelta) -> None:
    """Add a delta to those that wait; when there are many, to the last of the same answer."""
    if len(pending) >= MAX_PENDING:
        for other_number, other in reversed(pending):
            if (other_number, other.index) == (number, delta.index):
                if delta.logprobs and other.parts and delta.parts and other.parts[-1][0] != delta.parts[0][0]:
                    break  # the log-probabilities of an answer are told from those of the reasoning before it
                merge(other, delta)
                return
    pending.append((number, delta))


def merge(first: OutputDelta, later: OutputDelta) -> None:
    """Add what came later to a delta of the same answer."""
    for kind, text in later.parts:
        if first.parts and first.parts[-1][0] == kind and kind != "tool_call":
            first.parts[-1] = (kind, first.parts[-1][1] + text)
        else:
            first.parts.append((kind, text))
    first.token_ids = [*first.token_ids, *later.token_ids]
    first.logprobs = [*first.logprobs, *later.logprobs]
    also = "finish_reason", "stop_reason", "prefill", "prompt_logprobs", "usage", "timing", "error", "cached_tokens"
    for name in also:
        if (value := getattr(later, name)) is not None:
            setattr(first, name, value)
