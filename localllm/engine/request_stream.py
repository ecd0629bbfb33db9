"""`RequestStream`: the events of one request, from the engine's thread to whoever reads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from localllm.request import Request, TokenEvent

Listener = Callable[[TokenEvent], None]

GATHER_S = 0.05  # between two looks of a reader who waits for the end


class RequestStream:
    """The events of one request, in order. Iterating ends after the terminal event of its last answer.

    abort     called with the request's id to end it
    listener  takes the events, in the engine's thread, instead of the queue
    """

    def __init__(self, request: Request, abort: Callable[[str], None], listener: Listener | None = None) -> None:
        self.request = request
        self._abort = abort
        self._listener = listener
        self._events: SimpleQueue[TokenEvent] = SimpleQueue()
        self._ended = threading.Event()
        self.submit_time = time.monotonic()
        self.num_unread_pieces = 0  # pieces of scores that wait for the reader
        self._open = 1 if request.only_reads else request.params.n
        self._unread = self._open

    def put(self, event: TokenEvent) -> None:
        """Called by the engine's thread."""
        if event.finish_reason is not None:
            self._open -= 1
        if event.scores is not None:
            self.num_unread_pieces += 1
        if self._listener is not None:
            self._listener(event)
        else:
            self._events.put(event)
            if self._open <= 0:
                self._ended.set()

    @property
    def is_done(self) -> bool:
        """Whether every answer had its terminal event published."""
        return self._open <= 0

    def get(self, timeout: float | None = None) -> TokenEvent | None:
        """The next event, or None after `timeout` seconds."""
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
        """The same for a reader who wants the whole: some events at a time, and the last ones at once. One that wakes
        for every token takes a core from the step that is being computed.
        """
        while self._unread > 0:
            self._ended.wait(GATHER_S)
            while (event := self.get(timeout=0)) is not None:
                self._unread -= event.finish_reason is not None
                yield event

    def abort(self) -> None:
        self._abort(self.request.request_id)
