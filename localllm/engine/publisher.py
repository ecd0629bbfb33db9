"""From sequences to streams: which events a step has made, and the terminal event of every answer."""

from __future__ import annotations

import logging
from dataclasses import replace

from localllm.errors import LocalLLMError
from localllm.request import FinishReason, TokenEvent, Usage

from .metrics import timing_of, usage_of
from .request_stream import RequestStream
from .scheduler import Scheduler
from .sequence import Sequence

log = logging.getLogger(__name__)

UNREAD_PIECES = 2  # pieces of scores that may wait for their reader before the request pauses


class Publisher:
    """The streams of the requests under way, and the events that wait for the end of the step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._events: list[TokenEvent] = []
        self.streams: dict[str, RequestStream] = {}

    def add(self, event: TokenEvent) -> None:
        self._events.append(event)

    def finish(self, sequence: Sequence, reason: FinishReason, event: TokenEvent | None = None) -> None:
        """Take a sequence off and make its terminal event, and those of children it never split off."""
        self._scheduler.remove(sequence)
        event = event or TokenEvent(sequence.request.request_id, sequence.index)
        event.finish_reason, event.stop_reason = reason, sequence.stop_reason
        if sequence.stop_check is not None:
            event.text = sequence.stop_check.take(last=True)
        event.usage, event.timing = usage_of(sequence), timing_of(sequence)
        forks, sequence.pending_forks = sequence.pending_forks, 0
        self.add(event)
        for index in range(1, forks + 1):
            usage = replace(event.usage or Usage())
            self.add(replace(event, index=index, token_ids=[], text=None, usage=usage))

    def fail(self, sequence: Sequence, error: LocalLLMError) -> None:
        if sequence.finish_reason is FinishReason.ERROR:
            return
        sequence.finish_reason = FinishReason.ERROR
        self.finish(sequence, FinishReason.ERROR, TokenEvent(sequence.request.request_id, sequence.index, error=error))

    def abort(self, request_id: str) -> None:
        for sequence in [s for s in self._scheduler.sequences() if s.request.request_id == request_id]:
            self.finish(sequence, FinishReason.ABORT)

    def publish(self) -> None:
        for event in self._events:  # grows where a listener fails
            stream = self.streams.get(event.request_id)
            if stream is None:
                continue
            try:
                stream.put(event)
            except Exception:  # a listener's fault ends its own request
                log.exception("a listener failed")
                self.abort(event.request_id)
            if stream.is_done:
                self.streams.pop(event.request_id, None)
        self._events.clear()

    def hold_back_readers(self) -> None:
        """Pause score requests whose reader is behind: a piece can be 64 MB."""
        for sequence in self._scheduler.running:
            if sequence.request.score:
                stream = self.streams.get(sequence.request.request_id)
                sequence.is_paused = stream is not None and stream.num_unread_pieces > UNREAD_PIECES
