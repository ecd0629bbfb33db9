"""Request bodies of the OpenAI routes as pydantic models; unknown fields are allowed, wrong values are not.

Numbers are strict (no "1", no true) and finite. `reading.py` translates the fields for the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from localllm.request import RANGES

MAX_MESSAGES = 4096
MAX_PROMPTS = 128
MAX_PARTS = 1024
MAX_IDS = 1024
MAX_NAME = 512  # characters of ids, users and the like

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Name = Annotated[StrictStr, Field(max_length=MAX_NAME)]
MetadataKey = Annotated[StrictStr, Field(max_length=64)]
MetadataValue = Annotated[StrictStr, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]


def ranged(name: str, **own: float) -> Any:
    """The range of a field of `SamplingParams` as a pydantic field; `own` overrides bounds for this API."""
    limits = RANGES[name]
    bounds: dict[str, Any] = {"gt" if limits.open else "ge": limits.low, "le": limits.high} | own
    return Field(description=limits.about, **bounds)


# fail_fast reports only the first bad element: one error per element could take hundreds of megabytes
Stop = StrictStr | Annotated[list[StrictStr], Field(fail_fast=True, max_length=64)] | None
CacheSalt = Annotated[StrictStr, Field(max_length=128, pattern=r"^[^@/\\\x00]*$")]


_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
TEXTS_OR_IDS: list[Any] = [
    {"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "string"}}, _IDS,
    {"type": "array", "minItems": 1, "items": _IDS},
]  # fmt: skip


class Body(BaseModel):
    """Base of request bodies: keeps unknown fields, since some of them are constraints that must be rejected."""

    model_config = ConfigDict(extra="allow")


class ContentPart(Body):
    """A part of a message."""

    type: StrictStr
    text: StrictStr | None = None


class ChatMessage(Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    refusal: StrictStr | None = None  # of an assistant, without content
    name: Name | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None
    function_call: dict[str, Any] | None = None  # the predecessor of `tool_calls`
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class Generates(Body):
    """Fields of every OpenAI route that generates text."""

    model: StrictStr | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, ranged("temperature", le=2)] | None = None
    top_p: Annotated[Number, ranged("top_p")] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    user: Name | None = None


class Filed(Body):
    """Bookkeeping fields of chat completions and responses; only responses are stored."""

    metadata: Metadata | None = None
    store: StrictBool | None = None
    safety_identifier: Annotated[StrictStr, Field(max_length=64)] | None = None
    prompt_cache_key: Name | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None


class Constraints(Generates):
    """Fields that constrain the output: all are checked in one place (`constraints.py`), and none is ignored."""

    functions: Any = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    json_schema: Any = None
    grammar: Any = None


class Sampled(Constraints):
    """Fields shared by chat and completions."""

    top_k: Annotated[StrictInt, ranged("top_k")] | None = None
    min_p: Annotated[Number, ranged("min_p")] | None = None
    typical_p: Annotated[Number, ranged("typical_p")] | None = None
    repetition_penalty: Annotated[Number, ranged("repetition_penalty")] | None = None
    presence_penalty: Annotated[Number, ranged("presence_penalty")] | None = None
    frequency_penalty: Annotated[Number, ranged("frequency_penalty")] | None = None
    logit_bias: dict[StrictStr, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[StrictInt, ranged("seed")] | None = None
    n: Annotated[StrictInt, ranged("n")] | None = None
    stop: Stop = None
    stop_token_ids: Annotated[list[StrictInt], Field(fail_fast=True, max_length=MAX_IDS)] | None = None
    min_tokens: Annotated[StrictInt, ranged("min_tokens")] | None = None
    ignore_eos: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    timings_per_token: StrictBool | None = None
    cache_salt: CacheSalt | None = None
    request_id: Annotated[StrictStr, Field(max_length=128)] | None = None
    priority: Annotated[StrictInt, Field(ge=-1000, le=1000)] | None = None  # lower runs earlier, as in vLLM
    # best effort: at the deadline, a waiting request is rejected and a running one ends with the text so far
    deadline_ms: Annotated[StrictInt, Field(ge=1, le=86_400_000)] | None = None


class ChatRequest(Sampled, Filed):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[StrictInt, ranged("max_tokens")] | None = None
    max_completion_tokens: Annotated[StrictInt, ranged("max_tokens")] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, ranged("logprobs")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    include_reasoning: StrictBool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    modalities: list[StrictStr] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class CompletionRequest(Sampled):
    """POST /v1/completions"""

    # str | [str] | [int] | [[int]], validated in `split_prompts`
    prompt: Annotated[Any, Field(json_schema_extra={"anyOf": TEXTS_OR_IDS})]
    max_tokens: Annotated[StrictInt, ranged("max_tokens", ge=0)] | None = None
    logprobs: Annotated[StrictInt, ranged("logprobs", le=5)] | None = None
    echo: StrictBool | None = None
    logprobs_from: Annotated[StrictInt, ranged("prompt_logprobs_from")] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=20)] | None = None
    suffix: StrictStr | None = None
