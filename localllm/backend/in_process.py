"""`ChatBackend` in process: one `LLM`, loaded in its own thread, its output turned into `ChatEvent`s.

Importing this does not load torch; `start` does, in its thread. A turn sent before the model is ready waits for it; a
turn ends in exactly one `Done` or `Failed`, even when loading fails or the backend closes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm.errors import Aborted, InternalError, LocalLLMError
from localllm.interface import ChatBackend, Check, Delta, Done, Facts, Failed, ModelChoice, Prefill, Turn
from localllm.llm import local_models
from localllm.llm.loaded_model import EngineOptions
from localllm.request import Constraint, LoadProgress, SamplingParams, Timing, Usage, text_of

if TYPE_CHECKING:
    from localllm.llm.llm import LLM
    from localllm.llm.outputs import OutputDelta

log = logging.getLogger(__name__)


class InProcessBackend(ChatBackend):
    """See `interface.ChatBackend`.

    default_params   sampling of turns without parameters; None: as the model's files recommend
    completes        a base model, which has no chat template, continues the messages' text instead of refusing it
    constraint       the constraint on every answer
    on_loaded        called in the backend's thread with the name and the loaded model
    on_keep          closing waits until repacked weights are saved to disk, and calls this: with "" when saving takes
                     time (Ctrl+C skips it), or with the reason why they are not saved. None: closing does not wait
    settings         fields of `EngineOptions` that override `options`
    """

    def __init__(
        self,
        default_params: Callable[[LLM], SamplingParams] | None = None,
        *,
        completes: bool = False,
        constraint: Constraint | None = None,
        on_loaded: Callable[[str, LLM], None] = lambda name, llm: None,
        on_keep: Callable[[str], None] | None = None,
        offline: bool = False,
        options: EngineOptions | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._completes = completes
        self._constraint = constraint
        self._on_loaded, self._on_keep = on_loaded, on_keep
        self._offline = offline
        self._options = replace(options or EngineOptions(), **settings)
        self._default_params = default_params
        self.llm: LLM | None = None  # while ready; also used by the chat's endpoint
        self._keeping: LLM | None = None  # the model whose weights closing waits for
        self._takes_turns = False
        self._failure: Failed | None = None  # why the model failed to load
        self._stop = threading.Event()  # ends the current thread, even while it loads
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()  # set when that thread ends

    def start(self, model: str | None, changes: Mapping[str, Any] | None = None) -> None:
        """Load in a thread; phases arrive as events. A second start replaces the first model and ends its turns."""
        self._stop.set()
        with self._lock:
            self._queue.clear()
            doomed, before = list(self._running), self._thread
            self._stop = stop = threading.Event()
            self._takes_turns, self._failure = True, None
            self._lock.notify()

        self._ended = ended = threading.Event()

        def work() -> None:
            try:
                if before is not None:
                    before.join()
                for turn in doomed:
                    self._end(turn)
                self._work(model, changes or {}, stop)
            finally:
                ended.set()

        self._thread = threading.Thread(target=work, name="backend", daemon=True)
        self._thread.start()

    def _accept(self, turn: Turn) -> None:
        super()._accept(turn)
        if not self._takes_turns:
            self._drop_queue(self._failure or Failed(-1, "E601", "no model is loaded", "choose a model"))

    def stop(self, turn: int) -> None:
        with self._lock:
            if turn not in self._running:
                return
            running = self._running[turn]
            self._stopped.add(turn)
        if running is not None:
            running.abort()

    def rest(self) -> None:
        """Stop kernel timing in idle moments."""
        llm = self.llm
        if llm is not None:
            with contextlib.suppress(LocalLLMError, AttributeError):  # closed in the meantime
                llm.boot.stop_tuning()

    def facts(self) -> Facts:
        """The state of the running model; empty before it is ready."""
        llm = self.llm
        try:
            return Facts() if llm is None else llm.live_state()
        except (LocalLLMError, AttributeError):  # closed in the meantime, in the backend's thread
            return Facts()

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text, with the model's own tokenizer once it is loaded."""
        llm = self.llm
        return len(llm.tokenizer.encode(text)) if llm is not None else -(-len(text) // 4)

    def find(self, name: str) -> str:
        return local_models.find(self._options, name, offline=self._offline)

    def choices(self, ctx: int | None = None) -> list[ModelChoice]:
        return local_models.model_choices(self._options, ctx)

    def checks(self) -> list[Check]:
        from localllm.doctor import run_checks

        return run_checks()

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            self._lock.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            try:
                self._thread.join()
            except KeyboardInterrupt:
                if self._keeping is None:
                    raise
                self._keeping.keeps_weights = False
                self._ended.wait()  # in Python 3.11, an interrupted `join` marks the thread as ended
        self._thread = None

    # --- the backend's thread ----------------------------------------------------------------------------------------

    def _work(self, model: str | None, changes: Mapping[str, Any], stop: threading.Event) -> None:
        try:
            self._options = replace(self._options, **changes)  # kept even if another start has followed
            if stop.is_set():
                return
            llm = self._load(model, stop)
        except Exception as error:
            explained = _explained(error, "loading")
            if stop is self._stop:  # else another start has replaced this model
                self._failure = Failed.of(-1, explained)
                if not isinstance(explained, Aborted) or not stop.is_set():
                    self.tell(self._failure)
                self._drop_queue(self._failure)
            del explained  # its traceback holds this frame and the weights
            return
        try:
            for queued in self._queued(stop.is_set):
                self._answer(llm, queued)
        finally:
            self.llm = None
            llm.close()
            if stop is self._stop:  # else the next model ends the remaining turns
                self._drop_queue(None)

    def _load(self, model: str | None, stop: threading.Event) -> LLM:
        from localllm.llm.llm import LLM

        name = model or local_models.default_model(self._options)
        held: list[LoadProgress] = []  # "ready" is reported only once facts() knows the model

        def on_progress(phase: LoadProgress) -> None:
            if phase.name == "keep" and self._on_keep is not None:
                self._keeping = llm
                self._on_keep(phase.detail)
            else:
                (held if phase.name == "ready" else self._events).append(phase)

        llm = LLM(
            name, self._options, offline=self._offline, on_progress=on_progress, cancel=stop, owns_process=True,
            for_chat=not self._completes,
        )  # fmt: skip
        if stop.is_set():  # replaced while loading: it must not be seen as ready
            llm.close()
            raise Aborted("another start replaced this one")
        self.llm = llm
        llm.keeps_pace, llm.keeps_weights = True, self._on_keep is not None
        gc.freeze()  # torch and the model's facts stay: scanning them would stop every thread for 75 ms at a time
        local_models.remember_model(name, chats=llm.has_chat_template)
        self._on_loaded(name, self.llm)
        self._events.extend(held)
        return self.llm

    def _answer(self, llm: LLM, queued: Turn) -> None:
        turn = queued.id
        if turn in self._stopped:
            self._end(turn)
            return
        listener = partial(self._publish, turn)
        try:
            params = queued.params or (self._default_params(llm) if self._default_params else None)
            prompt = self._encode(llm, queued)
            self.tell(Prefill(turn, 0, len(prompt)))
            spec, bound = None, self._constraint
            if bound is not None or queued.tools is not None:
                spec = llm.output_rules.spec(prompt, chat=True, constraint=bound, tool_use=queued.tools)
            adapter = next(iter(llm.options.adapter_paths), "")  # a configured adapter is used
            running = llm.submit(prompt, params, splits_reasoning=True, spec=spec, listener=listener, adapter=adapter)
        except Exception as error:
            self._fail(turn, _explained(error, "the turn"))
            return
        with self._lock:
            if turn in self._running:
                self._running[turn] = running
            stopped = turn in self._stopped
        if stopped:
            running.abort()

    def _encode(self, llm: LLM, queued: Turn) -> list[int]:
        messages = queued.messages
        if self._completes and not llm.has_chat_template:
            return llm.encode_prompt("\n\n".join(text_of(m.get("content")) for m in messages))
        goes_on = messages[-1].get("role") == "assistant"
        tools = None if queued.tools is None else queued.tools.tools
        return llm.encode_chat(messages, tools, queued.template, continue_final=goes_on)

    def _publish(self, turn: int, delta: OutputDelta) -> None:
        """Called in the engine's thread."""
        if delta.prefill is not None:
            self.tell(Prefill(turn, *delta.prefill))
        tokens = len(delta.token_ids)
        for kind, text in delta.parts:
            self.tell(Delta(turn, kind, text, tokens))  # type: ignore[arg-type]
            tokens = 0
        if delta.error is not None:
            self._fail(turn, delta.error)
        elif delta.finish_reason is not None:
            self._end(turn, Done(turn, delta.finish_reason, delta.usage or Usage(), delta.timing or Timing()))

    def _drop_queue(self, failed: Failed | None) -> None:
        """End everything queued or running: with the failure, or as stopped."""
        with self._lock:
            self._takes_turns = False  # under the same lock: later turns are refused, present ones end below
            self._queue.clear()
            turns = list(self._running)
        for turn in turns:
            self._end(turn, None if failed is None else replace(failed, turn=turn))


def _explained(error: Exception, what: str) -> LocalLLMError:
    """Turn an exception into an error that can be shown to the user."""
    if isinstance(error, LocalLLMError):
        return error
    log.error("%s failed", what, exc_info=error)
    return InternalError(f"{what} failed: {type(error).__name__}", "see the log")
