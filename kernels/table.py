"""All kernel implementations, and the `KernelTable` built from them: the only module that imports both back ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from . import recurrent
from .adapters import Additions
from .cpu import ops as cpu
from .cpu.adapters import CpuAdditions
from .cpu.build import library
from .dense_linear import DENSE, DENSE_BF16, DENSE_TILED, REFERENCE
from .int4pack import INT4PACK
from .registry import OPS, SEGMENTS, Impl, OpFacts, choose, fits_always
from .segments import REFERENCES, KernelTable, composed
from .triton import ops as triton


def _in_chunks(facts: OpFacts) -> str | None:
    return "sums prompts in a different order than single tokens" if facts.deterministic else None


# plain PyTorch only; the last entry of each op fits everything: the reference, or the composed segment
PLAIN: Mapping[str, tuple[Impl, ...]] = {
    "linear": (INT4PACK, DENSE_BF16, DENSE, DENSE_TILED, REFERENCE),
    **{op: (Impl(op, "torch", fits_always, REFERENCES[op]),) for op in OPS},
    "delta_rule": (
        Impl("delta_rule", "chunked", _in_chunks, recurrent.delta_rule_chunked),
        Impl("delta_rule", "torch", fits_always, REFERENCES["delta_rule"]),
    ),
    "state_space": (
        Impl("state_space", "chunked", _in_chunks, recurrent.state_space_chunked),
        Impl("state_space", "torch", fits_always, REFERENCES["state_space"]),
    ),
    **{name: (Impl(name, "composed", fits_always, REFERENCES[name]),) for name in SEGMENTS},
}
BACK_ENDS = (cpu.IMPLS, triton.IMPLS, PLAIN)


def implementations(op: str) -> tuple[Impl, ...]:
    """Return all implementations of an op, a segment or "linear", preferred first."""
    return tuple(impl for impls in BACK_ENDS for impl in impls.get(op, ()))


def additions(device: torch.device, deterministic: bool, exact: bool) -> Callable[..., Additions]:
    """Return the factory of a linear layer's `Additions` (adapter updates), called with its rows, shape and bias.

    exact   no rounding below float32
    """
    if device.type == "cpu" and library().reason is None:
        return partial(CpuAdditions, exact=exact)
    return partial(Additions, tiled=deterministic)


def kernel_table(facts: OpFacts, disabled: frozenset[str] = frozenset()) -> KernelTable:
    """Choose an implementation of every op, compose segments from them, and use fused segments where they fit. Pure.

    disabled   keys of implementations that failed their self-test
    """
    chosen = {name: choose(implementations(name), facts, disabled).impl for name in (*OPS, *SEGMENTS)}
    runs = {op: chosen[op].run for op in OPS}
    for name in SEGMENTS:
        whole = composed(name, runs)
        fuses = chosen[name] not in PLAIN[name]
        runs[name] = partial(chosen[name].run, whole) if fuses else whole
    names = tuple((name, impl.name) for name, impl in chosen.items() if name in OPS or impl not in PLAIN[name])
    return KernelTable(**{name: runs[name] for name in SEGMENTS}, ops=names)
