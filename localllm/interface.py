"""The interface between a user interface and the engine: `ChatBackend` and the plain values it returns. No torch."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.errors import LocalLLMError
from localllm.request import FinishReason, LoadProgress, Message, SamplingParams, Timing, ToolUse, Usage


@dataclass(frozen=True, slots=True)
class Prefill:
    """Progress of reading the prompt, in tokens."""

    turn: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer."""

    turn: int
    kind: Literal["content", "reasoning", "tool_call"]
    # for a tool_call, JSON: first {"index", "id", "name", "arguments": ""}, then {"index", "arguments": a piece}
    text: str
    num_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a turn."""

    turn: int
    stop: str
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a turn, or of loading (turn -1), by an error."""

    turn: int
    code: str
    message: str
    hint: str = ""
    fixes: tuple[tuple[str, str], ...] = ()
    why: str = ""
    context: Mapping[str, Any] = field(default_factory=dict)  # the values, for the JSON form
    param: str = ""  # the wrong field of the request

    @classmethod
    def of(cls, turn: int, error: LocalLLMError) -> Failed:
        about = error.code, error.message, error.hint, error.fixes, error.why, error.context, error.param or ""
        return cls(turn, *about)


ChatEvent = LoadProgress | Prefill | Delta | Done | Failed


@dataclass(frozen=True, slots=True)
class Facts:
    """The state of the running model: plain data for status lines and the engine panel."""

    model: str = ""
    run_summary: str = ""
    device: str = ""
    ctx: int = 0
    max_ctx: int = 0  # the largest window that would fit, up to the model's own; 0 when unknown
    used_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    page_size: int = 0  # tokens
    # one byte per page, or per n-th page of a large pool: 0 free, 1 held by the prefix tree only, 2 in use
    page_map: bytes = b""
    weight_bytes: int = 0
    kv_bytes: int = 0
    kv: str = ""  # how keys and values are stored
    plan_parts: tuple[tuple[str, int], ...] = ()  # (weights | kv | work | margin, planned bytes)
    have_bytes: int = 0  # available to the plan
    held_bytes: int = 0  # held now by the process (CPU), or its share of the device (GPU)
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed since the start, without those from the prefix tree
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # draft tokens that were verified
    num_accepted_tokens: int = 0  # draft tokens that were accepted
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    kv_store_bytes: int = 0  # pages on disk, for all models
    kv_store_limit: int = 0  # 0: no pages are kept on disk
    kv_store_read_tokens: int = 0
    decode_tps: float = 0.0  # expected for one sequence at the start of its context
    power_w: float = 0.0  # the GPU's power draw now; 0 when unknown
    url: str = ""  # the server that runs the model, unless it is this process
    pid: int = 0  # that server's process, when it is one of ours on this machine
    has_chat_template: bool = True
    image_tokens: int | None = None  # maximum tokens per image; 0: text only; None: unknown
    embeds: bool = False  # an embedding model, which generates no text
    # (name, value, who recommends it) of the default sampling parameters
    sampling: tuple[tuple[str, Any, str], ...] = ()
    times_kernels: bool = False  # idle, and timing tile sizes on the GPU
    warnings: tuple[str, ...] = ()

    @property
    def brief(self) -> str:
        """The run summary without kernels and profile."""
        line = self.run_summary.partition(" · matmuls ")[0]
        return line if line == self.run_summary or not self.url else f"{line} · via {self.url}"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A row of the model picker."""

    name: str
    format: str
    size_bytes: int
    local: bool
    supported: bool
    reason: str = ""
    max_ctx: int = 0
    fits: bool = True
    tps: float = 0.0
    basis: str = "estimate"
    note: str = ""
    ctx: int = 0  # context length it would get here
    params: int = 0
    active_params: int = 0  # weights read per token, when fewer than `params`
    license: str = ""
    chat: bool = True  # has a chat template
    need_bytes: int = 0
    have_bytes: int = 0
    parts: tuple[tuple[str, int], ...] = ()  # the terms of `need_bytes`
    last_used: float = 0.0  # seconds since the epoch
    path: str = ""
    quality: str = ""  # measured quality loss of its format
    quants: tuple[ModelChoice, ...] = ()  # the same model in other formats, smallest first
    recommended: bool = False  # the model to start with on this machine


@dataclass(frozen=True, slots=True)
class Check:
    """One line of doctor."""

    id: str
    group: str
    status: Literal["ok", "warn", "fail", "skip"]
    title: str
    detail: str = ""
    fix: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A queued question."""

    id: int
    messages: list[Message]
    params: SamplingParams | None
    template: Mapping[str, Any]
    tools: ToolUse | None = None


class ChatBackend(ABC):
    """Everything an interface knows about the engine: in process, over HTTP, or scripted. Nothing here blocks.

    Turns are numbered from 0, and each ends in exactly one `Done` or `Failed`. `_running` maps each turn to whatever
    can stop it, once that exists.
    """

    def __init__(self) -> None:
        self._events: deque[ChatEvent] = deque()
        self._lock = threading.Condition()
        self._queue: deque[Turn] = deque()
        self._running: dict[int, Any] = {}
        self._stopped: set[int] = set()
        self._next_turn = 0

    def is_there(self) -> bool:
        """Whether the engine still answers; may take seconds. Only a server can go away."""
        return True

    @abstractmethod
    def start(self, model: str | None, changes: Mapping[str, Any] | None = None) -> None:
        """Start loading and return at once; phases arrive as events, and `LoadProgress("ready")` ends them.

        A second start replaces the first model. `changes` are settings that change from now on: ctx, kv.
        """

    def send(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        template: Mapping[str, Any] | None = None,
        tools: ToolUse | None = None,
    ) -> int:
        """Queue a turn, even before the model is ready; returns its id.

        If the last message is the assistant's, the answer continues it. `template` goes to the chat template:
        enable_thinking, reasoning_effort. `tools` may be called; calls arrive as `Delta`s.
        """
        with self._lock:
            turn, self._next_turn = self._next_turn, self._next_turn + 1
            self._running[turn] = None
            self._accept(Turn(turn, list(messages), params, template or {}, tools))
        return turn

    @abstractmethod
    def stop(self, turn: int) -> None:
        """End a turn early; its `Done` has stop "abort"."""

    @abstractmethod
    def rest(self) -> None:
        """Stop background work done in idle moments (`Facts.times_kernels`)."""

    def events(self) -> deque[ChatEvent]:
        return self._events

    @abstractmethod
    def facts(self) -> Facts: ...

    @abstractmethod
    def find(self, name: str) -> str:
        """Resolve a name to the full name of a model to chat with. May take a while.

        Raises LocalLLMError when there is no such model, or when its files show that it cannot chat.
        """

    @abstractmethod
    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text; without a model, an estimate (a quarter of its characters). May take a while."""

    @abstractmethod
    def choices(self, ctx: int | None = None) -> list[ModelChoice]:
        """Rows of the model picker: local models, then downloads. May take a second.

        ctx   the window to judge them by; None leaves it to the plan
        """

    @abstractmethod
    def checks(self) -> list[Check]: ...

    @abstractmethod
    def close(self) -> None: ...

    # --- for implementations ------------------------------------------------------------------------------------------

    def tell(self, event: ChatEvent) -> None:
        """Queue an event for the interface."""
        self._events.append(event)

    def _accept(self, turn: Turn) -> None:
        """Start or queue a turn. Called with the lock held."""
        self._queue.append(turn)
        self._lock.notify()

    def _queued(self, has_ended: Callable[[], bool]) -> Iterator[Turn]:
        """Yield queued turns in order, as they arrive; whoever changes `has_ended` notifies `_lock`."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or has_ended())
                if has_ended():
                    return
                turn = self._queue.popleft()
            yield turn

    def _end(self, turn: int, event: Done | Failed | None = None) -> None:
        """Report the end of a turn, unless already reported; without an event, it was stopped."""
        with self._lock:
            if self._running.pop(turn, self) is self:
                return
            self._stopped.discard(turn)
        self.tell(event or Done(turn, FinishReason.ABORT, Usage(), Timing()))

    def _fail(self, turn: int, error: LocalLLMError) -> None:
        self._end(turn, Failed.of(turn, error))
