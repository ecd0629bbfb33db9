"""The Triton back end: its implementations, and the conditions under which each one fits.

Importing this module imports neither Triton nor any kernel, as Triton may be missing on machines without a GPU.

`triton` uses the fastest kernel for the number of rows. `triton_apart` launches more kernels, each of which does less;
it replaces a segment that fails its self-test. `triton_invariant` is bitwise independent of batch and prompt
chunking, so attention cannot tile queries and recurrences cannot run in chunks. If the user allows it
(`LinearFacts.activations`), `triton_fp8_w8a8` and `triton_nvfp4_w4a4` quantize x for products of many rows; no other
product does. Weights of every form keep their stored size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from ..registry import Facts, Impl, LinearFacts, OpFacts
from .cards import AMD, name_of
from .layout import CODES, FORMS, GGUF, prepare

FP8_CAPABILITY = 89  # first compute capability whose tensor cores support E4M3
FP4_CAPABILITY = 100  # first one whose tensor cores support block-scaled E2M1
LARGEST_HEAD = 512
LARGEST_PLAIN_HEAD = 256  # without tensor cores, or with float32 pages: 512 does not fit in shared memory
PAGE_SIZES = (16, 32, 64)
GROUPED = {"int4g": "int4", "int8": "int8"}


def _fits(facts: Facts) -> str | None:
    if facts.device != "cuda":
        return f"runs on NVIDIA GPUs, not on {facts.device}"
    if facts.capability >= AMD:
        return f"the kernels compile for AMD GPUs ({name_of(facts.capability)}), but have not been run on one"
    if facts.capability < 75:
        return f"needs compute capability 7.5 or higher, this GPU has {facts.capability / 10}"
    if facts.dtype == "bfloat16" and facts.capability < 80:
        return "no bfloat16 below compute capability 8.0"
    return None


def _attention_fits(facts: OpFacts, *, whole_chunks: bool = False) -> str | None:
    """Return None, or why the kernels that read and write pages do not support these pages and heads."""
    if whole_chunks and facts.deterministic:
        return "sums a chunk of one token in a different order than longer chunks"
    if facts.kv_format == "bf16" and facts.capability < 80:
        return "no bfloat16 below compute capability 8.0"
    largest = LARGEST_PLAIN_HEAD if facts.capability < 80 or facts.kv_format == "f32" else LARGEST_HEAD
    if facts.head_dim > largest or facts.head_dim % 8:
        return f"head_dim must be a multiple of 8 and at most {largest}, not {facts.head_dim}"
    if facts.page_size not in PAGE_SIZES:
        return f"page size must be one of {PAGE_SIZES}, not {facts.page_size}"
    return _fits(facts)


def _gates_fit(facts: OpFacts) -> str | None:
    """Return None, or why there are no gates to multiply by."""
    return _fits(facts) if facts.gated else "attention has no gates"


def _latents_fit(facts: OpFacts, *, whole_chunks: bool = False) -> str | None:
    """Return None, or why the latent attention kernel does not support these pages."""
    if whole_chunks and facts.deterministic:
        return "splits the keys of prompt tokens differently from those of single tokens"
    if facts.capability < 80:
        return "Triton cannot use tensor cores below compute capability 8.0"
    if facts.kv_format == "f32":
        return "float32 latents do not fit in the shared memory of all GPUs"
    if facts.page_size not in PAGE_SIZES:
        return f"page size must be one of {PAGE_SIZES}, not {facts.page_size}"
    return _fits(facts)


def _chunks_fit(facts: OpFacts) -> str | None:
    """Return None, or why a recurrence must not process a prompt in chunks."""
    if facts.deterministic:
        return "sums prompts in a different order than single tokens"
    if facts.dtype == "float32":
        return "rounds factors to TF32, but activations are float32"
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
            return f"group size must be a multiple of {chunk}, not {facts.group_size}"
    if fixed_order:
        return "Triton cannot use tensor cores below compute capability 8.0" if facts.capability < 80 else None
    return "sums one row in a different order than several" if facts.deterministic else None


def _rounding_fits(facts: LinearFacts, *, activations: str, form: str) -> str | None:
    if facts.activations != activations:
        return f"rounds activations to {activations}, which was not requested"
    if facts.form != form:
        return f"multiplies {form} weights, not {facts.form}"
    if activations == "nvfp4" and facts.capability < FP4_CAPABILITY:
        return f"no FP4 instructions on compute capability {facts.capability / 10}"
    if facts.capability < FP8_CAPABILITY:
        return "no FP8 instructions below compute capability 8.9"
    return _linear_fits(facts)


def _lazily(module: str, function: str) -> Callable[..., Any]:
    """Return a wrapper that imports the function's module on the first call."""
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
    return (Impl(op, "triton", _chunks_fit, run), _by_token(op, run))


def _by_token(op: str, run: Callable[..., Any]) -> Impl:
    return Impl(op, "triton_invariant", _fits, partial(run, by_token=True))


def _segment(op: str, module: str = "segments", fits: Callable[[OpFacts], str | None] = _fits) -> tuple[Impl, ...]:
    """A segment, and the same with more kernels, which replaces one that fails its self-test."""
    run = _lazily(module, op)
    return (Impl(op, "triton", fits, run), Impl(op, "triton_apart", fits, partial(run, apart=True)))


def _recurrent_segment(op: str) -> tuple[Impl, ...]:
    return (*_segment(op, fits=_chunks_fit), _by_token(op, _lazily("segments", op)))


def _linear(name: str, fits: Callable[[LinearFacts], str | None], run: Callable[..., Any], rounds: float = 0.0) -> Impl:
    return Impl("linear", name, fits, run, prepare, partial(partial, _lazily("product", "rows")), rounds)


_fp8 = partial(_rounding_fits, activations="fp8", form="fp8")
_nvfp4 = partial(_rounding_fits, activations="nvfp4", form="fp4g16")
_PRODUCT = _lazily("product", "linear")
_NARROW = _lazily("narrow", "narrow_product")
_LATENTS = _lazily("latent", "latent_attention")
_ENTRIES = _lazily("compressed", "compressed_attention")
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
    "index_write": _impl("index_write", "token_index"),
    "index_pool": _impl("index_pool", "token_index"),
    "index_scores": _impl("index_scores", "token_index"),
    "choose_blocks": _impl("choose_blocks", "token_index"),
    "causal_conv": _impl("causal_conv", "recurrent"),
    "delta_rule": _recurrence("delta_rule"),
    "state_space": _recurrence("state_space"),
    "latent_attention": (
        Impl("latent_attention", "triton", partial(_latents_fit, whole_chunks=True), _LATENTS),
        Impl("latent_attention", "triton_invariant", _latents_fit, partial(_LATENTS, by_token=True)),
    ),
    "compressed_attention": (
        Impl("compressed_attention", "triton", partial(_latents_fit, whole_chunks=True), _ENTRIES),
        Impl("compressed_attention", "triton_invariant", _latents_fit, partial(_ENTRIES, by_token=True)),
    ),
    "attn_in": _segment("attn_in", fits=_attention_fits),
    "attention": _impl("attention", "segments", _gates_fit),
    "attn_out": _impl("attn_out", "segments"),
    "gated_delta": _recurrent_segment("gated_delta"),
    "mamba": _recurrent_segment("mamba"),
    "short_conv": _impl("short_conv", "segments"),
    "mlp": _segment("mlp"),
    "experts": _segment("experts", "experts"),
    "layer_input": _impl("layer_input", "segments"),
    "hyper_in": _impl("hyper_in", "hyper"),
    "hyper_out": _impl("hyper_out", "hyper"),
    "head": _impl("head", "segments"),
}
