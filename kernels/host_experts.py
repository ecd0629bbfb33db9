"""Experts of a mixture that lie in host memory and are computed by the CPU, beside a device that has the others.

Mostly only activations cross: a layer's rows go over once, and what an expert gives for them comes back. An expert that
has many rows of a step is streamed: the device gets its weights for this step, which then takes less time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

HALF_LIFE = 4096  # tokens after which a use counts half of what a new one counts


class Product(Protocol):
    """A `layer_weights.Linear`."""

    def __call__(self, x: Tensor, /) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class Moved:
    """Bytes that went between the device and host memory so far, and what of them were whole experts."""

    to_host: int = 0  # activations
    to_device: int = 0
    read: int = 0  # weights that the CPU read
    streamed: int = 0  # weights that the device got for one step
    exchanged: int = 0  # weights of experts that changed their places, both ways
    chosen: int = 0  # of all tokens, the experts they were sent to
    on_device: int = 0  # of these, the ones that lay on the device


@dataclass(slots=True)
class HostExperts:
    """The experts of one layer that lie in host memory, their weights prepared for the CPU.

    gate_up, down   by the expert's number; they change between steps only
    activate        what lies between them
    fetch           an expert's products, read anew: (its number, whether for the CPU) -> gate_up, down
    uses            int64 [num_experts]: tokens that each expert of the layer had, on either side
    stream_rows     an expert with so many rows in a step is streamed; 0: none is
    heat            float64 [num_experts]: `uses`, where old ones count less
    """

    gate_up: dict[int, Product]
    down: dict[int, Product]
    activate: Callable[[Tensor], Tensor]
    fetch: Callable[[int, bool], tuple[Any, Any]]
    uses: Tensor
    stream_rows: int = 0
    moved: Moved = field(default_factory=Moved)
    heat: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.heat = torch.zeros(self.uses.shape[0], dtype=torch.float64)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for each in (self.gate_up, self.down) for one in each.values())

    def take(self, x: Tensor, rows: Tensor, counts: Sequence[int]) -> HostRows | None:
        """A step's rows for the experts here; None where no token goes to one of them.

        rows    int64: the row of every token that an expert has, by expert
        counts  tokens of each expert of the layer
        """
        new, theirs = torch.tensor(counts), [counts[expert] for expert in self.gate_up]
        self.uses += new
        self.heat.mul_(0.5 ** (x.shape[0] / HALF_LIFE)).add_(new)
        self.moved.chosen += sum(counts)
        self.moved.on_device += sum(counts) - sum(theirs)
        if not any(theirs):
            return None
        if all(self.streams(count) for count in theirs if count):
            return HostRows(self, x, rows)
        self.moved.to_host += x.nbytes
        return HostRows(self, _to_host(x).float(), rows.cpu(), x.device)

    def streams(self, count: int) -> bool:
        """Whether an expert here with so many rows is computed on the device."""
        return 0 < self.stream_rows <= count

    def exchange(self, comes: int, goes: int) -> tuple[Any, Any]:
        """Between steps: let expert `goes` take the place of `comes` here; returns what the device is to compute with.

        Where that fails nothing has changed.
        """
        given, taken = self.fetch(comes, False), self.fetch(goes, True)
        del self.gate_up[comes], self.down[comes]
        self.gate_up[goes], self.down[goes] = taken
        self.moved.exchanged += sum(one.nbytes for one in (*given, *taken))
        return given


@dataclass(frozen=True, slots=True)
class HostRows:
    """The rows of a step in host memory; on the device where all that have any are streamed."""

    experts: HostExperts
    x: Tensor  # float32
    rows: Tensor
    device: torch.device | None = None

    def __contains__(self, expert: int) -> bool:
        return expert in self.experts.gate_up

    def given(self, expert: int, start: int, end: int) -> Tensor:
        """What an expert gives for its rows `rows[start:end]`: float32 on the device."""
        here = self.experts
        gate_up, down = here.gate_up[expert], here.down[expert]
        given = down(here.activate(gate_up(self.x[self.rows[start:end]])))
        here.moved.to_device += given.nbytes
        here.moved.read += gate_up.nbytes + down.nbytes
        if self.device is None or self.device.type == "cpu":
            return given
        return given.pin_memory().to(self.device, non_blocking=True)

    def lent(self, expert: int) -> tuple[Product, Product]:
        """An expert's products on the device, for this step."""
        products = self.experts.fetch(expert, False)
        self.experts.moved.streamed += sum(one.nbytes for one in products)
        return products


def _to_host(x: Tensor) -> Tensor:
    """A copy in pinned memory, complete when this returns."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
