"""Kernel self-test: at first use on a device, compares each kernel with its reference on the shapes of the model.

Verdicts are cached per kernel sources, device, driver, versions and shapes (`records.py`), so only the first start pays
for them. A kernel that gives wrong results or fails is disabled, the next implementation in order of preference
replaces it, and `failures` reports it in the run summary. References are not tested.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..embedding import Embedding
from ..layer_weights import HeadWeights, LayerCall
from ..registry import OPS, Impl, LinearFacts, choose
from ..sampling import SampleOp
from ..segments import KernelTable
from ..table import PLAIN, implementations, kernel_table
from ..weight import Weight
from .cases import ModelShapes
from .records import Records
from .sampling_trial import sampler_error
from .trial import (
    NoVerdict,
    SegmentTrial,
    ends_kind,
    is_by_kernel,
    is_device_lost,
    layer_kind,
    linear_error,
    op_error,
    unjudged,
)

OPTIONAL = ("zeros", "mins", "perm", "pre_scale")  # tensors of a `Weight`
COMPILING_THREADS = max(1, min(8, os.cpu_count() or 1))


def compiler(device: str, threads: int = 1) -> Callable[[Callable[[], object]], None] | None:
    """A function that compiles the kernels a call would launch, without launching them; None without Triton."""
    if device == "cpu":
        return None
    try:
        from ..triton.launch import compile_ahead
    except ImportError:  # no Triton for this system
        return None
    return partial(compile_ahead, device=torch.device(device), threads=threads)


def _linear_key(facts: LinearFacts, has: Sequence[str]) -> str:
    n, k = facts.shape
    key = f"{facts.form}{facts.block_type} {n}x{k} g{facts.group_size} {facts.dtype}{' exact' * facts.exact}"
    return key + "".join(f" +{name}" for name in has)


@dataclass(frozen=True, slots=True)
class Failure:
    """A kernel disabled by its self-test."""

    name: str  # "op:implementation"
    reason: str  # the failing case with its error, or the exception

    def __str__(self) -> str:
        return f"{self.name} failed its self-test ({self.reason})"


class KernelCrash(RuntimeError):
    """A kernel left the device unusable in its self-test. The verdict is saved, so the next start skips the kernel."""


@dataclass(slots=True)
class SelfTest:
    """The self-tests of one model load, and their results."""

    records: Records = field(default_factory=lambda: Records("selftest", {}))  # default: in memory only
    # compiles a test's kernels in parallel first: one at a time they add a minute to a GPU's first start
    compile_ahead: Callable[[Callable[[], object]], None] | None = None
    failures: list[Failure] = field(default_factory=list)
    num_run: int = 0  # kernels tested in this run; other verdicts were cached
    seconds: float = 0.0

    @property
    def disabled(self) -> frozenset[str]:
        """Keys of failed kernels, for `choose` and `kernel_table`."""
        return frozenset(failure.name for failure in self.failures)

    def table(self, shapes: ModelShapes, disabled: frozenset[str] = frozenset()) -> KernelTable:
        """Return the kernel table of a model, using only ops that passed."""
        for op in OPS:
            while True:
                impl = choose(implementations(op), shapes.facts, disabled | self.disabled).impl
                if impl in PLAIN[op] or self._passed(impl.key, shapes.key, partial(op_error, op, impl.run, shapes)):
                    break
        return kernel_table(shapes.facts, disabled | self.disabled)

    def linear_passed(self, impl: Impl, facts: LinearFacts, weight: Weight, prepared: Any) -> bool:
        """Whether `impl` with its `prepared` weight agrees with the canonical `weight`."""
        if impl is PLAIN["linear"][-1]:
            return True
        has = tuple(name for name in OPTIONAL if getattr(weight, name) is not None)
        return self._passed(impl.key, _linear_key(facts, has), partial(linear_error, impl, facts, weight, prepared))

    def linear_known(self, impl: Impl, facts: LinearFacts, has: Sequence[str]) -> bool:
        """Whether a cached verdict says that `linear_passed` for a weight with these tensors of OPTIONAL."""
        known = self.records.get(f"{impl.key} {_linear_key(facts, has)}")
        return known is not None and not known.get("reason") and impl.key not in self.disabled

    def segments(
        self,
        shapes: ModelShapes,
        table: KernelTable,
        layers: Sequence[LayerCall],
        embedding: Embedding,
        head: HeadWeights,
        rotations: Callable[[int, Tensor], tuple[Tensor, Tensor]],
        disabled: frozenset[str] = frozenset(),
    ) -> KernelTable:
        """Return `table`, or one without the fused segments that disagree with the composed ones on these layers.

        layers     one of each kind in the model
        rotations  (view, positions int64 [n]) -> cos, sin
        """
        while True:
            fused = [(name, impl) for name, impl in table.ops if name not in OPS]
            trial = SegmentTrial(shapes, layers, embedding, head, rotations)
            kinds = ";".join(layer_kind(*layer) for layer in layers)
            ends = dict.fromkeys(("head", "step"), f" {ends_kind(embedding, head)}")
            good = [
                self._passed(
                    f"{name}:{impl}", f"{shapes.key} {kinds}{ends.get(name, '')}", partial(trial.error, name, table)
                )
                for name, impl in fused
            ]
            if all(good):
                return table
            table = kernel_table(shapes.facts, disabled | self.disabled)

    def sampler_passed(self, name: str, run: SampleOp, vocab: int, device: str) -> bool:
        """Whether `run` agrees with `sampling.sample`."""
        return self._passed(f"sample:{name}", f"{vocab}", partial(sampler_error, run, vocab, device))

    def _passed(self, name: str, key: str, error: Callable[[], str]) -> bool:
        if any(failure.name == name for failure in self.failures):
            return False
        known = self.records.get(f"{name} {key}")
        if known is None:
            started = time.monotonic()
            try:
                if self.compile_ahead is not None and not name.startswith("sample:"):  # its test reads the drawn tokens
                    with unjudged():
                        self.compile_ahead(error)
                reason = error()
            except NoVerdict as missing:  # not saved: a compiler or an intact file may be there next time
                self.failures.append(Failure(name, str(missing)))
                return False
            except RuntimeError as crash:
                if not (is_device_lost(crash) and is_by_kernel(crash)):  # a failed GPU says nothing about the kernel
                    raise
                first_line = str(crash).splitlines()[0]
                self.records.put(f"{name} {key}", {"reason": f"it left the device unusable: {first_line}"})
                self.records.save()
                raise KernelCrash(f"{name} crashed the GPU in its self-test: {first_line}") from crash
            self.num_run += 1
            self.seconds += time.monotonic() - started
            known = {"reason": reason}
            self.records.put(f"{name} {key}", known)
        if known.get("reason"):
            self.failures.append(Failure(name, str(known["reason"])))
            return False
        return True

    def save(self) -> None:
        """Save the verdicts for the next start."""
        self.records.save()
