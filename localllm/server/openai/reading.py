"""Request fields -> `SamplingParams` and messages; what this version cannot do is refused by name.

What binds the output (tools, schemas, grammars) is read in `constraints.py`.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from localllm.request import Message, SamplingParams
from localllm.server.errors import ApiError, unsupported
from localllm.server.openai.schemas import Body, ChatMessage, ChatRequest, CompletionRequest, Sampled

from .constraints import wanted

RESERVED_KWARGS = {
    "messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "bos_token", "eos_token", "documents",
    "return_dict", "return_tensors", "padding", "truncation", "max_length", "conversation", "continue_final_message",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
MAX_KWARGS_BYTES = 64 << 10
DEFAULT_COMPLETION_TOKENS = 16
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "documents": ([],),
    "web_search_options": (),
    "audio": (),
}
"""fields that would change what comes out and that this version does not have -> values that ask for nothing"""
OF_CHAT_ALONE = {
    "model", "messages", "stream", "stream_options", "n", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "return_token_ids", "return_tokens_as_token_ids", "timings_per_token",
    "include_reasoning", "request_id", "metadata", "store", "service_tier", "verbosity",
}  # fmt: skip
"""fields of a chat request that say how its answer is shaped, or nothing at all"""


def further(body: Body) -> dict[str, Any]:
    """What a body of another API brings of the fields that bind a chat request's answer, or change it.

    They mean the same everywhere, and are checked in one place: a constraint is never ignored.
    """
    known = (ChatRequest.model_fields.keys() | NEUTRAL.keys() | {"chat_template"}) - OF_CHAT_ALONE
    return {name: value for name, value in (body.model_extra or {}).items() if name in known and value is not None}


def with_further(body: Body, fields: dict[str, Any], own_format: str) -> dict[str, Any]:
    """`fields`, made of an API's own, and what `further` finds beside them. Raises ApiError.

    own_format   that API's own field for what a chat request calls response_format
    """
    extra = further(body)
    given = extra.pop("chat_template_kwargs", None)
    if given is not None and not isinstance(given, dict):
        raise ApiError(400, "chat_template_kwargs is an object.", code="invalid_type", param="chat_template_kwargs")
    if "response_format" in extra and fields.get("response_format") is not None:
        raise ApiError(400, f"{own_format} and response_format exclude each other.", param="response_format")
    known = {name: value for name, value in fields.items() if value is not None}
    kwargs = known.get("chat_template_kwargs", {}) | (given or {})
    return extra | known | ({"chat_template_kwargs": kwargs} if kwargs else {})


def sampling_params(body: ChatRequest | CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """The model's defaults, overridden by what the body gives."""
    given: dict[str, Any] = {
        name: value
        for name in (
            "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "seed", "n", "min_tokens", "ignore_eos",
        )
        if (value := getattr(body, name)) is not None
    }  # fmt: skip
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        given["logit_bias"] = _biases(body.logit_bias)
    if body.include_stop_str_in_output:
        given["include_stop"] = True
    given |= _chat_fields(body) if isinstance(body, ChatRequest) else _completion_fields(body)
    return replace(defaults, **given)


def check_fields(body: Sampled) -> None:
    """Raise ApiError for what can be refused before a model is looked for: before a place is taken."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true.", param="stream_options")
    for name, neutral in NEUTRAL.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            raise unsupported(f"{name} is not supported.", name)
    bound = wanted(body)
    if bound.tool_use is not None and not isinstance(body, ChatRequest):
        raise unsupported("Tools need a conversation: use /v1/chat/completions.", "tools")
    if isinstance(body, ChatRequest):
        if body.modalities is not None and body.modalities != ["text"]:
            raise ApiError(400, "Only the modality text is supported.", param="modalities")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
        if body.continue_final_message and body.add_generation_prompt:
            raise ApiError(
                400, "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )  # fmt: skip
        if body.continue_final_message and body.messages[-1].role != "assistant":
            raise ApiError(400, "continue_final_message needs an assistant's message at the end.", param="messages")
        template_kwargs(body)
    elif isinstance(body, CompletionRequest):
        _completion_fields(body)


def deadline_of(body: Sampled) -> float | None:
    """The deadline on the monotonic clock."""
    return None if body.deadline_ms is None else time.monotonic() + body.deadline_ms / 1000


def _biases(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in biases.items()}
    except ValueError:
        raise ApiError(400, "The keys of logit_bias are token ids.", param="logit_bias") from None


def _chat_fields(body: ChatRequest) -> dict[str, Any]:
    return {
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }


def _completion_fields(body: CompletionRequest) -> dict[str, Any]:
    if body.suffix:
        raise unsupported("suffix is not supported: no model here fills in the middle.", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of other than n is not supported.", param="best_of")
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if limit == 0 and not body.echo:
        raise ApiError(400, "max_tokens 0 needs echo: true.", param="max_tokens")
    return {
        "max_tokens": max(1, limit),  # scoring only: the one token generated is dropped
        "logprobs": body.logprobs,
        "prompt_logprobs": body.logprobs if body.echo and body.logprobs is not None else None,
    }


def messages_of(body: ChatRequest) -> list[Message]:
    """Messages in the plain shape: text only, developer read as system."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]


def _message(message: ChatMessage, where: str) -> Message:
    content = message.content
    if isinstance(content, list):
        texts = []
        for i, part in enumerate(content):
            text = part.text if part.type == "text" else getattr(part, "refusal", None)
            if part.type not in ("text", "refusal") or not isinstance(text, str):
                raise ApiError(
                    400, f"Content of type {part.type[:40]!r} is not supported: this model reads text.",
                    code="unsupported_value", param=f"{where}.content[{i}]",
                )  # fmt: skip
            texts.append(text)
        content = "".join(texts)
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise ApiError(400, "content is missing.", code="missing_required_parameter", param=f"{where}.content")
    if message.role == "tool" and not message.tool_call_id:
        raise ApiError(
            400, "tool_call_id is missing.", code="missing_required_parameter", param=f"{where}.tool_call_id"
        )
    out = Message(role="system" if message.role == "developer" else message.role, content=content or "")
    for name in ("name", "tool_calls", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            out[name] = value  # type: ignore[literal-required]
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        out["reasoning_content"] = reasoning
    return out


def template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """What the body may tell the template. Raises ApiError for reserved names (LIM-14)."""
    kwargs = dict(body.chat_template_kwargs or {})
    if bad := RESERVED_KWARGS & set(kwargs):
        raise ApiError(400, f"{sorted(bad)[0]!r} may not be set here.", param="chat_template_kwargs")
    if kwargs and len(json.dumps(kwargs)) > MAX_KWARGS_BYTES:
        raise ApiError(
            400, f"chat_template_kwargs are larger than {MAX_KWARGS_BYTES} bytes.",
            code="string_above_max_length", param="chat_template_kwargs",
        )  # fmt: skip
    if (body.model_extra or {}).get("chat_template") is not None:
        raise ApiError(400, "A chat template may not come with a request.", param="chat_template")
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    return kwargs
