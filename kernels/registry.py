"""What an implementation of an op is, what decides among several, and the choice. `table.py` lists them all.

An op is a name and a plain-PyTorch reference of the same name in `reference.py`. A segment is a part of a forward pass
that `segments.py` composes of ops; a back end may compute one in fewer calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# what segments are composed of, besides `linear`
RECURRENT = ("causal_conv", "delta_rule", "state_space")  # these carry a state
OPS = ("rms_norm", "rope", "silu_mul", "gelu_tanh_mul", "kv_write", "paged_attention", *RECURRENT)
# each after those it is composed of
MIXERS = ("attn_in", "attention", "attn_out", "latent_attention", "gated_delta", "short_conv", "mamba")
SEGMENTS = (*MIXERS, "mlp", "experts", "layer_input", "streams_in", "streams_out", "head", "decoder", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What decides which implementation is taken.

    device         torch device type
    capability     compute capability as 90, 120; 0 on the CPU
    dtype          activations: float32 | bfloat16 | float16
    deterministic  a row's result must not depend on the other rows of the batch
    """

    device: str = "cpu"
    capability: int = 0
    dtype: str = "float32"
    deterministic: bool = True


@dataclass(frozen=True, slots=True)
class OpFacts(Facts):
    """The same for the ops and segments of a model; kv_format is a key of `kv_pages.KV_DTYPES`."""

    kv_format: str = "f32"
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 16


@dataclass(frozen=True, slots=True)
class LinearFacts(Facts):
    """The same for one linear layer.

    form, group_size, block_type  as in `Weight`
    shape                         (N, K)
    exact                         the dtype was asked for by name: activations are not rounded below it
    activations                   what they may be rounded to where many rows are multiplied: fp8 | nvfp4, or nothing
    """

    form: str
    shape: tuple[int, int]
    group_size: int = 0
    block_type: str = ""
    exact: bool = False
    activations: str = ""


def fits_always(_facts: Any) -> None:
    """The `fits` of an implementation that fits everything."""


def _has_no_weights(_given: Any) -> Any:
    raise TypeError("only implementations of linear prepare weights")


@dataclass(frozen=True, slots=True)
class Impl:
    """One way to compute an op or a segment.

    op       one of OPS, SEGMENTS, or "linear"
    fits     facts -> None, or the reason why not
    run      an op: as its reference; a segment: the composed one, to fall back on, then what `KernelTable` says;
             linear: (x [num_tokens, K], prepared, bias [N] | None) -> [num_tokens, N], dtype of x

    of linear only:

    prepare  canonical Weight -> what `run` wants, which knows its `nbytes`; the canonical tensors are freed afterwards
    rows     prepared -> a reader of rows of the values, exact, for embeddings; None where it knows only whole tables
    rounds   relative RMS error that rounding the activations costs beyond their dtype (8-bit or 4-bit products)
    """

    op: str
    name: str
    fits: Callable[[Any], str | None]
    run: Callable[..., Any]
    prepare: Callable[[Any], Any] = _has_no_weights
    rows: Callable[[Any], Any] = _has_no_weights
    rounds: float = 0.0

    @property
    def key(self) -> str:
        """As failures of the self-test name it."""
        return f"{self.op}:{self.name}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation chosen, and (name, why not) of those before it."""

    impl: Impl
    passed_over: tuple[tuple[str, str], ...] = ()


def choose(impls: Sequence[Impl], facts: Facts, disabled: frozenset[str] = frozenset()) -> Choice:
    """The first of `impls` that fits `facts` and whose key is not in `disabled`. Pure.

    Raises LookupError where there is none; the last one that `table.implementations` gives fits everything.
    """
    passed_over: list[tuple[str, str]] = []
    for impl in impls:
        reason = "failed its self-test" if impl.key in disabled else impl.fits(facts)
        if reason is None:
            return Choice(impl, tuple(passed_over))
        passed_over.append((impl.name, reason))
    raise LookupError(f"no implementation fits {facts}: {passed_over}")
