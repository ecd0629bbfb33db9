"""`ChatBackend` in process: one `LLM`, loaded in a thread of its own, its pieces turned into `ChatEvent`s.

Importing this loads no torch; `start` does, in its thread. A turn sent before the model is ready waits for it; a turn
ends in exactly one `Done` or `Failed`, also when loading fails or the backend closes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localllm.answer import Piece, Turn
from localllm.errors import Aborted, InternalError, LocalLLMError
from localllm.request import (
    ChatEvent,
    Check,
    Delta,
    Done,
    Facts,
    Failed,
    FinishReason,
    Message,
    ModelChoice,
    Phase,
    Prefill,
    SamplingParams,
    Timing,
    Usage,
)

if TYPE_CHECKING:
    from localllm.llm import LLM

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Queued:
    turn: int
    messages: list[Message]
    params: SamplingParams | None


class InProcessBackend:
    """See `request.ChatBackend`.

    llm_options      passed on to `LLM`
    default_params   how turns without parameters are sampled; None: what the model's files recommend
    completes        a base model, which has no chat template, continues the messages' text instead of refusing it
    """

    def __init__(
        self,
        default_params: Callable[[LLM], SamplingParams] | None = None,
        *,
        completes: bool = False,
        **llm_options: Any,
    ) -> None:
        self._completes = completes
        self._events: deque[ChatEvent] = deque()
        self._options = llm_options
        self._default_params = default_params
        self._llm: LLM | None = None
        self._lock = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._running: dict[int, Turn | None] = {}
        self._stopped: set[int] = set()
        self._next_turn = 0
        self._closing = False
        self._takes_turns = False
        self._failure: Failed | None = None
        """why the model did not load"""
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, model: str | None) -> None:
        """Load in a thread; phases arrive as events. A second start replaces the first model."""
        self._end_thread()
        self._closing, self._cancel = False, threading.Event()
        self._takes_turns, self._failure = True, None
        self._thread = threading.Thread(target=self._work, args=(model,), name="backend", daemon=True)
        self._thread.start()

    def send(self, messages: Sequence[Message], params: SamplingParams | None = None) -> int:
        """Queue a turn."""
        with self._lock:
            turn = self._next_turn
            self._next_turn += 1
            self._queue.append(_Queued(turn, list(messages), params))
            self._running[turn] = None
            takes = self._takes_turns
            self._lock.notify()
        if not takes:
            self._drop_queue(self._failure or Failed(-1, "E601", "no model is loaded", "choose a model"))
        return turn

    def stop(self, turn: int) -> None:
        """End a turn, queued or running."""
        with self._lock:
            if turn not in self._running:
                return
            running = self._running[turn]
            self._stopped.add(turn)
        if running is not None:
            running.abort()

    def events(self) -> deque[ChatEvent]:
        """The queue to drain."""
        return self._events

    def facts(self) -> Facts:
        """What is running; empty before the model is ready."""
        return Facts() if self._llm is None else self._llm.state()

    def choices(self) -> list[ModelChoice]:
        """The models on this machine."""
        from localllm import hub

        return [
            ModelChoice(
                name=m.name,
                format=m.format,
                size_bytes=m.size_bytes,
                local=True,
                supported=m.supported,
                reason=m.reason or "",
                max_ctx=m.max_context,
            )  # fmt: skip
            for m in hub.list_local()
        ]

    def checks(self) -> list[Check]:
        """Doctor's quick checks."""
        from localllm.doctor import run_checks

        return run_checks()

    def close(self) -> None:
        """End everything and free the model."""
        self._end_thread()

    def _end_thread(self) -> None:
        self._cancel.set()
        with self._lock:
            self._closing = True
            self._lock.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    # --- the backend's thread ----------------------------------------------------------------------------------------

    def _work(self, model: str | None) -> None:
        try:
            llm = self._load(model)
        except LocalLLMError as error:
            self._fail_all(error)
            return
        except Exception as error:
            log.exception("loading failed")
            self._fail_all(InternalError(f"loading failed: {type(error).__name__}", "see the log"))
            return
        try:
            while True:
                with self._lock:
                    while not self._queue and not self._closing:
                        self._lock.wait()
                    if self._closing:
                        break
                    queued = self._queue.popleft()
                self._answer(llm, queued)
        finally:
            self._llm = None
            llm.close()
            self._drop_queue(None)

    def _load(self, model: str | None) -> LLM:
        from localllm import hub
        from localllm.llm import LLM

        name = model or default_model()
        held: list[Phase] = []  # "ready" is told when facts() knows the model, not before

        def on_phase(phase: Phase) -> None:
            (held if phase.name == "ready" else self._events).append(phase)

        self._llm = LLM(name, on_phase=on_phase, cancel=self._cancel, **self._options)
        hub.remember_model(name)
        self._events.extend(held)
        return self._llm

    def _answer(self, llm: LLM, queued: _Queued) -> None:
        turn = queued.turn
        if turn in self._stopped:
            self._end(turn, Done(turn, FinishReason.ABORT, Usage(), Timing()))
            return
        try:
            params = queued.params or (self._default_params(llm) if self._default_params else None)
            prompt = self._encode(llm, queued.messages)
            self._events.append(Prefill(turn, 0, len(prompt)))
            running = llm.submit(
                prompt, params, splits_reasoning=True, listener=lambda piece: self._publish(turn, piece)
            )
        except LocalLLMError as error:
            self._end(turn, _failed(turn, error))
            return
        except Exception as error:
            log.exception("a turn failed before it started")
            self._end(turn, _failed(turn, InternalError(f"the turn failed: {type(error).__name__}", "see the log")))
            return
        with self._lock:
            if turn in self._running:
                self._running[turn] = running
            stopped = turn in self._stopped
        if stopped:
            running.abort()

    def _encode(self, llm: LLM, messages: list[Message]) -> list[int]:
        if self._completes and not llm.has_chat_template:
            return llm.encode_prompt("\n\n".join(m.get("content", "") for m in messages))
        return llm.encode_chat(messages)

    def _publish(self, turn: int, piece: Piece) -> None:
        """Called in the engine's thread."""
        if piece.prefill is not None:
            self._events.append(Prefill(turn, *piece.prefill))
        tokens = len(piece.token_ids)
        for kind, text in piece.parts:
            self._events.append(Delta(turn, "reasoning" if kind == "reasoning" else "content", text, tokens))
            tokens = 0
        if piece.error is not None:
            self._end(turn, _failed(turn, piece.error))
        elif piece.finish_reason is not None:
            self._end(turn, Done(turn, piece.finish_reason, piece.usage or Usage(), piece.timing or Timing()))

    def _end(self, turn: int, event: Done | Failed) -> None:
        with self._lock:
            if self._running.pop(turn, self) is self:
                return  # it had its end
            self._stopped.discard(turn)
        self._events.append(event)

    def _fail_all(self, error: LocalLLMError) -> None:
        self._failure = _failed(-1, error)
        if not isinstance(error, Aborted) or not self._closing:
            self._events.append(self._failure)
        self._drop_queue(self._failure)

    def _drop_queue(self, failed: Failed | None) -> None:
        """End what is still queued or running: with the failure, or as stopped."""
        with self._lock:
            self._takes_turns = False  # under the same lock: what comes later is refused, what is here ends below
            self._queue.clear()
            turns = list(self._running)
        for turn in turns:
            if failed is None:
                self._end(turn, Done(turn, FinishReason.ABORT, Usage(), Timing()))
            else:
                self._end(turn, replace(failed, turn=turn))


def _failed(turn: int, error: LocalLLMError) -> Failed:
    return Failed(turn, error.code, error.message, error.hint, error.fixes, error.why, error.context)


def default_model() -> str:
    """The model a chat without a name gets: used last, else the largest here that runs well, else the starter."""
    from localllm import hub
    from localllm.device import machine
    from localllm.plan import runs_here

    here = machine()
    return hub.default_model(lambda local: runs_here(local.facts, here))
