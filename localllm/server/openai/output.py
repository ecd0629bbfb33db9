"""JSON shared by OpenAI's routes: ids, usage, finish reasons, log-probabilities, tool calls, timings."""

from __future__ import annotations

import codecs
import json
import uuid
from collections.abc import Sequence
from typing import Any

from localllm.llm.llm import LLM
from localllm.request import FinishReason, Timing, TokenLogprob, Usage

_tag = ""


def tag_ids(tag: str) -> None:
    """Put a tag at the start of all new ids, which tells a router in front of several servers who issued an id."""
    global _tag
    _tag = tag


def new_id(prefix: str) -> str:
    """Return a new id: chatcmpl-…, cmpl-…; no dash follows a prefix that ends with an underscore: resp_…"""
    return f"{prefix}{'' if prefix.endswith('_') else '-'}{_tag}{uuid.uuid4().hex[len(_tag) :]}"


def finish_name(reason: FinishReason | None, *, has_tool_calls: bool = False) -> str | None:
    """The finish reason by OpenAI's name."""
    if reason is None:
        return None
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_tool_calls else "stop"


def usage_json(usage: Usage) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens, "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0, "audio_tokens": 0,
        },
    }  # fmt: skip


def timings_json(usage: Usage, timing: Timing) -> dict[str, Any]:
    """llama.cpp's `timings`."""
    prompt_s = max(0.0, timing.ttft_s - timing.queue_s)
    predicted_s = max(0.0, timing.total_s - timing.ttft_s)
    read = usage.prompt_tokens - usage.cached_tokens
    drafts = {"draft_n": timing.draft_tokens, "draft_n_accepted": timing.accepted_tokens} if timing.draft_tokens else {}
    return drafts | {
        "cache_n": usage.cached_tokens, "prompt_n": read, "prompt_ms": 1000 * prompt_s,
        "prompt_per_second": timing.prefill_tps, "predicted_n": usage.completion_tokens,
        "predicted_ms": 1000 * predicted_s, "predicted_per_second": timing.decode_tps,
    }  # fmt: skip


class TokenNames:
    """Tokens as text and bytes, for log-probabilities."""

    def __init__(self, llm: LLM, *, as_ids: bool = False) -> None:
        """`as_ids`: show "token_id:123" instead of the text."""
        self._tokenizer, self._as_ids = llm.tokenizer, as_ids

    def text(self, token: int) -> str:
        """The token's text; incomplete characters become U+FFFD."""
        if self._as_ids:
            return f"token_id:{token}"
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """{"content": [...], "refusal": null}"""
        return {"content": [self.entry(entry) for entry in entries], "refusal": None}

    def entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._one(token, logprob) for token, logprob in entry.top]
        return {**self._one(entry.token_id, entry.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": list(data)}

    def completion(
        self, entries: Sequence[TokenLogprob | None], ids: Sequence[int], offsets: TextOffsets
    ) -> dict[str, Any]:
        """Log-probabilities in the format of /v1/completions; `ids` names all tokens, some of which have no entry."""
        return {
            "tokens": [self.text(token) for token in ids],
            "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
            "top_logprobs": [None if e is None else {self.text(t): finite(p) for t, p in e.top} for e in entries],
            "text_offset": [offsets.add(self._tokenizer.token_bytes(token)) for token in ids],
        }


class TextOffsets:
    """The positions of one answer's tokens in its text; tokens that share a character have the same one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0

    def add(self, token: bytes) -> int:
        """Return the position of the next token."""
        position = self._next
        self._next += len(self._decoder.decode(token))
        return position


def finite(logprob: float) -> float:
    """Clamp a log-probability to a value that JSON can hold: minus infinity becomes -9999, as in vLLM."""
    return max(logprob, -9999.0)


def tool_delta(text: str) -> dict[str, Any]:
    """Convert the engine's JSON delta of a tool call into OpenAI's."""
    delta = json.loads(text)
    out: dict[str, Any] = {"index": delta["index"]}
    if delta.get("id"):
        out |= {"id": delta["id"], "type": "function"}
    function = {"name": delta["name"]} if delta.get("name") else {}
    return out | {"function": {**function, "arguments": delta.get("arguments") or ""}}


def arguments_of(call: dict[str, str]) -> dict[str, Any]:
    """Parse the arguments of a finished call; {} if the length limit cut them off."""
    try:
        found = json.loads(call["arguments"] or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def has_called(arguments: str | None, stop: int | str | None) -> bool:
    """Whether the last tool call of a response, with these arguments (None: no call), is complete.

    A stop string may have cut the call off, and `tool_calls` or `tool_use` as the finish reason would hide that.
    """
    if arguments is None or not isinstance(stop, str):
        return arguments is not None
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def tool_calls_json(calls: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Finished tool calls in OpenAI's format."""
    return [
        {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in calls
    ]
