"""Kernel implementations: the `Impl` record, the facts that select among them, and `choose`. `table.py` lists them all.

An op is a name plus a plain-PyTorch reference of the same name in `reference.py`. A segment is a part of the forward
pass that `segments.py` composes from ops; a back end may provide a fused version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# the ops that segments are composed of, besides `linear`
RECURRENT = ("causal_conv", "delta_rule", "state_space")  # carry state between steps
SPARSE = ("index_write", "index_pool", "index_scores", "choose_blocks")
OPS = ("rms_norm", "rope", "silu_mul", "gelu_tanh_mul", "kv_write", "paged_attention", *SPARSE, *RECURRENT)
# in dependency order: a segment comes after the ones it calls
ATTENTION = ("attn_in", "attention", "attn_out", "latent_attention", "compressed_attention")
MIXERS = (*ATTENTION, "gated_delta", "short_conv", "mamba")
STREAMS = ("streams_in", "streams_out", "hyper_in", "hyper_out", "ngrams")  # of several residual streams
SEGMENTS = (*MIXERS, "token_index", "mlp", "experts", "layer_input", *STREAMS, "head", "decoder", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Properties that determine which implementation is chosen.

    device         torch device type
    capability     compute capability, e.g. 90 or 120; 0 on the CPU
    dtype          activations: float32 | bfloat16 | float16
    deterministic  a row's result must not depend on the other rows of the batch
    """

    device: str = "cpu"
    capability: int = 0
    dtype: str = "float32"
    deterministic: bool = True


@dataclass(frozen=True, slots=True)
class OpFacts(Facts):
    """`Facts` for a model's ops and segments; kv_format is a key of `kv_pages.KV_DTYPES`.

    gated   attention has gates
    """

    kv_format: str = "f32"
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 16
    gated: bool = False


@dataclass(frozen=True, slots=True)
class LinearFacts(Facts):
    """`Facts` for one linear layer.

    form, group_size, block_type  as in `Weight`
    shape                         (N, K)
    exact                         the user requested this dtype: activations are not rounded to fewer bits
    activations                   format that activations may be rounded to in large GEMMs: fp8 | nvfp4 | "" (none)
    """

    form: str
    shape: tuple[int, int]
    group_size: int = 0
    block_type: str = ""
    exact: bool = False
    activations: str = ""


def fits_always(_facts: Any) -> None:
    """Accept any facts: the `fits` of an implementation without restrictions."""


def _has_no_weights(_weight: Any) -> Any:
    raise TypeError("only implementations of linear prepare weights")


@dataclass(frozen=True, slots=True)
class Impl:
    """One way to compute an op or a segment.

    op       one of OPS, SEGMENTS, or "linear"
    fits     facts -> None if supported, else the reason why not
    run      op: signature of its reference; segment: (composed segment as fallback, arguments as in `KernelTable`);
             linear: (x [num_tokens, K], prepared, bias [N] | None) -> [num_tokens, N] in the dtype of x

    Only for linear:

    prepare  canonical Weight -> prepared weight for `run`, with `nbytes`; the canonical tensors are freed afterwards
    rows     prepared -> function that reads exact rows of the weight, for embeddings; None if rows are not addressable
    rounds   relative RMS error from rounding activations below their dtype (8-bit and 4-bit products)
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
        """The name used in self-test failures and in `disabled` sets."""
        return f"{self.op}:{self.name}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen implementation, and (name, reason) for each preferred one that was passed over."""

    impl: Impl
    passed_over: tuple[tuple[str, str], ...] = ()


def choose(impls: Sequence[Impl], facts: Facts, disabled: frozenset[str] = frozenset()) -> Choice:
    """Return the first of `impls` that fits `facts` and whose key is not in `disabled`. Pure.

    Raises LookupError if none fits; the last entry of `table.implementations` always does.
    """
    passed_over: list[tuple[str, str]] = []
    for impl in impls:
        reason = "failed its self-test" if impl.key in disabled else impl.fits(facts)
        if reason is None:
            return Choice(impl, tuple(passed_over))
        passed_over.append((impl.name, reason))
    raise LookupError(f"no implementation fits {facts}: {passed_over}")
