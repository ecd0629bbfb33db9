"""What a request may ask: ranges of sampling parameters and lengths, each with a message that names value and limit."""

from __future__ import annotations

import math
from collections.abc import Iterable

from localllm.errors import ContextTooLong, InvalidRequest
from localllm.request import Request, SamplingParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BIASES = 1024

_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    # name, low, high, whether low itself is allowed
    ("temperature", 0.0, 100.0, True),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, True),
    ("typical_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 100.0, False),
    ("presence_penalty", -2.0, 2.0, True),
    ("frequency_penalty", -2.0, 2.0, True),
    ("dry_multiplier", 0.0, 100.0, True),
    ("dry_base", 1.0, 100.0, True),
    ("xtc_probability", 0.0, 1.0, True),
    ("xtc_threshold", 0.0, 1.0, True),
)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for the first value out of its range; `param` names the field."""
    for name, low, high, low_ok in _RANGES:
        value = getattr(params, name)
        inside = _is_number(value) and (low <= value if low_ok else low < value) and value <= high
        if not inside:
            raise _refuse(name, value, f"a number {'from' if low_ok else 'above'} {low:g} to {high:g}")
    _whole("top_k", params.top_k, -1, 2**31 - 1)
    _whole("n", params.n, 1, MAX_N)
    _whole("min_tokens", params.min_tokens, 0, 2**31 - 1)
    _whole("dry_allowed_length", params.dry_allowed_length, 1, 2**31 - 1)
    if params.max_tokens is not None:
        _whole("max_tokens", params.max_tokens, 1, 2**31 - 1)
        if params.min_tokens > params.max_tokens:
            raise _refuse("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    if params.seed is not None:
        _whole("seed", params.seed, -(2**63), 2**63 - 1)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            _whole(name, value, 0, MAX_LOGPROBS)
    if len(params.stop) > MAX_STOPS:
        raise _refuse("stop", f"{len(params.stop)} strings", f"at most {MAX_STOPS} strings")
    if not all(isinstance(s, str) and s for s in params.stop):
        raise _refuse("stop", "an empty string", "non-empty strings")
    if longest := max((len(s) for s in params.stop if len(s) > MAX_STOP_CHARS), default=0):
        raise _refuse("stop", f"a string of {longest} characters", f"strings of at most {MAX_STOP_CHARS} characters")
    _token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _token_ids("logit_bias", params.logit_bias, vocab_size)
    if len(params.logit_bias) > MAX_BIASES:
        raise _refuse("logit_bias", f"{len(params.logit_bias)} entries", f"at most {MAX_BIASES} entries")
    for value in params.logit_bias.values():
        if not (_is_number(value) and -100 <= value <= 100):
            raise _refuse("logit_bias", value, "numbers from -100 to 100")


def check_request(request: Request, vocab_size: int, max_context: int) -> None:
    """Raise InvalidRequest or ContextTooLong when this request can never run."""
    check_params(request.params, vocab_size)
    count = len(request.prompt_token_ids)
    if count == 0:
        raise InvalidRequest("the prompt is empty", "give at least one token of text", param="prompt")
    room = max_context if request.only_reads else max_context - 1
    if count > room:
        spare = "" if count > max_context else ", one of them for the answer"
        raise ContextTooLong(
            f"the prompt has {count:,} tokens, the context window holds {max_context:,}{spare}",
            f"start with --ctx {_round_up(count + 256)}, or shorten the prompt",
            context={"prompt_tokens": count, "max_context": max_context},
            param="messages",
        )
    _token_ids("prompt", request.prompt_token_ids, vocab_size)


def _round_up(count: int) -> int:
    return -(-count // 1024) * 1024


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refuse(name, value, f"a whole number from {low} to {high}")


def _token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise _refuse(name, f"token id {token!r}", f"ids from 0 to {vocab_size - 1}")


def _refuse(name: str, value: object, limit: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {str(value)[:80]}, it must be {limit}", f"give {name} {limit}", param=name)
