"""Converts the validated body of a chat or completion request into a `Generation`; rejects unsupported fields by name.

`constraints.py` reads the fields that constrain the output (tools, schemas, grammars).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.request import Message, check_stops
from localllm.server.body import checked
from localllm.server.errors import invalid, not_text, unsupported
from localllm.server.generation import Conversation, Generation
from localllm.server.openai.schemas import (
    MAX_PROMPTS,
    Body,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Sampled,
)

from .constraints import read_constraint, read_tool_use, with_constraints, with_tools

RESERVED_KWARGS = {
    "messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "bos_token", "eos_token", "documents",
    "return_dict", "return_tensors", "padding", "truncation", "max_length", "conversation", "continue_final_message",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
MAX_KWARGS_BYTES = 64 << 10
DEFAULT_COMPLETION_TOKENS = 16
# fields of `SamplingParams` that have the same name in a body
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "n", "min_tokens", "ignore_eos",
)  # fmt: skip
# unsupported fields that would change the output -> values that are accepted because they change nothing
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
# fields of a chat request that only shape its response, or have no effect
OF_CHAT_ALONE = {
    "model", "messages", "stream", "stream_options", "n", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "return_token_ids", "return_tokens_as_token_ids", "timings_per_token",
    "include_reasoning", "request_id", "metadata", "store", "service_tier", "verbosity",
}  # fmt: skip


def further(body: Body) -> dict[str, Any]:
    """Extra fields of another API's body that constrain or change a chat request's output.

    They mean the same in every API, and are validated in one place: no constraint is ignored.
    """
    known = (ChatRequest.model_fields.keys() | NEUTRAL.keys() | {"chat_template"}) - OF_CHAT_ALONE
    return {name: value for name, value in (body.model_extra or {}).items() if name in known and value is not None}


def with_further(body: Body, fields: dict[str, Any], own_format: str) -> dict[str, Any]:
    """Add what `further` finds to `fields`, converted from an API's own; `own_format` is its name for response_format.

    Raises ApiError.
    """
    extra = further(body)
    given = extra.pop("chat_template_kwargs", None)
    if given is not None and not isinstance(given, dict):
        raise invalid("chat_template_kwargs must be an object.", "chat_template_kwargs", "invalid_type")
    if "response_format" in extra and fields.get("response_format") is not None:
        raise invalid(f"{own_format} and response_format cannot be combined.", "response_format")
    known = {name: value for name, value in fields.items() if value is not None}
    kwargs = known.get("chat_template_kwargs", {}) | (given or {})
    return extra | known | ({"chat_template_kwargs": kwargs} if kwargs else {})


def chat_request(body: Body, fields: dict[str, Any], own_format: str) -> ChatRequest:
    """Build the chat request for a body of another API; see `with_further`."""
    return checked(with_further(body, fields, own_format), ChatRequest)


def read_chat(body: ChatRequest) -> Generation:
    """Convert a chat request into a `Generation`. Raises ApiError."""
    _check_chat(body)
    made = _generation(body, _conversation(body))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = {"max_tokens": body.max_completion_tokens or body.max_tokens, "logprobs": logprobs}
    user = body.user or body.safety_identifier or body.prompt_cache_key or ""
    return with_constraints(replace(made, sampling={**made.sampling, **sampling}, user=user), body)


def read_conversation(body: ChatRequest) -> Conversation:
    """Read only the conversation of a chat request, to tokenize it. Raises ApiError."""
    _check_chat(body)
    read_constraint(body)  # validated even though nothing is generated
    return with_tools(_conversation(body), read_tool_use(body))


def read_completion(body: CompletionRequest) -> Generation:
    """Convert a completion request into a `Generation`. Raises ApiError."""
    _check(body)
    if read_tool_use(body) is not None:
        raise unsupported("Tools need a conversation: use /v1/chat/completions.", "tools")
    if body.suffix:
        raise unsupported("suffix is not supported: no model here does fill-in-the-middle.", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of is supported only when it equals n.", "best_of")
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if limit == 0 and not body.echo:
        raise invalid("max_tokens 0 needs echo: true.", "max_tokens")
    prompts = split_prompts(body.prompt, "prompt", MAX_PROMPTS)
    if len(prompts) * (body.n or 1) > MAX_PROMPTS:
        raise invalid(f"{len(prompts)} prompts with n {body.n} exceed {MAX_PROMPTS} completions.", "prompt")
    made = _generation(body, prompts)
    sampling = {
        "max_tokens": max(1, limit),  # for scoring, the single generated token is dropped
        "logprobs": body.logprobs,
        "prompt_logprobs": body.logprobs if body.echo else None,
        "prompt_logprobs_from": body.logprobs_from or 0,
    }
    made = replace(made, sampling={**made.sampling, **sampling}, generates=body.max_tokens != 0)
    return with_constraints(made, body)


def _generation(body: Sampled, prompts: Conversation | list[str | list[int]]) -> Generation:
    """Build the parts that both kinds of request share."""
    deadline = None if body.deadline_ms is None else time.monotonic() + body.deadline_ms / 1000
    return Generation(
        body.model, prompts, _sampling(body), streams=bool(body.stream), user=body.user or "",
        priority=body.priority or 0, deadline=deadline, cache_salt=body.cache_salt or "",
    )  # fmt: skip


def split_prompts(value: Any, param: str, limit: int) -> list[str | list[int]]:
    """Convert str | [str] | [int] | [[int]] into one item per prompt. Raises ApiError for anything else."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if isinstance(prompts, list) and not 0 < len(prompts) <= limit:
        raise invalid(f"{param} has {len(prompts)} items; 1 to {limit} are allowed.", param)
    if not isinstance(prompts, list) or not all(isinstance(p, str) or _is_ids(p) for p in prompts):
        raise invalid(f"{param} must be text, token ids, or a list of either.", param, "invalid_type")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _check(body: Sampled) -> None:
    """Reject unsupported fields by name. Raises ApiError."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: true.", "stream_options")
    for name, neutral in NEUTRAL.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            raise unsupported(f"{name} is not supported.", name)


def _check_chat(body: ChatRequest) -> None:
    _check(body)
    if body.modalities is not None and body.modalities != ["text"]:
        raise invalid("The only supported modality is text.", "modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true.", "top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt cannot be combined."
        raise invalid(message, "continue_final_message")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise invalid("continue_final_message needs a final assistant message.", "messages")


def _sampling(body: Sampled) -> dict[str, Any]:
    """The fields of `SamplingParams` set in the body."""
    given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
        check_stops(given["stop"])  # before the model is loaded
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        try:
            given["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
        except ValueError:
            raise invalid("The keys of logit_bias must be token ids.", "logit_bias") from None
    if body.include_stop_str_in_output:
        given["include_stop"] = True
    return given


def _conversation(body: ChatRequest) -> Conversation:
    """Convert the messages: texts are joined, and developer becomes system."""
    kwargs = _template_kwargs(body)
    messages = [_message(_as_tool_message(body.messages, i), f"messages[{i}]") for i in range(len(body.messages))]
    opens = body.add_generation_prompt is not False
    return Conversation(messages, None, kwargs, bool(body.continue_final_message), opens)


def _as_tool_message(messages: Sequence[ChatMessage], number: int) -> ChatMessage:
    """Convert a legacy function call or result into that of a tool; a result belongs to the last call."""
    message = messages[number]
    if message.function_call is not None and not message.tool_calls:
        call = {"id": f"call_{number}", "type": "function", "function": message.function_call}
        return message.model_copy(update={"tool_calls": [call]})
    if message.role == "function":
        last = next((i for i in range(number - 1, -1, -1) if messages[i].function_call is not None), 0)
        return message.model_copy(update={"role": "tool", "tool_call_id": f"call_{last}"})
    return message


def _message(message: ChatMessage, where: str) -> Message:
    content: Any = message.content
    if content is None and message.role == "assistant":
        content = message.refusal
    if isinstance(content, list):
        parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        has_images = any(part["type"] == "image_url" for part in parts)
        content = parts if has_images else "".join(part["text"] for part in parts)
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise invalid("content is missing.", f"{where}.content", "missing_required_parameter")
    for number, call in enumerate(message.tool_calls or ()):
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid("A call must have a function with a name.", f"{where}.tool_calls[{number}]")
    if message.role == "tool" and not message.tool_call_id:
        raise invalid("tool_call_id is missing.", f"{where}.tool_call_id", "missing_required_parameter")
    out = Message(role="system" if message.role == "developer" else message.role, content=content or "")
    for name in ("name", "tool_calls", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            out[name] = value  # type: ignore[literal-required]
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        out["reasoning_content"] = reasoning
    return out


def _part(part: ContentPart, where: str) -> dict[str, Any]:
    """Convert a text or image part; whether the model accepts images is checked later."""
    if part.type == "image_url":
        given = (part.model_extra or {}).get("image_url")
        url = given.get("url") if isinstance(given, dict) else given
        if not isinstance(url, str) or not url.startswith("data:"):
            raise invalid("An image must be a data: URL: nothing is fetched.", where, "unsupported_value")
        return {"type": "image_url", "image_url": {"url": url}}
    if part.type not in ("text", "refusal"):
        raise not_text("Content", part.type, where)
    text = getattr(part, part.type, None)
    if not isinstance(text, str):
        raise invalid(f"{part.type} is missing.", f"{where}.{part.type}", "missing_required_parameter")
    return {"type": "text", "text": text}


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Collect the arguments for the chat template. Raises ApiError for reserved names."""
    kwargs = dict(body.chat_template_kwargs or {})
    if bad := RESERVED_KWARGS & set(kwargs):
        raise invalid(f"chat_template_kwargs cannot set {sorted(bad)[0]!r}.", "chat_template_kwargs")
    if kwargs and len(json.dumps(kwargs)) > MAX_KWARGS_BYTES:
        message = f"chat_template_kwargs is larger than {MAX_KWARGS_BYTES} bytes."
        raise invalid(message, "chat_template_kwargs", "string_above_max_length")
    if (body.model_extra or {}).get("chat_template") is not None:
        raise invalid("A request cannot set the chat template.", "chat_template")
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    return kwargs
