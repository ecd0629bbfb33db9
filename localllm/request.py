"""Plain values that cross layers: what is asked, and what comes back. No torch, no text processing.

The engine takes a `Request` and publishes `TokenEvent`s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    def jump_forward(self, last: int | None = None) -> list[int]:
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


@dataclass(frozen=True, slots=True)
class LoadProgress:
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


OnProgress = Callable[[LoadProgress], None]
