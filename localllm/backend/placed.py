"""`ChatBackend` of a chat that shares: uses a server that has the model or can load it, else this process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from localllm.errors import LocalLLMError
from localllm.interface import ChatBackend, ChatEvent, Check, Facts, Failed, ModelChoice
from localllm.request import LoadProgress, Message, SamplingParams, ToolUse


class Place(NamedTuple):
    """A server that has or can load a model, as a backend."""

    backend: ChatBackend
    model: str  # the server's name for it
    url: str


class PlacedBackend(ChatBackend):
    """See `interface.ChatBackend`. Models are listed, found and checked as in this process.

    here    the engine in this process
    place   finds the server for a model; None: this process. May take a while
    stays   whether this chat must run its model itself
    """

    def __init__(self, here: ChatBackend, place: Callable[[str], Place | None]) -> None:
        super().__init__()
        self._here, self._place = here, place
        self.stays: Callable[[], bool] = lambda: False
        self.now: ChatBackend | None = here  # None while it is being decided
        self._start_no = 0  # number of the latest start; earlier ones give up
        self._one_at_a_time = threading.Lock()

    def start(self, model: str | None, changes: Mapping[str, Any] | None = None) -> None:
        """Close what is running, then decide and start in a thread. Changed load settings imply this process."""
        with self._lock:
            self._start_no += 1
            words = self._start_no, model, changes
            if changes:
                self.stays = lambda: True
            before, self.now = self.now, None
            doomed = list(self._running)
            if before is not None:  # its turns end, and numbers go on
                doomed, self._next_turn = list(before._running), before._next_turn
            self._queue.clear()
            self._running = dict.fromkeys(doomed)
            self._events.clear()
        work = threading.Thread(target=self._start, args=words, name="place", daemon=True)
        for turn in doomed:
            self._end(turn)
        self.tell(LoadProgress("resolve", detail=model or ""))
        if before is not None and before is not self._here:
            before.close()  # does not wait
        work.start()

    def _start(self, number: int, model: str | None, changes: Mapping[str, Any] | None) -> None:
        with self._one_at_a_time:
            if number != self._start_no:
                return
            self._here.close()
            self._here.events().clear()
            place = None
            try:
                place = self._place(model) if model and not self.stays() else None
            except LocalLLMError as error:
                with self._lock:
                    if number == self._start_no:
                        self._here.tell(Failed.of(-1, error))
                        self._hand_over(self._here, error)
                return
            with self._lock:
                if number != self._start_no:
                    return
                now = place.backend if place is not None else self._here
                if place is not None:
                    now.tell(LoadProgress("resolve", detail=f"using {place.model} at {place.url}"))
                now.start(place.model if place is not None else model, changes)
                self._hand_over(now)

    def _hand_over(self, to: ChatBackend, error: LocalLLMError | None = None) -> None:
        """Use `to` from now on: it gets the turns sent so far, which end with an error, and numbers go on. Called with
        the lock held.
        """
        with to._lock:
            to._next_turn = max(to._next_turn, self._next_turn)
            for turn in self._queue:
                to._running[turn.id] = self._running.pop(turn.id)
                if error is None:
                    to._accept(turn)
                else:
                    to._fail(turn.id, error)
        self._queue.clear()
        self.now = to

    def send(
        self, messages: Sequence[Message], params: SamplingParams | None = None,
        template: Mapping[str, Any] | None = None, tools: ToolUse | None = None,
    ) -> int:  # fmt: skip
        with self._lock:
            if self.now is None:
                return super().send(messages, params, template, tools)
            return self.now.send(messages, params, template, tools)

    def stop(self, turn: int) -> None:
        with self._lock:
            if self.now is None:
                self._queue = deque(one for one in self._queue if one.id != turn)
                self._end(turn)
            else:
                self.now.stop(turn)

    def rest(self) -> None:
        (self.now or self._here).rest()

    def events(self) -> deque[ChatEvent]:
        return self._events if self.now is None else self.now.events()

    def facts(self) -> Facts:
        return Facts() if self.now is None else self.now.facts()

    def count_tokens(self, text: str) -> int:
        return (self.now or self._here).count_tokens(text)

    def is_there(self) -> bool:
        return (self.now or self._here).is_there()

    def find(self, name: str) -> str:
        return self._here.find(name)

    def choices(self, ctx: int | None = None) -> list[ModelChoice]:
        return self._here.choices(ctx)

    def checks(self) -> list[Check]:
        return self._here.checks()

    def close(self) -> None:
        with self._lock:
            self._start_no += 1
            now, self.now = self.now, self._here
        if now is not None and now is not self._here:
            now.close()
        self._here.close()
