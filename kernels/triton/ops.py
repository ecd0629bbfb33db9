"""Ops other than `linear` in Triton for NVIDIA cards, looked up by `kernels.ops.op_impls`, as in `reference.py`.

Importing this module loads neither Triton nor a kernel. Names: `triton`, and `triton_invariant` where no chunk of a
prompt may change a bit, which costs attention its tiles of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ..ops import OpFacts, OpImpl

__all__ = ["IMPLS", "attention_fits", "fits"]

LARGEST_HEAD = 256
PAGE_SIZES = (16, 32, 64)


def fits(facts: OpFacts) -> str | None:
    """None, or why no kernel of this package runs there."""
    if facts.device != "cuda":
        return f"runs on NVIDIA cards, not on {facts.device}"
    if facts.capability < 75:
        return f"needs compute capability 7.5, this is {facts.capability / 10}"
    if facts.dtype == "bfloat16" and facts.capability < 80:
        return "no bfloat16 below compute capability 8.0"
    return None


def attention_fits(facts: OpFacts) -> str | None:
    """None, or why pages and heads like these are not for the kernels that read or write them."""
    if facts.kv_format == "bf16" and facts.capability < 80:
        return "no bfloat16 below compute capability 8.0"
    if facts.head_dim > LARGEST_HEAD or facts.head_dim % 8:
        return f"heads of {facts.head_dim}: at most {LARGEST_HEAD}, a multiple of 8"
    if facts.page_size not in PAGE_SIZES:
        return f"pages of {facts.page_size}, not one of {PAGE_SIZES}"
    return fits(facts)


def _chunks_fit(facts: OpFacts) -> str | None:
    if facts.deterministic:
        return "a chunk of one token is summed in another order than one of several"
    return attention_fits(facts)


def _lazily(module: str, function: str) -> Callable[..., Any]:
    """The function, its module being loaded when it is first called."""
    found: list[Callable[..., Any]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(getattr(import_module(f".{module}", __package__), function))
        return found[0](*args, **kwargs)

    return run


def _impl(module: str, op: str, fitting: Callable[[OpFacts], str | None] = fits) -> tuple[OpImpl, ...]:
    return (OpImpl("triton", fitting, _lazily(module, op)),)


IMPLS: Mapping[str, tuple[OpImpl, ...]] = {
    "rms_norm": _impl("rms_norm", "rms_norm"),
    "rope": _impl("rope", "rope"),
    "silu_mul": _impl("activation", "silu_mul"),
    "gelu_tanh_mul": _impl("activation", "gelu_tanh_mul"),
    "embedding": _impl("embedding", "embedding"),
    "kv_write": _impl("kv_write", "kv_write", attention_fits),
    "paged_attention": (
        OpImpl("triton", _chunks_fit, _lazily("attention", "paged_attention")),
        OpImpl("triton_invariant", attention_fits, _lazily("attention", "paged_attention_by_token")),
    ),
    "attn_in": _impl("attn_in", "attn_in", attention_fits),
    "attn_out": _impl("segments", "attn_out"),
    "mlp": _impl("segments", "mlp"),
    "head": _impl("segments", "head"),
}
