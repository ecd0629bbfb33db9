"""Publishes the events of a step to the streams of their requests, with one terminal event per answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue

from localllm.errors import LocalLLMError
from localllm.request import FinishReason, Request, TokenEvent, Usage

from .metrics import PACE_SHARE, PACE_TOKENS, timing_of
from .scheduler import Scheduler
from .sequence import Sequence

log = logging.getLogger(__name__)

Listener = Callable[[TokenEvent], None]

GATHER_S = 0.05  # polling interval of `gathered`
UNREAD_PIECES = 2  # unread pieces of scores after which a request pauses


def _nothing(request_id: str) -> None:
    """Abort a request that has ended."""


class RequestStream:
    """The events of one request, in order. Iteration ends after the terminal event of its last answer.

    abort     called with the request id to abort it
    listener  receives the events in the engine's thread, instead of the queue
    """

    def __init__(self, request: Request, abort: Callable[[str], None], listener: Listener | None = None) -> None:
        self.request = request
        self._abort = abort
        self._listener = listener
        self._events: SimpleQueue[TokenEvent] = SimpleQueue()
        self._ended = threading.Event()
        self.submit_time = time.monotonic()
        self.num_unread_pieces = 0  # unread pieces of scores
        self._open = 1 if request.only_reads else request.params.n
        self._unread = self._open

    def put(self, event: TokenEvent) -> None:
        """Deliver an event; called in the engine's thread."""
        if event.finish_reason is not None:
            self._open -= 1
            if self._open <= 0:  # whoever keeps a stream that has ended keeps no engine, with its pages and weights
                self._abort = _nothing
        if event.scores is not None:
            self.num_unread_pieces += 1
        if self._listener is not None:
            self._listener(event)
        else:
            self._events.put(event)
            if self._open <= 0:
                self._ended.set()

    @property
    def num_open(self) -> int:
        """Number of answers without a terminal event so far."""
        return self._open

    @property
    def is_done(self) -> bool:
        """True once the terminal events of all answers are published."""
        return self._open <= 0

    def get(self, timeout: float | None = None) -> TokenEvent | None:
        """The next event; None after `timeout` seconds."""
        try:
            event = self._events.get(timeout=timeout)
        except Empty:
            return None
        self.num_unread_pieces -= event.scores is not None
        return event

    def __iter__(self) -> Iterator[TokenEvent]:
        while self._unread > 0:
            event = self.get()
            assert event is not None
            if event.finish_reason is not None:
                self._unread -= 1
            yield event

    def gathered(self) -> Iterator[TokenEvent]:
        """Iterate in batches, for a reader that only needs the complete answer.

        A reader that wakes up for every token would take a core from the running step.
        """
        while self._unread > 0:
            self._ended.wait(GATHER_S)
            while (event := self.get(timeout=0)) is not None:
                self._unread -= event.finish_reason is not None
                yield event

    def abort(self) -> None:
        self._abort(self.request.request_id)


class Publisher:
    """The streams of all requests in progress, and the events queued until the end of the step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._events: list[TokenEvent] = []
        self.streams: dict[str, RequestStream] = {}
        self.fastest_tps = 0.0

    def add(self, event: TokenEvent) -> None:
        self._events.append(event)

    def finish(self, sequence: Sequence, reason: FinishReason, event: TokenEvent | None = None) -> None:
        """Queue the terminal events of a sequence and its unforked children, and remove it from the scheduler."""
        event = event or TokenEvent(sequence.request.request_id, sequence.index)
        event.finish_reason, event.stop_reason = reason, sequence.stop_reason
        if sequence.stop_check is not None:
            event.text = sequence.stop_check.take(last=True)
        event.usage = Usage(sequence.num_prompt_tokens, sequence.num_cached_tokens, sequence.num_output_tokens)
        event.timing = timing_of(sequence)
        own = sequence.num_output_tokens - sequence.num_accepted_tokens  # without accepted draft tokens
        if sequence.num_output_tokens >= PACE_TOKENS and own >= PACE_SHARE * sequence.num_output_tokens:
            self.fastest_tps = max(self.fastest_tps, event.timing.decode_tps * own / sequence.num_output_tokens)
        forks, sequence.pending_forks = sequence.pending_forks, 0
        self.add(event)
        for index in range(1, forks + 1):
            self.add(replace(event, index=index, token_ids=[], text=None))
        self._scheduler.remove(sequence)  # last, since an exception here stops the engine

    def fail(self, sequence: Sequence, error: LocalLLMError) -> None:
        if sequence.finish_reason is FinishReason.ERROR:
            return
        sequence.finish_reason = FinishReason.ERROR
        self.finish(sequence, FinishReason.ERROR, TokenEvent(sequence.request.request_id, sequence.index, error=error))

    def refuse(self, stream: RequestStream, error: LocalLLMError) -> None:
        """End every answer of a request that has no sequence."""
        for index in range(stream.num_open):
            self.add(TokenEvent(stream.request.request_id, index, finish_reason=FinishReason.ERROR, error=error))

    def abort(self, request_id: str) -> None:
        for sequence in [s for s in self._scheduler.sequences() if s.request.request_id == request_id]:
            self.finish(sequence, FinishReason.ABORT)

    def publish(self) -> None:
        for event in self._events:  # may grow during the loop, if a listener fails
            stream = self.streams.get(event.request_id)
            if stream is None:
                continue
            try:
                stream.put(event)
            except Exception:  # a failing listener ends only its own request
                log.exception("a listener failed")
                self.abort(event.request_id)
            if stream.is_done:
                self.streams.pop(event.request_id, None)
                for image in stream.request.images:  # memory of the GPU that no plan counts twice
                    image.vectors = None
        self._events.clear()

    def hold_back_readers(self) -> None:
        """Pause score requests whose reader is behind, because a piece can be 64 MB."""
        for sequence in self._scheduler.running:
            if sequence.request.score:
                stream = self.streams.get(sequence.request.request_id)
                sequence.is_paused = stream is not None and stream.num_unread_pieces > UNREAD_PIECES
