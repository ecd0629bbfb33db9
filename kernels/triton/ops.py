"""What Triton has for NVIDIA cards: a list of implementations, and what each of them fits.

Importing this module loads neither Triton nor a kernel: on a machine without a card Triton may be missing.

`triton` takes the fastest kernel for the number of rows; in `triton_invariant` no other row and no chunk of a prompt
changes a bit, which costs attention its tiles of queries, and recurrences their chunks. By permission of the user
(`LinearFacts.activations`) `triton_fp8_w8a8` and `triton_nvfp4_w4a4` round x for products of many rows; no other
product rounds it, and weights of every form stay as small as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from ..registry import Facts, Impl, LinearFacts, OpFacts
from .cards import AMD, name_of
from .layout import CODES, FORMS, GGUF, prepare

FP8_CAPABILITY = 89  # from here on tensor cores take E4M3
FP4_CAPABILITY = 100  # from here on they take block-scaled E2M1
LARGEST_HEAD = 512
LARGEST_PLAIN_HEAD = 256  # without tensor cores, or in pages of float32: twice as much is more than shared memory holds
PAGE_SIZES = (16, 32, 64)
GROUPED = {"int4g": "int4", "int8": "int8"}


def _fits(facts: Facts) -> str | None:
    if facts.device != "cuda":
        return f"runs on NVIDIA cards, not on {facts.device}"
    if facts.capability >= AMD:
        return f"no kernel has run on an AMD card ({name_of(facts.capability)}) yet: they only compile"
    if facts.capability < 75:
        return f"needs compute capability 7.5, this is {facts.capability / 10}"
    if facts.dtype == "bfloat16" and facts.capability < 80:
        return "no bfloat16 below compute capability 8.0"
    return None


def _attention_fits(facts: OpFacts, *, whole_chunks: bool = False) -> str | None:
    """None, or why pages and heads like these are not for the kernels that read or write them."""
    if whole_chunks and facts.deterministic:
        return "a chunk of one token is summed in another order than one of several"
    if facts.kv_format == "bf16" and facts.capability < 80:
        return "no bfloat16 below compute capability 8.0"
    largest = LARGEST_PLAIN_HEAD if facts.capability < 80 or facts.kv_format == "f32" else LARGEST_HEAD
    if facts.head_dim > largest or facts.head_dim % 8:
        return f"heads of {facts.head_dim}: at most {largest}, a multiple of 8"
    if facts.page_size not in PAGE_SIZES:
        return f"pages of {facts.page_size}, not one of {PAGE_SIZES}"
    return _fits(facts)


def _latents_fit(facts: OpFacts, *, whole_chunks: bool = False) -> str | None:
    """None, or why latents in such pages are not for the kernel"""
    if whole_chunks and facts.deterministic:
        return "splits the keys of a prompt's tokens otherwise than those of single ones"
    if facts.capability < 80:
        return "Triton has no tensor cores below compute capability 8.0"
    if facts.kv_format == "f32":
        return "float32 latents take more shared memory than every card has"
    if facts.page_size not in PAGE_SIZES:
        return f"pages of {facts.page_size}, not one of {PAGE_SIZES}"
    return _fits(facts)


def _chunks_fit(facts: OpFacts) -> str | None:
    """None, or why a recurrence must not take several tokens of a prompt at once."""
    if facts.deterministic:
        return "a prompt is summed in another order than single tokens"
    if facts.dtype == "float32":
        return "rounds factors to TF32, activations are float32"
    if facts.capability < 80:
        return "no TF32 below compute capability 8.0"
    return _fits(facts)


def _linear_fits(facts: LinearFacts, *, fixed_order: bool = False) -> str | None:
    reason = _fits(facts)
    if reason is not None:
        return reason
    if facts.dtype == "float32":
        return f"activations are {facts.dtype}"
    if facts.form not in FORMS:
        return f"no layout for weights of form {facts.form}"
    if facts.form == "gguf" and facts.block_type not in GGUF:
        return f"no layout for {facts.block_type} blocks"
    if facts.form in GROUPED and 0 < facts.group_size < facts.shape[1]:
        chunk = CODES[GROUPED[facts.form]].chunk
        if facts.group_size % chunk:
            return f"groups of {facts.group_size} are not a multiple of {chunk}"
    if fixed_order:
        return "Triton has no tensor cores below compute capability 8.0" if facts.capability < 80 else None
    return "sums one row in another order than several" if facts.deterministic else None


def _rounding_fits(facts: LinearFacts, *, activations: str, form: str) -> str | None:
    if facts.activations != activations:
        return f"rounds activations to {activations}, which was not asked for"
    if facts.form != form:
        return f"multiplies {form} weights, not {facts.form}"
    if activations == "nvfp4" and facts.capability < FP4_CAPABILITY:
        return f"no FP4 instructions on compute capability {facts.capability / 10}"
    if facts.capability < FP8_CAPABILITY:
        return "no FP8 instructions below compute capability 8.9"
    return _linear_fits(facts)


def _lazily(module: str, function: str) -> Callable[..., Any]:
    """The function, its module being loaded when it is first called."""
    found: list[Callable[..., Any]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(getattr(import_module(f".{module}", __package__), function))
        return found[0](*args, **kwargs)

    return run


def _impl(op: str, module: str, fits: Callable[[OpFacts], str | None] = _fits) -> tuple[Impl, ...]:
    return (Impl(op, "triton", fits, _lazily(module, op)),)


def _recurrence(op: str) -> tuple[Impl, ...]:
    run = _lazily("recurrent", op)
    by_token = Impl(op, "triton_invariant", _fits, partial(run, by_token=True))
    return (Impl(op, "triton", _chunks_fit, run), by_token)


def _linear(name: str, fits: Callable[[LinearFacts], str | None], run: Callable[..., Any], rounds: float = 0.0) -> Impl:
    return Impl("linear", name, fits, run, prepare, partial(partial, _lazily("product", "rows")), rounds)


_fp8 = partial(_rounding_fits, activations="fp8", form="fp8")
_nvfp4 = partial(_rounding_fits, activations="nvfp4", form="fp4g16")
_PRODUCT = _lazily("product", "linear")
_NARROW = _lazily("narrow", "narrow_product")
_LATENTS = _lazily("latent", "latent_attention")
_ATTENTION = _lazily("attention", "paged_attention")
IMPLS: Mapping[str, tuple[Impl, ...]] = {
    "linear": (
        _linear("triton_fp8_w8a8", _fp8, _NARROW, rounds=0.026),
        _linear("triton_nvfp4_w4a4", _nvfp4, _NARROW, rounds=0.1),
        _linear("triton", _linear_fits, _PRODUCT),
        _linear("triton_invariant", partial(_linear_fits, fixed_order=True), partial(_PRODUCT, fixed_order=True)),
    ),
    "rms_norm": _impl("rms_norm", "rms_norm"),
    "rope": _impl("rope", "heads"),
    "silu_mul": _impl("silu_mul", "activation"),
    "gelu_tanh_mul": _impl("gelu_tanh_mul", "activation"),
    "kv_write": _impl("kv_write", "heads", _attention_fits),
    "paged_attention": (
        Impl("paged_attention", "triton", partial(_attention_fits, whole_chunks=True), _ATTENTION),
        Impl("paged_attention", "triton_invariant", _attention_fits, partial(_ATTENTION, by_token=True)),
    ),
    "causal_conv": _impl("causal_conv", "recurrent"),
    "delta_rule": _recurrence("delta_rule"),
    "state_space": _recurrence("state_space"),
    "latent_attention": (
        Impl("latent_attention", "triton", partial(_latents_fit, whole_chunks=True), _LATENTS),
        Impl("latent_attention", "triton_invariant", _latents_fit, partial(_LATENTS, by_token=True)),
    ),
    "attn_in": _impl("attn_in", "segments", _attention_fits),
    "attn_out": _impl("attn_out", "segments"),
    "mlp": _impl("mlp", "segments"),
    "experts": _impl("experts", "experts"),
    "head": _impl("head", "segments"),
}
