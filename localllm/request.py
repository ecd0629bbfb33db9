"""Plain values that cross layers: what is asked, and what comes back. No torch, no text processing.

The engine takes a `Request` and publishes `TokenEvent`s; the façade turns these into `ChatEvent`s; an interface sees
nothing but a `ChatBackend`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, TypedDict


class Message(TypedDict, total=False):
    """One chat message, in the OpenAI shape. `role` and `content` are always there."""

    role: str
    content: str
    name: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer's content must be. `grammar` compiles it; the answer then cannot be anything else."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    value: Any = None
    """a JSON schema; None; a regular expression that matches the whole answer; Lark or GBNF text; a list of texts"""
    lenient: bool = False
    """a JSON schema's keywords that cannot be enforced are left out instead of refused"""
    param: str = "response_format"
    """the field of the request it came from, for errors"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools the model may call, and how."""

    tools: tuple[Mapping[str, Any], ...]
    """in the OpenAI shape: {"type": "function", "function": {"name", "description", "parameters"}}"""
    choice: str = "auto"
    """auto | none | required: the model decides, calls none, calls at least one of them"""
    only: tuple[str, ...] = ()
    """names that may be called; empty: all"""
    parallel: bool = True
    """several calls in one answer"""


class FinishReason(StrEnum):
    """Why a sequence ended. Every accepted request ends in exactly one of these."""

    STOP = "stop"
    """an end-of-turn token, a stop string or a stop token id"""
    LENGTH = "length"
    """max_tokens or the context window was reached"""
    ABORT = "abort"
    """the caller stopped it"""
    ERROR = "error"
    """it failed; the event carries the error"""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. `engine.limits.check_params` checks the ranges.

    Order of application: penalties and bias (repetition, presence, frequency, logit_bias, DRY), temperature,
    then the cuts top-k, top-p, min-p, typical-p and XTC, then one draw from what is left.
    """

    temperature: float = 1.0
    """0 is greedy; 0 to 100"""
    top_k: int = 0
    """0 or -1 is off"""
    top_p: float = 1.0
    """in (0, 1]"""
    min_p: float = 0.0
    """in [0, 1]"""
    typical_p: float = 1.0
    """in (0, 1]; 1 is off"""
    repetition_penalty: float = 1.0
    """over 0; over prompt and output"""
    presence_penalty: float = 0.0
    """-2 to 2, over the output"""
    frequency_penalty: float = 0.0
    """-2 to 2, over the output"""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """token id -> added to its logit, -100 to 100"""
    dry_multiplier: float = 0.0
    """0 is off: penalises a token that would lengthen a repetition"""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    """repetitions up to this length are free"""
    dry_breakers: tuple[int, ...] = ()
    """token ids that end a repetition"""
    xtc_probability: float = 0.0
    """chance, per token, to drop all but the least likely of the tokens above the threshold"""
    xtc_threshold: float = 0.1
    seed: int | None = None
    """same seed, same text; None draws one per request"""
    max_tokens: int | None = None
    """None: the rest of the context"""
    min_tokens: int = 0
    """no stop of any kind before this many tokens"""
    stop: tuple[str, ...] = ()
    """stop strings, not part of the text"""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    """answers to one prompt; child i uses seed + i"""
    logprobs: int | None = None
    """None: none; k: the chosen token and the k most likely (raw, before penalties and temperature)"""
    prompt_logprobs: int | None = None
    """the same for every prompt token; the prefix cache is then not read"""
    include_stop: bool = False
    """keep the stop string in the text"""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability, with the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request (all its children together)."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds and rates of one request. TTFT = first token - submit."""

    queue_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    prefill_tps: float = 0.0
    decode_tps: float = 0.0
    num_preemptions: int = 0
    """how often it was put back to make room"""


class StopCheck(Protocol):
    """Made by `stream.py`, called by the engine in `commit`: decides whether text ends a sequence."""

    def accept(self, token_id: int) -> int | None:
        """Take one id. None: go on; else the number of characters of the whole text to keep."""
        ...

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the text."""
        ...

    def fork(self) -> StopCheck:
        """A fresh one with the same settings, for another child of the same request."""
        ...


class TokenMask(Protocol):
    """Made by `grammar`, called by the engine in its thread: which tokens may come next."""

    def fill(self, bitmask_row: Any) -> bool:
        """Write the allowed ids as bits into an int32 row of ceil(vocab / 32) words.

        False: all ids are allowed, the row was left alone. Raises ConstraintUnmet when none is, or at a limit.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance past one id. Raises ConstraintUnmet for one that was not allowed."""
        ...

    def forced(self, last: int | None = None) -> list[int]:
        """Ids that must come next, in the spelling that the tokenizer would choose; none where there is a choice.

        last  the id accepted just now: the ids begin with it, or with others of the same text that take its place,
              where the tokenizer would spell it and what is forced after it otherwise

        Nothing is accepted or taken back. An engine that gives logits for every token may ignore them.
        """
        ...

    @property
    def is_done(self) -> bool:
        """Nothing but the end may follow: the sequence ends here, also where end tokens are ignored."""
        ...

    def fork(self) -> TokenMask:
        """One in the same state that goes its own way, for another child of the same request."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted ids back (at most 64): drafts that were refused."""
        ...


@dataclass(slots=True)
class Request:
    """What the engine is asked. Token ids only."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: frozenset[int] = frozenset()
    request_id: str = ""
    stop_check: StopCheck | None = None
    token_mask: TokenMask | None = None
    priority: int = 0
    cache_salt: str = ""
    use_prefix_cache: bool = True
    score: bool = False
    """publish the float32 log-probabilities of every prompt row, generate nothing"""
    pooling: Literal["", "mean", "last"] = ""
    """publish the mean, or the last, of the prompt's normed hidden states, generate nothing"""
    score_chunk: int = 256
    """rows per published piece when `score`"""

    @property
    def only_reads(self) -> bool:
        """Whether the prompt is read and nothing is generated."""
        return self.score or self.pooling != ""


@dataclass(slots=True)
class TokenEvent:
    """What the engine publishes, once per step and sequence. The last one of a sequence has a `finish_reason`."""

    request_id: str
    index: int = 0
    """which of the n answers"""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """the token id or string that stopped it"""
    keep_chars: int | None = None
    """on a stop string: how many characters of the whole text stay"""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    scores: Any = None
    """numpy float32 [rows, vocab], only for `score` requests"""
    pooled: Any = None
    """numpy float32 [hidden], only for `pooling` requests"""
    prefill: tuple[int, int] | None = None
    """(prompt tokens done, of how many)"""
    usage: Usage | None = None
    timing: Timing | None = None
    error: Exception | None = None


# --- engine and interface --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Phase:
    """Something slow before the model is ready: resolve, download, import, weights, kv, compile, warmup; then ready."""

    name: str
    done: int = 0
    total: int = 0
    """0 when unknown"""
    detail: str = ""
    rate: float = 0.0
    """per second, in the unit of done"""
    eta_s: float | None = None
    file: str = ""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt tokens read so far."""

    turn: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer."""

    turn: int
    kind: Literal["content", "reasoning", "tool_call"]
    text: str
    """of a tool_call: JSON, first {"index", "id", "name", "arguments": ""}, then {"index", "arguments": a piece}"""
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
    context: Mapping[str, Any] = field(default_factory=dict)
    """the values, for the JSON twin"""


ChatEvent = Phase | Prefill | Delta | Done | Failed


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true of the running model: plain data for status lines and the engine panel."""

    model: str = ""
    truth_line: str = ""
    device: str = ""
    ctx: int = 0
    max_ctx: int = 0
    """the largest window that would fit, up to the model's own; 0 when unknown"""
    used_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    page_size: int = 0
    """tokens"""
    page_map: bytes = b""
    """one byte a page, or every n-th page of a large pool: 0 free, 1 kept by the prefix tree alone, 2 in use"""
    weight_bytes: int = 0
    kv_bytes: int = 0
    kv: str = ""
    """how keys and values are stored"""
    plan_parts: tuple[tuple[str, int], ...] = ()
    """(weights | kv | work | margin, bytes) as planned"""
    have_bytes: int = 0
    """what the plan could use"""
    held_bytes: int = 0
    """what the process (CPU) or its share of the device (GPU) holds now"""
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    """computed since the start, those of the prefix tree not among them"""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    decode_tps: float = 0.0
    """expected of one sequence at the start of its context"""
    power_w: float = 0.0
    """what the card draws now; 0 where it does not say"""
    url: str = ""
    """the server that computes, when it is not this process"""
    pid: int = 0
    """that server's process, when it is one of ours on this machine"""
    has_chat_template: bool = True
    times_kernels: bool = False
    """tile sizes are being timed on the card, in an idle moment"""
    warnings: tuple[str, ...] = ()


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
    ctx: int = 0
    """the context it would get here"""
    params: int = 0
    active_params: int = 0
    """weights read per token, where fewer than `params`"""
    licence: str = ""
    chat: bool = True
    """has a chat template"""
    need_bytes: int = 0
    have_bytes: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    """the terms of `need_bytes`"""
    last_used: float = 0.0
    """seconds since the epoch"""
    path: str = ""
    quality: str = ""
    """what its format costs, where that was measured"""
    quants: tuple[ModelChoice, ...] = ()
    """the same model in other formats, the smallest first"""


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


class ChatBackend(Protocol):
    """All an interface knows of the engine. In process, or over HTTP; nothing here blocks."""

    def start(self, model: str | None, changes: Mapping[str, Any] | None = None) -> None:
        """Begin loading; returns at once, phases arrive as events, `Phase("ready")` ends them.

        A second start replaces the first model. `changes` are settings that differ from now on: ctx, kv.
        """
        ...

    def send(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> int:
        """Queue a turn, also before the model is ready; returns its id.

        When the last message is the assistant's, it is continued. `template` goes to the chat template:
        enable_thinking, reasoning_effort.
        """
        ...

    def stop(self, turn: int) -> None:
        """End a turn early; its `Done` has stop "abort"."""
        ...

    def rest(self) -> None:
        """Leave off what is done in idle moments (`Facts.times_kernels`)."""
        ...

    def events(self) -> deque[ChatEvent]:
        """The queue to drain."""
        ...

    def facts(self) -> Facts:
        """What is running."""
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens of a text; an estimate (a quarter of its characters) while no model is there. May take a while."""
        ...

    def choices(self, ctx: int | None = None) -> list[ModelChoice]:
        """Rows of the model picker: what is here, then what could be fetched. May take a second.

        ctx   the window to judge them by; None leaves it to the plan
        """
        ...

    def checks(self) -> list[Check]:
        """Doctor's quick checks."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
