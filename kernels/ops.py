"""The ops other than `linear`: their implementations in order of preference, and the choice among them.

An op's implementations share the signature of the function of the same name in `reference.py`. A back end registers
its own in a module with `IMPLS: Mapping[str, tuple[OpImpl, ...]]`, keyed by op or segment name; the twin is last.
A fused segment takes the composed one as its first argument, to fall back on, and then what `KernelTable` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from . import reference

OPS = ("rms_norm", "rope", "silu_mul", "gelu_tanh_mul", "kv_write", "paged_attention")
"""The ops a decoder layer is made of, besides `linear`."""
OUTER_OPS = ("embedding",)
"""Those around the layers, which no `KernelTable` holds."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What decides which implementation of an op a model gets."""

    device: str = "cpu"
    """torch device type"""
    capability: int = 0
    """compute capability as 90, 120; 0 on the CPU"""
    dtype: str = "float32"
    """activations: float32 | bfloat16 | float16"""
    kv_format: str = "f32"
    """a key of `kv_pages.KV_DTYPES`"""
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 16
    deterministic: bool = True
    """a token's result must not depend on the other tokens of the batch"""


@dataclass(frozen=True, slots=True)
class OpImpl:
    """One way to compute an op: `fits` gives None or the reason why not, `run` has the twin's signature."""

    name: str
    fits: Callable[[OpFacts], str | None]
    run: Callable[..., Any]


def op_impls(op: str) -> tuple[OpImpl, ...]:
    """All implementations of an op, preferred first; the plain-PyTorch twin is last and fits everything."""
    return (*_registered(op), OpImpl("torch", lambda facts: None, getattr(reference, op)))


def choose_op(op: str, facts: OpFacts, quarantined: frozenset[str] = frozenset()) -> OpImpl:
    """The first implementation of `op` that fits and is not quarantined (`"op:name"`)."""
    chosen = _first(op, op_impls(op), facts, quarantined)
    if chosen is None:
        raise LookupError(f"no implementation of {op} fits {facts}")
    return chosen


def choose_segment(segment: str, facts: OpFacts, quarantined: frozenset[str] = frozenset()) -> OpImpl | None:
    """The first fused implementation of `segment` that fits; None leaves the composed one."""
    return _first(segment, _registered(segment), facts, quarantined)


def _registered(name: str) -> tuple[OpImpl, ...]:
    from .cpu import ops as cpu_ops
    from .triton import ops as triton_ops

    return (*cpu_ops.IMPLS.get(name, ()), *triton_ops.IMPLS.get(name, ()))


def _first(name: str, impls: Iterable[OpImpl], facts: OpFacts, quarantined: frozenset[str]) -> OpImpl | None:
    fitting = (i for i in impls if f"{name}:{i.name}" not in quarantined and i.fits(facts) is None)
    return next(fitting, None)
