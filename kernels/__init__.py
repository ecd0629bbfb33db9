"""Functions of tensors: know no model, no stored format's name in a file, no config.

An op is a name, a plain-PyTorch twin in `reference.py`, and implementations in order of preference. `choose` is pure:
from the facts of a layer, and from the self-test's verdicts, it gives the first implementation that fits and says why
the ones before it do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .weight import Weight

__all__ = ["Choice", "Impl", "LinearFacts", "Weight", "choose", "linear_impls"]


@dataclass(frozen=True, slots=True)
class LinearFacts:
    """What decides which implementation of `linear` a layer gets."""

    form: str
    """`Weight.form`"""
    shape: tuple[int, int]
    """(N, K)"""
    group_size: int = 0
    block_type: str = ""
    device: str = "cpu"
    """torch device type"""
    capability: int = 0
    """compute capability as 90, 120; 0 on the CPU"""
    dtype: str = "float32"
    """activations: float32 | bfloat16 | float16"""
    exact: bool = False
    """the user asked for this dtype by name: no rounding of activations below it"""
    deterministic: bool = True
    """a row's result must not depend on the other rows of the batch"""
    activations: str = ""
    """what activations may be rounded to where many rows are multiplied: fp8 | nvfp4, or nothing"""


@dataclass(frozen=True, slots=True)
class Impl:
    """One way to compute an op.

    fits     facts -> None, or the reason why not
    prepare  canonical Weight -> whatever `run` wants; the canonical tensors are freed afterwards
    run      (x [num_tokens, K], prepared, bias [N] | None) -> [num_tokens, N], dtype of x
    unpack   prepared -> float32 [N, K], exact: for the twin, embeddings and the quality meter
    nbytes   bytes a prepared weight holds
    rounds   relative RMS error that rounding the activations costs beyond their dtype (8-bit or 4-bit products)
    """

    name: str
    fits: Callable[[LinearFacts], str | None]
    prepare: Callable[[Weight], Any]
    run: Callable[..., Any]
    unpack: Callable[[Any], Any]
    nbytes: Callable[[Any], int]
    rounds: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation chosen for a layer, and why not the ones before it."""

    impl: Impl
    passed_over: tuple[tuple[str, str], ...] = ()


def choose(impls: Iterable[Impl], facts: LinearFacts, quarantined: frozenset[str] = frozenset()) -> Choice:
    """The first of `impls` that fits `facts` and is not quarantined. The twin always fits, so there is one."""
    passed_over: list[tuple[str, str]] = []
    for impl in impls:
        reason = "failed its self-test" if impl.name in quarantined else impl.fits(facts)
        if reason is None:
            return Choice(impl, tuple(passed_over))
        passed_over.append((impl.name, reason))
    raise LookupError(f"no implementation fits {facts}: {passed_over}")


def linear_impls() -> tuple[Impl, ...]:
    """All implementations of `linear`, preferred first. The plain-PyTorch twin is last and fits everything."""
    from . import linear
    from .cpu import linear as cpu_linear
    from .triton import linear as triton_linear

    return (*cpu_linear.IMPLS, *triton_linear.IMPLS, *linear.IMPLS)
