"""What every backend keeps: its events, and its turns, each of which ends in exactly one `Done` or `Failed`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.errors import LocalLLMError
from localllm.interface import ChatEvent, Done, Failed
from localllm.request import FinishReason, Message, SamplingParams, Timing, Usage


@dataclass(frozen=True, slots=True)
class Turn:
    """What was asked."""

    id: int
    messages: list[Message]
    params: SamplingParams | None
    template: Mapping[str, Any]


class Turns:
    """Turns are numbered from 0; `_running` holds what can end each of them, once there is something."""

    def __init__(self) -> None:
        self._events: deque[ChatEvent] = deque()
        self._lock = threading.Condition()
        self._queue: deque[Turn] = deque()
        self._running: dict[int, Any] = {}
        self._stopped: set[int] = set()
        self._next_turn = 0

    def events(self) -> deque[ChatEvent]:
        return self._events

    def tell(self, event: ChatEvent) -> None:
        """Put an event into the queue that the interface drains."""
        self._events.append(event)

    def send(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> int:
        with self._lock:
            turn, self._next_turn = self._next_turn, self._next_turn + 1
            self._running[turn] = None
            self._accept(Turn(turn, list(messages), params, template or {}))
        return turn

    def _accept(self, turn: Turn) -> None:
        """Begin or queue a turn. Called under the lock."""
        self._queue.append(turn)
        self._lock.notify()

    def _queued(self, has_ended: Callable[[], bool]) -> Iterator[Turn]:
        """The turns that were queued, in order, as they come; whoever changes what ends this notifies `_lock`."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or has_ended())
                if has_ended():
                    return
                turn = self._queue.popleft()
            yield turn

    def _end(self, turn: int, event: Done | Failed | None = None) -> None:
        """Tell of the end of a turn, unless that was done; without an event it was stopped."""
        with self._lock:
            if self._running.pop(turn, self) is self:
                return
            self._stopped.discard(turn)
        self.tell(event or Done(turn, FinishReason.ABORT, Usage(), Timing()))

    def _fail(self, turn: int, error: LocalLLMError) -> None:
        self._end(turn, Failed.of(turn, error))
