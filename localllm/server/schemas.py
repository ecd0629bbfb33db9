"""What the routes accept, as pydantic models; unknown fields are accepted, wrong values are not.

Numbers are strict (no "1", no true) and finite. What a field means to the engine is decided in `sampling.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

MAX_MESSAGES = 4096
MAX_PROMPTS = 128

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
MAX_PARTS = 1024
MAX_IDS = 1024

# a list stops at its first bad element: one error each would be hundreds of megabytes for a body of one
Stop = StrictStr | Annotated[list[StrictStr], Field(fail_fast=True, max_length=64)] | None


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class ContentPart(_Body):
    """A piece of a message; only text runs here."""

    type: StrictStr
    text: StrictStr | None = None


class ChatMessage(_Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: StrictStr | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None


class StreamOptions(_Body):
    """How a stream is shaped."""

    include_usage: StrictBool | None = None


class _Sampled(_Body):
    """Fields that chat and completions share."""

    model: StrictStr | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[StrictStr, Number] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    stop: Stop = None
    stop_token_ids: Annotated[list[StrictInt], Field(fail_fast=True, max_length=MAX_IDS)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    ignore_eos: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    cache_salt: Annotated[StrictStr, Field(max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None
    request_id: Annotated[StrictStr, Field(max_length=128)] | None = None
    user: StrictStr | None = None


class ChatRequest(_Sampled):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: StrictStr | None = None
    modalities: list[StrictStr] | None = None


class CompletionRequest(_Sampled):
    """POST /v1/completions"""

    prompt: Any
    """str | [str] | [int] | [[int]], checked by hand in `completion_route`"""
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=5)] | None = None
    echo: StrictBool | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=20)] | None = None
    suffix: StrictStr | None = None
