"""Kernels prove themselves: at first use on a device, each one against its reference, on the shapes of the model.

A verdict is kept per kernel sources, device, driver, versions and shapes (`records.py`), so a start costs it once. A
kernel that is wrong, or fails, is disabled: the next one in the order of preference takes its place, and `failures`
says so for the run summary. The references are not tested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from ..embedding import Embedding
from ..layer_weights import HeadWeights, LayerCall
from ..registry import OPS, Impl, LinearFacts, choose
from ..segments import KernelTable
from ..table import PLAIN, implementations, kernel_table
from ..weight import Weight
from .cases import ModelShapes
from .records import Records
from .sampling_trial import SampleOp, sampler_error
from .trial import NoVerdict, SegmentTrial, ends_kind, is_device_lost, layer_kind, linear_error, op_error, unjudged

OPTIONAL = ("zeros", "mins", "perm", "pre_scale")  # tensors of a `Weight`


def _linear_key(facts: LinearFacts, has: Sequence[str]) -> str:
    n, k = facts.shape
    key = f"{facts.form}{facts.block_type} {n}x{k} g{facts.group_size} {facts.dtype}{' exact' * facts.exact}"
    return key + "".join(f" +{name}" for name in has)


@dataclass(frozen=True, slots=True)
class Failure:
    """A kernel that is disabled."""

    name: str  # "op:implementation"
    reason: str  # which case, how far off, or what it raised

    def __str__(self) -> str:
        return f"{self.name} failed its self-test ({self.reason})"


class KernelCrash(RuntimeError):
    """A kernel left the device unusable in its self-test. The verdict is kept: the next start passes it over."""


@dataclass(slots=True)
class SelfTest:
    """The tests of one load, and what they found."""

    records: Records = field(default_factory=lambda: Records("selftest", {}))  # by default kept in memory only
    # compiles what a test will launch, several kernels at once: one by one they take a card's first start a minute
    compile_ahead: Callable[[Callable[[], object]], None] | None = None
    failures: list[Failure] = field(default_factory=list)
    num_run: int = 0  # kernels tested in this run; the others were known
    seconds: float = 0.0

    @property
    def disabled(self) -> frozenset[str]:
        """As `choose` and `kernel_table` take them."""
        return frozenset(failure.name for failure in self.failures)

    def table(self, shapes: ModelShapes, disabled: frozenset[str] = frozenset()) -> KernelTable:
        """The kernel table of a model whose ops all passed."""
        for op in OPS:
            while True:
                impl = choose(implementations(op), shapes.facts, disabled | self.disabled).impl
                if impl in PLAIN[op] or self._passed(impl.key, shapes.key, partial(op_error, op, impl.run, shapes)):
                    break
        return kernel_table(shapes.facts, disabled | self.disabled)

    def linear_passed(self, impl: Impl, facts: LinearFacts, weight: Weight, prepared: Any) -> bool:
        """Whether `impl` multiplies with what it prepared as the canonical `weight` says."""
        if impl is PLAIN["linear"][-1]:
            return True
        has = tuple(name for name in OPTIONAL if getattr(weight, name) is not None)
        return self._passed(impl.key, _linear_key(facts, has), partial(linear_error, impl, facts, weight, prepared))

    def linear_known(self, impl: Impl, facts: LinearFacts, has: Sequence[str]) -> bool:
        """Whether `linear_passed` was true before for a weight that has these tensors of OPTIONAL."""
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
        """`table`, or one without the fused segments that disagree with the composed ones on these layers.

        layers     one of each kind the model has
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
        """Whether `run` samples as `sampling.sample` does."""
        return self._passed(f"sample:{name}", f"{vocab}", partial(sampler_error, run, vocab, device))

    def _passed(self, name: str, key: str, error: Callable[[], str]) -> bool:
        if any(failure.name == name for failure in self.failures):
            return False
        known = self.records.get(f"{name} {key}")
        if known is None:
            started = time.monotonic()
            try:
                if self.compile_ahead is not None and not name.startswith("sample:"):  # it reads what was drawn
                    with unjudged():
                        self.compile_ahead(error)
                reason = error()
            except NoVerdict as missing:  # tomorrow there may be a compiler, or a file with sound numbers
                self.failures.append(Failure(name, str(missing)))
                return False
            except RuntimeError as crash:
                if not is_device_lost(crash):
                    raise
                said = str(crash).splitlines()[0]
                self.records.put(f"{name} {key}", {"reason": f"it left the device unusable: {said}"})
                self.records.save()
                raise KernelCrash(f"{name} crashed the GPU in its self-test: {said}") from crash
            self.num_run += 1
            self.seconds += time.monotonic() - started
            known = {"reason": reason}
            self.records.put(f"{name} {key}", known)
        if known.get("reason"):
            self.failures.append(Failure(name, str(known["reason"])))
            return False
        return True

    def save(self) -> None:
        """Keep the verdicts for the next start."""
        self.records.save()
