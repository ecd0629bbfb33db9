"""`ChatBackend` in process: one `LLM`, loaded in a thread of its own, its pieces turned into `ChatEvent`s.

Importing this loads no torch; `start` does, in its thread. A turn sent before the model is ready waits for it; a turn
ends in exactly one `Done` or `Failed`, also when loading fails or the backend closes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from localllm.config import EngineOptions
from localllm.errors import Aborted, InternalError, LocalLLMError
from localllm.interface import ChatEvent, Check, Delta, Done, Facts, Failed, ModelChoice, Prefill
from localllm.llm.outputs import OutputDelta, ResponseStream
from localllm.request import Constraint, FinishReason, LoadProgress, Message, SamplingParams, Timing, Usage

if TYPE_CHECKING:
    from localllm.llm.llm import LLM

log = logging.getLogger(__name__)
_KINDS: dict[str, Literal["content", "reasoning", "tool_call"]] = {"reasoning": "reasoning", "tool_call": "tool_call"}


@dataclass(slots=True)
class _Queued:
    turn: int
    messages: list[Message]
    params: SamplingParams | None
    template: Mapping[str, Any]


class InProcessBackend:
    """See `interface.ChatBackend`.

    default_params   how turns without parameters are sampled; None: what the model's files recommend
    completes        a base model, which has no chat template, continues the messages' text instead of refusing it
    constraint       what every answer's content must be
    settings         fields of `EngineOptions` that differ from `options`
    """

    def __init__(
        self,
        default_params: Callable[[LLM], SamplingParams] | None = None,
        *,
        completes: bool = False,
        constraint: Constraint | None = None,
        offline: bool = False,
        options: EngineOptions | None = None,
        **settings: Any,
    ) -> None:
        self._completes = completes
        self._constraint = constraint
        self._events: deque[ChatEvent] = deque()
        self._offline = offline
        self._options = replace(options or EngineOptions(), **settings)
        self._default_params = default_params
        self._llm: LLM | None = None
        self._lock = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._running: dict[int, ResponseStream | None] = {}
        self._stopped: set[int] = set()
        self._next_turn = 0
        self._takes_turns = False
        self._failure: Failed | None = None
        """why the model did not load"""
        self._stop = threading.Event()
        """ends the present thread, also while it loads"""
        self._thread: threading.Thread | None = None
        self._meter: Any = None

    def start(self, model: str | None, changes: Mapping[str, Any] | None = None) -> None:
        """Load in a thread; phases arrive as events. A second start replaces the first model, whose turns end."""
        self._stop.set()
        with self._lock:
            self._queue.clear()
            doomed, before = list(self._running), self._thread
            self._stop = stop = threading.Event()
            self._takes_turns, self._failure = True, None
            self._lock.notify()

        def work() -> None:
            if before is not None:
                before.join()
            for turn in doomed:
                self._end(turn, Done(turn, FinishReason.ABORT, Usage(), Timing()))
            if not stop.is_set():
                self._work(model, changes or {}, stop)

        self._thread = threading.Thread(target=work, name="backend", daemon=True)
        self._thread.start()

    def send(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> int:
        with self._lock:
            turn = self._next_turn
            self._next_turn += 1
            self._queue.append(_Queued(turn, list(messages), params, template or {}))
            self._running[turn] = None
            takes = self._takes_turns
            self._lock.notify()
        if not takes:
            self._drop_queue(self._failure or Failed(-1, "E601", "no model is loaded", "choose a model"))
        return turn

    def stop(self, turn: int) -> None:
        with self._lock:
            if turn not in self._running:
                return
            running = self._running[turn]
            self._stopped.add(turn)
        if running is not None:
            running.abort()

    def rest(self) -> None:
        """No kernels are timed any more while nobody asks."""
        llm = self._llm
        if llm is not None:
            with contextlib.suppress(LocalLLMError, AttributeError):  # closed a moment ago
                llm.stop_tuning()

    def events(self) -> deque[ChatEvent]:
        return self._events

    def facts(self) -> Facts:
        """What is running; empty before the model is ready."""
        llm = self._llm
        if llm is None:
            return Facts()
        try:
            state = llm.state()
        except (LocalLLMError, AttributeError):  # closed a moment ago, in the backend's thread
            return Facts()
        return replace(state, held_bytes=self._held(state.device), power_w=self._watts(state.device))

    @property
    def llm(self) -> LLM | None:
        """The model, while one is ready: for an endpoint beside the chat."""
        return self._llm

    def _held(self, device: str) -> int:
        if device.startswith("cuda"):
            import torch

            return int(torch.cuda.memory_reserved(device))
        from localllm.device.live import resident_bytes

        return resident_bytes()

    def _watts(self, device: str) -> float:
        if not device.startswith("cuda"):
            return 0.0
        if self._meter is None:
            from localllm.device.live import PowerMeter

            self._meter = PowerMeter(int(device.partition(":")[2] or 0))
        return float(self._meter.watts())

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, by the model's own tokenizer once it is there."""
        llm = self._llm
        return len(llm.tokenizer.encode(text)) if llm is not None else -(-len(text) // 4)

    def choices(self, ctx: int | None = None) -> list[ModelChoice]:
        from localllm.plan.choices import model_choices
        from localllm.plan.planner import Planner

        return model_choices(Planner.here(self._options if ctx is None else replace(self._options, ctx=ctx)))

    def checks(self) -> list[Check]:
        from localllm.doctor import run_checks

        return run_checks()

    def close(self) -> None:
        self._end_thread()

    def _end_thread(self) -> None:
        self._stop.set()
        with self._lock:
            self._lock.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    # --- the backend's thread ----------------------------------------------------------------------------------------

    def _work(self, model: str | None, changes: Mapping[str, Any], stop: threading.Event) -> None:
        try:
            self._options = replace(self._options, **changes)
            llm = self._load(model, stop)
        except LocalLLMError as error:
            self._fail_all(error, stop)
            return
        except Exception as error:
            log.exception("loading failed")
            self._fail_all(InternalError(f"loading failed: {type(error).__name__}", "see the log"), stop)
            return
        try:
            while True:
                with self._lock:
                    while not self._queue and not stop.is_set():
                        self._lock.wait()
                    if stop.is_set():
                        break
                    queued = self._queue.popleft()
                self._answer(llm, queued)
        finally:
            self._llm = None
            llm.close()
            if stop is self._stop:  # else another model takes over, and ends what this one left
                self._drop_queue(None)

    def _load(self, model: str | None, stop: threading.Event) -> LLM:
        from localllm import hub
        from localllm.llm.llm import LLM

        name = model or default_model(self._options)
        held: list[LoadProgress] = []  # "ready" is told when facts() knows the model, not before

        def on_progress(phase: LoadProgress) -> None:
            (held if phase.name == "ready" else self._events).append(phase)

        self._llm = LLM(name, self._options, offline=self._offline, on_progress=on_progress, cancel=stop)
        gc.freeze()  # torch and the model's facts stay: looking through them stops every thread for 75 ms at a time
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
            prompt = self._encode(llm, queued)
            self._events.append(Prefill(turn, 0, len(prompt)))
            bound = self._constraint
            running = llm.submit(
                prompt,
                params,
                splits_reasoning=True,
                spec=None if bound is None else llm.output_spec(prompt, chat=True, constraint=bound),
                listener=lambda piece: self._publish(turn, piece),
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

    def _encode(self, llm: LLM, queued: _Queued) -> list[int]:
        messages = queued.messages
        if self._completes and not llm.has_chat_template:
            return llm.encode_prompt("\n\n".join(m.get("content", "") for m in messages))
        goes_on = messages[-1].get("role") == "assistant"
        return llm.encode_chat(messages, None, queued.template, continue_final=goes_on)

    def _publish(self, turn: int, piece: OutputDelta) -> None:
        """Called in the engine's thread."""
        if piece.prefill is not None:
            self._events.append(Prefill(turn, *piece.prefill))
        tokens = len(piece.token_ids)
        for kind, text in piece.parts:
            self._events.append(Delta(turn, _KINDS.get(kind, "content"), text, tokens))
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

    def _fail_all(self, error: LocalLLMError, stop: threading.Event) -> None:
        if stop is not self._stop:
            return  # nobody waits for this model any more
        self._failure = _failed(-1, error)
        if not isinstance(error, Aborted) or not stop.is_set():
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


def default_model(options: EngineOptions) -> str:
    """The model a chat without a name gets: used last, else the largest here that runs well, else the starter."""
    from localllm import hub
    from localllm.plan.planner import Planner

    planner = Planner.here(options)
    return hub.default_model(lambda local: planner.runs(local.facts))
