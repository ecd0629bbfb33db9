"""Request fields -> `SamplingParams` and messages; what this version cannot do is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.request import Message, SamplingParams

from .errors import ApiError
from .schemas import ChatMessage, ChatRequest, CompletionRequest

RESERVED_KWARGS = {
    "messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "bos_token", "eos_token", "documents",
    "return_dict", "return_tensors", "padding", "truncation", "max_length", "conversation",
}  # fmt: skip
DEFAULT_COMPLETION_TOKENS = 16


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
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true.", param="stream_options")
    if isinstance(body, ChatRequest):
        given |= _chat_fields(body)
    else:
        given |= _completion_fields(body)
    return replace(defaults, **given)


def _biases(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in biases.items()}
    except ValueError:
        raise ApiError(400, "The keys of logit_bias are token ids.", param="logit_bias") from None


def _chat_fields(body: ChatRequest) -> dict[str, Any]:
    if body.tools or body.tool_choice not in (None, "none", "auto"):
        raise ApiError(
            400, "Tools are not supported by this version.", "not_supported_error", "unsupported_feature", "tools"
        )
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise ApiError(
            400, "Only response_format text is supported by this version.", "not_supported_error",
            "unsupported_feature", "response_format",
        )  # fmt: skip
    if body.modalities is not None and body.modalities != ["text"]:
        raise ApiError(400, "Only the modality text is supported.", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
    return {
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }


def _completion_fields(body: CompletionRequest) -> dict[str, Any]:
    if body.suffix:
        raise ApiError(400, "suffix is not supported.", "not_supported_error", "unsupported_feature", "suffix")
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
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            out[name] = value  # type: ignore[literal-required]
    return out


def template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """What the body may tell the template. Raises ApiError for reserved names (LIM-14)."""
    kwargs = dict(body.chat_template_kwargs or {})
    if bad := RESERVED_KWARGS & set(kwargs):
        raise ApiError(400, f"{sorted(bad)[0]!r} may not be set here.", param="chat_template_kwargs")
    if getattr(body, "chat_template", None) is not None:
        raise ApiError(400, "A chat template may not come with a request.", param="chat_template")
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    return kwargs
