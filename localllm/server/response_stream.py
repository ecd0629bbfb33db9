"""Responses on the event loop: one delta per step, merged while the reader is slow, and exactly one end."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from localllm.errors import DeviceError
from localllm.llm.outputs import OutputDelta, RequestOutput, ResponseStream
from localllm.request import FinishReason

log = logging.getLogger(__name__)

MAX_PENDING = 64  # pending deltas before new ones are merged into them
Numbered = tuple[int, OutputDelta]  # a delta with the number of its prompt


class Mailbox:
    """Passes deltas from engine threads to one event loop, with a single wake-up for all that are waiting."""

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
        self._is_due = False  # before reading the queue: a delta that arrives later schedules another delivery
        for _ in range(len(self._items)):  # bounded: a fast engine could keep the queue from ever being empty
            stream, deltas = self._items.popleft()
            try:
                for number, delta in deltas:
                    stream.take(number, delta)
            except Exception:
                log.exception("a delta could not be delivered")


def _nothing(stream: AsyncResponseStream) -> None:
    """End a response that has ended."""


class AsyncResponseStream:
    """The running generation of one request: the responses to all its prompts."""

    def __init__(
        self, mailbox: Mailbox, num_answers: int, on_end: Callable[[AsyncResponseStream], None], *, streams: bool
    ) -> None:
        """`on_end` is called once, when all sequences have ended, read or not.

        Without `streams`, the deltas of a sequence are delivered together when it ends.
        """
        self.num_answers = num_answers  # per prompt
        self.prompts: list[Sequence[int]] = []  # token ids of the prompts submitted so far
        self._cut_by = ""  # what ended it early: deadline | shutdown
        self._mailbox, self._on_end, self._streams = mailbox, on_end, streams
        self._requests: list[ResponseStream] = []
        self._open = self._unread = 0
        self._pending: list[Numbered] = []
        self._waiter: asyncio.Future[None] | None = None
        self._abandoned = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_pending(self) -> int:
        """Number of deltas waiting for the reader."""
        return len(self._pending)

    @property
    def has_ended(self) -> bool:
        """Whether every sequence has ended, read or not."""
        return self._open <= 0

    def listener(self, count: Callable[[OutputDelta], None]) -> Callable[[OutputDelta], None]:
        """Return the listener for the next prompt's deltas, called in the engine's thread. `count` gets every delta."""
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
        """Register the next prompt after its submission to the engine."""
        self._requests.append(request)
        self.prompts.append(request.prompt_token_ids)
        self._open += self.num_answers
        self._unread += self.num_answers

    def end_at(self, deadline: float) -> None:
        """End the response with the text so far at this time on the monotonic clock."""
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
            on_end, self._on_end = self._on_end, _nothing  # it refers to what holds this object
            on_end(self)

    async def ready(self) -> None:
        """Wait for the first delta. Raises its error if the request failed before producing any text."""
        await self._arrival()
        if (error := self._pending[0][1].error) is not None:
            raise error

    async def batches(self) -> AsyncIterator[list[Numbered]]:
        """Yield all deltas in batches of what is available; leaving early aborts the request."""
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
        """Return the complete outputs, one per prompt. Raises the error that ended one."""
        outputs = [RequestOutput(list(ids), self.num_answers) for ids in self.prompts]
        async for deltas in self.batches():
            for number, delta in deltas:
                outputs[number].take(delta)
        return outputs

    async def rendered(self, render: Callable[[int, OutputDelta], list[bytes]]) -> AsyncIterator[bytes]:
        """Yield what `render(prompt number, delta)` makes of every delta. Raises the error that ended a sequence."""
        async for deltas in self.batches():
            chunks: list[bytes] = []
            for number, delta in deltas:
                if delta.error is not None:
                    raise delta.error
                chunks += render(number, delta)
            if chunks:
                yield b"".join(chunks)

    def abort(self) -> None:
        """Abort the request if it has not ended; its output is no longer read."""
        self._abandoned = True
        self._pending.clear()
        self._stop()

    def cut(self, by: str, wait_s: float | None = None) -> None:
        """End the request now with the text so far; the reader gets a regular end with `by` as the stop reason.

        wait_s   seconds after which it ends in an error if the engine has not ended it, because it hangs
        """
        self._cut_by = self._cut_by or by
        if not self.has_ended:
            log.info("cut a response short: %s", by)
            self._stop()
            if wait_s is not None:
                asyncio.get_running_loop().call_later(wait_s, self._give_up)

    def _give_up(self) -> None:
        """End all sequences with a single error; what the engine may tell later is not read."""
        if not self.has_ended:
            self._open = 1
            error = DeviceError("the engine did not end the request", "restart the server; its log shows the cause")
            self.take(0, OutputDelta(0, finish_reason=FinishReason.ERROR, error=error))

    def _stop(self) -> None:
        if not self.has_ended:
            for request in self._requests:
                request.abort()


class Blocks:
    """Splits the parts of a response into blocks: a new one begins when the kind of text or the tool call changes."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def read(self, kind: str, text: str) -> tuple[bool, dict[str, Any]]:
        """Return (whether a new block begins, the part: a call's delta or {"text": text})."""
        part: dict[str, Any] = json.loads(text) if kind == "tool_call" else {"text": text}
        block = (kind, part.get("index", -1))
        begins, self._last = block != self._last, block
        return begins, part


def keep(pending: list[Numbered], number: int, delta: OutputDelta) -> None:
    """Append a delta to the pending ones; when there are many, merge it into the last one of the same sequence."""
    if len(pending) >= MAX_PENDING:
        for other_number, other in reversed(pending):
            if (other_number, other.index) == (number, delta.index):
                if delta.logprobs and other.parts and delta.parts and other.parts[-1][0] != delta.parts[0][0]:
                    break  # keep the log-probabilities of the content apart from those of the reasoning before it
                merge(other, delta)
                return
    pending.append((number, delta))


def merge(first: OutputDelta, later: OutputDelta) -> None:
    """Merge a later delta into an earlier one of the same sequence."""
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
