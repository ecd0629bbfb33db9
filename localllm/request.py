"""Plain values shared by all layers: requests and results. No torch, no text processing.

The engine takes a `Request` and publishes `TokenEvent`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, Protocol, TypedDict

from localllm.errors import ConfigError, ContextTooLong, InvalidRequest

IMAGE_PIXELS = 50_000_000  # limit for an image to be decoded
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# speculative decoding: the engine keeps these limits, and the plan counts their memory
MOST_DRAFTS = 32  # most draft tokens per step, over all sequences; each has a row of logits
# From this many sequences in a step on, nothing is drafted, because rows are expensive then: eight streams of smollm2
# on two cores were 9 % slower with drafts that were expected to pay off.
CROWD = 8
CAPTURED_BLOCKS = (1, 2)  # in a captured pass of a DFlash drafter; with more sequences, each has few drafts verified
READ_AT_ONCE = 256  # most tokens whose hidden states a DFlash drafter reads at once
CATCH_UP = 512  # most tokens in one step of the draft model, for sequences that are behind


class Message(TypedDict, total=False):
    """One chat message in the OpenAI shape. `role` and `content` are always present."""

    role: str
    # text, or for a user's message with images a list of parts, {"type": "text" | "image_url", ...}
    content: Any
    name: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str


def text_of(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return "\n\n".join(str(part.get("text") or "") for part in content if part.get("type") == "text")
    return str(content or "")


def num_images(messages: Iterable[Message]) -> int:
    """Number of images in the messages."""
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return sum(part.get("type") == "image_url" for parts in lists for part in parts)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on an answer's content, compiled by `grammar` and enforced while sampling."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    # a JSON schema; None; a regular expression for the whole answer; Lark or GBNF text; a list of texts
    value: Any = None
    lenient: bool = False  # drop JSON schema keywords that cannot be enforced, instead of refusing them
    param: str = "response_format"  # the request field it came from, for errors


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools the model may call, and how."""

    # in the OpenAI shape: {"type": "function", "function": {"name", "description", "parameters"}}
    tools: tuple[Mapping[str, Any], ...]
    choice: str = "auto"  # auto: the model decides; none: no calls; required: at least one call
    only: tuple[str, ...] = ()  # names that may be called; empty for all
    parallel: bool = True  # allow several calls in one answer


class FinishReason(StrEnum):
    """Why a sequence ended. Every accepted request ends in exactly one of these."""

    STOP = "stop"  # an end-of-turn token, a stop string or a stop token id
    LENGTH = "length"  # max_tokens or the context window was reached
    ABORT = "abort"  # the caller stopped it
    ERROR = "error"  # it failed; the event carries the error


@dataclass(frozen=True, slots=True)
class Range:
    """A range of numbers from `low` (excluded if `open`) to `high`."""

    low: float
    high: float
    about: str  # what the value does, for settings and schemas
    whole: bool = False
    open: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return (self.low < value if self.open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.whole:
            return f"a whole number from {self.low} to {self.high}"
        return f"a number {'above' if self.open else 'from'} {self.low:g} to {self.high:g}"


MAX_INT32 = 2**31 - 1
MAX_STOPS, MAX_STOP_CHARS, MAX_BIASES = 16, 256, 1024
# checked by `SamplingParams`; settings, schemas and options take their limits and help from here
RANGES = {
    "temperature": Range(0, 100, "0 is greedy"),
    "top_k": Range(-1, MAX_INT32, "0 or -1 is off", whole=True),
    "top_p": Range(0, 1, "1 is off", open=True),
    "min_p": Range(0, 1, "0 is off"),
    "typical_p": Range(0, 1, "1 is off", open=True),
    "repetition_penalty": Range(0, 100, "1 is off; over prompt and output", open=True),
    "presence_penalty": Range(-2, 2, "0 is off; over the output"),
    "frequency_penalty": Range(-2, 2, "0 is off; over the output"),
    "dry_multiplier": Range(0, 100, "0 is off; penalizes tokens that would extend a repetition"),
    "dry_base": Range(1, 100, "growth of that penalty per repeated token"),
    "dry_allowed_length": Range(1, MAX_INT32, "repetitions up to this length are not penalized", whole=True),
    "xtc_probability": Range(0, 1, "chance, per token, to keep only the least likely token above the threshold"),
    "xtc_threshold": Range(0, 1, "minimum probability for XTC to count a token"),
    "seed": Range(-(2**63), 2**63 - 1, "same seed, same text", whole=True),
    "n": Range(1, 128, "number of answers; answer i uses seed + i", whole=True),
    "max_tokens": Range(1, MAX_INT32, "maximum tokens to generate; unset: the rest of the context", whole=True),
    "min_tokens": Range(0, MAX_INT32, "never stop before this many tokens", whole=True),
    "logprobs": Range(0, 20, "log-probabilities of the chosen token and the k likeliest, before penalties", whole=True),
    "prompt_logprobs": Range(0, 20, "the same for every prompt token, computed without the prefix cache", whole=True),
    "prompt_logprobs_from": Range(
        0, MAX_INT32, "first prompt token to return them for; earlier tokens may come from the cache", whole=True
    ),
}
_BIAS = Range(-100, 100, "added to the logit of a token")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token and when to stop; ranges and meanings are in `RANGES`.

    Order of application: penalties and bias (repetition, presence, frequency, logit_bias, DRY), temperature,
    then the cuts top-k, top-p, min-p, typical-p and XTC, then one draw from the remaining tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: tuple[int, ...] = ()  # token ids that end a repetition
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None  # None: a random seed per request
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # stop strings, excluded from the text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0
    include_stop: bool = False  # keep the stop string in the text

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest for the first value out of range; its `param` names the field."""
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value not in allowed and not (value is None and name in _MAY_BE_UNSET):
                raise _refused(name, value, str(allowed))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refused("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        check_stops(self.stop)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("logit_bias", self.logit_bias, vocab_size)
        if len(self.logit_bias) > MAX_BIASES:
            raise _refused("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_BIASES} entries")
        for value in self.logit_bias.values():
            if value not in _BIAS:
                raise _refused("logit_bias", value, "numbers from -100 to 100")


_MAY_BE_UNSET = {f.name for f in fields(SamplingParams) if f.default is None}


def check_stops(stops: Sequence[str]) -> None:
    """Raise InvalidRequest for stop strings that are too many, empty or too long."""
    if len(stops) > MAX_STOPS:
        raise _refused("stop", f"{len(stops)} strings", f"at most {MAX_STOPS} strings")
    if not all(isinstance(s, str) and s for s in stops):
        raise _refused("stop", "an empty string", "strings of at least one character")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARS:
        limit = f"strings of at most {MAX_STOP_CHARS} characters"
        raise _refused("stop", f"a string of {longest} characters", limit)


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequest for an id outside the vocabulary."""
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            limit = f"ids from 0 to {vocab_size - 1}"
            raise InvalidRequest(
                f"{name} has token id {token!r:.40}, but the model has {limit}", f"choose {limit}", param=name
            )


def _refused(name: str, value: object, limit: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {limit}, not {str(value)[:80]}", f"choose {limit}", param=name)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability, with the likeliest alternatives, best first."""

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
    num_preemptions: int = 0  # how often the request was preempted
    draft_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # draft tokens that were accepted
    drafters: tuple[str, ...] = ()  # where the draft tokens came from


class StopCheck(Protocol):
    """Decodes an answer's ids and finds its stop strings. Made by `tokenizer`, called by the engine in `commit`."""

    @property
    def stop_text(self) -> str | None: ...

    def accept(self, token_id: int) -> bool:
        """Accept one id; return whether a stop string has ended the text."""

    def take(self, last: bool = False) -> str:
        """Return the new text that can no longer change; with `last`, everything that is left."""

    def fork(self) -> StopCheck:
        """A fresh copy with the same settings, for another child of the same request."""


class TokenMask(Protocol):
    """Says which tokens may come next. Made by `grammar`, called in the engine's thread."""

    def fill(self, bitmask_row: Any) -> bool:
        """Write the allowed ids as bits into an int32 row of ceil(vocab / 32) words.

        Returns False when all ids are allowed; the row is then unchanged. Raises ConstraintUnmet when no id is
        allowed, or at a limit.
        """

    def accept(self, token_id: int) -> None:
        """Advance past one id. Raises ConstraintUnmet when it was not allowed."""

    def jump_forward(self, last: int | None = None) -> list[int]:
        """Ids that must come next, spelled as the tokenizer would spell them; empty where there is a choice.

        last  the id accepted just now: the result starts with it, or with ids of the same text that replace it where
              the tokenizer would spell it differently together with the forced text

        Changes no state. An engine that computes logits for every token may ignore the result.
        """

    @property
    def is_done(self) -> bool:
        """Whether only the end may follow: the sequence then ends, even where end tokens are ignored."""

    def fork(self) -> TokenMask:
        """An independent copy in the same state, for another child of the same request."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted ids (at most 64): rejected draft tokens."""


@dataclass(slots=True, eq=False)
class PromptImage:
    """An image in a prompt: tokens [start, end), computed by the engine from its pixels."""

    start: int
    end: int
    pixels: Any  # numpy uint8 [height, width, 3], as the model's image tower takes it; None once `vectors` is set
    digest: bytes  # of the pixels and their shape
    # rows and columns of its tokens, where positions follow them; None: positions count tokens
    grid: tuple[int, int] | None = None
    causal: bool = False  # a token attends only to earlier ones, so the image may be computed in pieces
    vectors: Any = None  # the tower's output, until all answers have ended

    @property
    def shift(self) -> int:
        """How much lower later positions are than without a grid; zero or negative."""
        return 0 if self.grid is None else max(self.grid) - (self.end - self.start)

    def key(self, position: int) -> int:
        """The prefix-cache key of the token at `position`: differs from all token ids and from other images."""
        return -1 - int.from_bytes(self.digest[:12], "big") * (self.end - self.start) - (position - self.start)


def extra_hint(extra: str) -> str:
    """The command that installs the packages of an extra for this Python; localllm itself is on no package index."""
    import shlex
    import sys
    from importlib.metadata import requires

    needs = [need.partition(";") for need in requires("localllm") or ()]
    packages = [name.strip() for name, _, when in needs if when.strip() == f'extra == "{extra}"']
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def open_image(data: bytes, where: str = "image") -> tuple[str, Any]:
    """Return a file's format (one of IMAGE_FORMATS) and its first image, upright, as a PIL image of mode RGB.

    Checks the header before decoding. Raises InvalidRequest with `param` `where` for an image that is too large,
    damaged or of an unknown format; ConfigError without Pillow.
    """
    import io
    import warnings

    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ConfigError("images need the package pillow", extra_hint("images")) from None
    hint = f"send {', '.join(IMAGE_FORMATS)} with at most {IMAGE_PIXELS:,} pixels"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is lower
            image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"an image has more than {IMAGE_PIXELS:,} pixels", hint, param=where) from error
    except Exception as error:  # a damaged header can raise anything
        what = f"an image is damaged, or not in one of the formats {', '.join(IMAGE_FORMATS)}"
        raise InvalidRequest(what, hint, param=where) from error
    width, height = image.size
    if width * height > IMAGE_PIXELS:
        what = f"an image has {width:,} x {height:,} pixels; the limit is {IMAGE_PIXELS:,} in total"
        raise InvalidRequest(what, hint, param=where)
    try:
        image.load()
        return str(image.format), ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise InvalidRequest("an image is damaged or truncated", "send the whole file", param=where) from error


class PromptTokens(list[int]):
    """Token ids of a prompt with images."""

    images: tuple[PromptImage, ...] = ()


@dataclass(slots=True)
class Request:
    """A request to the engine. Token ids only."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: frozenset[int] = frozenset()
    request_id: str = ""
    stop_check: StopCheck | None = None
    token_mask: TokenMask | None = None
    priority: int = 0
    cache_salt: str = ""
    use_prefix_cache: bool = True
    adapter: str = ""  # name of the adapter to use; "": the base model
    score: bool = False  # publish the float32 log-probabilities of every prompt row; generate nothing
    # publish the mean, first or last of the prompt's normed hidden states; generate nothing
    pooling: Literal["", "mean", "cls", "last"] = ""
    score_chunk: int = 256  # rows per published piece when `score`
    images: tuple[PromptImage, ...] = ()  # in order; the last prompt token never belongs to one

    @property
    def only_reads(self) -> bool:
        return self.score or self.pooling != ""

    def check(self, vocab_size: int, max_context: int, largest_context: int = 0) -> None:
        """Raise InvalidRequest or ContextTooLong when the request can never run.

        largest_context   the largest possible --ctx; 0 when unknown
        """
        self.params.check(vocab_size)
        count = len(self.prompt_token_ids)
        if count == 0:
            raise InvalidRequest("the prompt is empty", "send at least one token of text", param="prompt")
        # with prompt log-probabilities only, the one generated token comes from the prompt's last row and takes no room
        only_scores = self.params.prompt_logprobs is not None and self.params.max_tokens == 1
        if count > max_context - (not self.only_reads and not only_scores):
            spare = "" if count > max_context else ", including one for the answer"
            raise ContextTooLong(
                f"the prompt has {count:,} tokens, but the context window holds {max_context:,}{spare}",
                _room_for(count, largest_context),
                context={"prompt_tokens": count, "max_context": max_context},
                param="messages",
            )
        check_token_ids("prompt", self.prompt_token_ids, vocab_size)


def embeds_only(name: str) -> InvalidRequest:
    """The error for asking an embedding model to generate text."""
    return InvalidRequest(
        f"{name} is an embedding model: it cannot generate text",
        "use /v1/embeddings, /api/embed, /rerank or LLM.embed; `localllm ls` lists models that chat",
        param="model",
    )


def cannot_chat(name: str, embeds: bool) -> InvalidRequest:
    """The error for a chat with an embedding model or, if `embeds` is false, a base model."""
    if embeds:
        return embeds_only(name)
    command = f'localllm run {name} "Once upon a time"'
    what = f"{name} is a base model without a chat template"
    return InvalidRequest(what, command, fixes=((command, "complete text"),), param="model")


def _room_for(count: int, largest_context: int) -> str:
    """A hint on how to answer a prompt of `count` tokens."""
    wanted = -(-(count + 256) // 1024) * 1024
    if not largest_context or wanted <= largest_context:
        return f"start with --ctx {wanted}, or shorten the prompt"
    if count < largest_context:
        return f"start with --ctx {largest_context}, or shorten the prompt"
    return f"shorten the prompt: --ctx cannot exceed {largest_context:,} here"


@dataclass(slots=True)
class TokenEvent:
    """Published by the engine once per step and sequence. The last event of a sequence has a `finish_reason`."""

    request_id: str
    index: int = 0  # which of the n answers
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped the sequence
    text: str | None = None  # text from the request's stop check; None: nothing has decoded the ids
    prompt_logprobs: list[TokenLogprob | None] | None = None
    scores: Any = None  # numpy float32 [rows, vocab], only for `score` requests
    pooled: Any = None  # numpy float32 [hidden], only for `pooling` requests
    prefill: tuple[int, int] | None = None  # (prompt tokens done, total)
    cached_tokens: int | None = None  # prompt tokens from the prefix cache; in the first event
    usage: Usage | None = None
    timing: Timing | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A slow phase before the model is ready: resolve, download, import, weights, kv, compile, warmup; then ready.

    A server's load that fails ends with failed.

    On closing, also keep: repacked weights are saved for the next start; `detail` says why when they are not.
    """

    name: str
    done: int = 0
    total: int = 0  # 0 when unknown
    detail: str = ""
    rate: float = 0.0  # per second, in the unit of done
    eta_s: float | None = None
    file: str = ""
    kept: int | None = None  # bytes of a download that an interruption leaves; None for all

    @property
    def label(self) -> str:
        return _LOAD_LABELS.get(self.name, self.name)


_LOAD_LABELS = {
    "resolve": "looking up", "import": "starting up", "verify": "checking", "quantize": "quantizing",
    "calibrate": "calibrating", "evaluate": "measuring", "kv": "KV cache", "compile": "kernels", "warmup": "warm-up",
    "adapter": "reading the adapter",
}  # fmt: skip
OnProgress = Callable[[LoadProgress], None]
