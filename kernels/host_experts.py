"""MoE offload: experts kept in host memory and computed by the CPU while the device computes the rest.

Usually only activations are transferred: a layer's rows once to the host, and the experts' outputs back. An expert with
many rows in a step is streamed instead: its weights are copied to the device for that step, which is then faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

HALF_LIFE = 4096  # tokens after which the weight of a use in `heat` has halved


class Product(Protocol):
    """A `layer_weights.Linear`."""

    def __call__(self, x: Tensor, /) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class Moved:
    """Transfer counters in bytes since load, and (token, expert) counts."""

    to_host: int = 0  # activations
    to_device: int = 0  # activations
    read: int = 0  # expert weights read by the CPU
    streamed: int = 0  # expert weights copied to the device for one step
    exchanged: int = 0  # weights of experts swapped between host and device, both directions
    chosen: int = 0  # (token, expert) pairs routed
    on_device: int = 0  # of those, pairs whose expert is on the device


@dataclass(slots=True)
class HostExperts:
    """One layer's experts in host memory, with weights prepared for the CPU.

    gate_up, down   by expert index; change only between steps
    activate        the activation between them
    fetch           reload an expert's linear layers: (expert, for the CPU?) -> gate_up, down
    uses            int64 [num_experts]: tokens routed to each expert of the layer, on host and device
    stream_rows     an expert with at least this many rows in a step is streamed; 0 disables streaming
    heat            float64 [num_experts]: `uses` with exponential decay
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
        """Return a step's rows for the host experts; None if no token is routed to one of them.

        rows    int64: row of x for each (token, expert) pair, grouped by expert
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
        """Whether a host expert with `count` rows is computed on the device."""
        return 0 < self.stream_rows <= count

    def exchange(self, comes: int, goes: int) -> tuple[Any, Any]:
        """Move expert `goes` to the host in place of `comes`, between steps; returns `comes`' layers for the device.

        On failure nothing has changed.
        """
        for_device, for_host = self.fetch(comes, False), self.fetch(goes, True)
        del self.gate_up[comes], self.down[comes]
        self.gate_up[goes], self.down[goes] = for_host
        self.moved.exchanged += sum(one.nbytes for one in (*for_device, *for_host))
        return for_device


@dataclass(frozen=True, slots=True)
class HostRows:
    """A step's rows in host memory, or on the device if every host expert with rows is streamed."""

    experts: HostExperts
    x: Tensor  # float32
    rows: Tensor
    device: torch.device | None = None

    def __contains__(self, expert: int) -> bool:
        return expert in self.experts.gate_up

    def given(self, expert: int, start: int, end: int) -> Tensor:
        """Output of an expert for its rows `rows[start:end]`: float32 on the device."""
        here = self.experts
        gate_up, down = here.gate_up[expert], here.down[expert]
        output = down(here.activate(gate_up(self.x[self.rows[start:end]])))
        here.moved.to_device += output.nbytes
        here.moved.read += gate_up.nbytes + down.nbytes
        if self.device is None or self.device.type == "cpu":
            return output
        return output.pin_memory().to(self.device, non_blocking=True)

    def lent(self, expert: int) -> tuple[Product, Product]:
        """Stream an expert: its linear layers on the device, for this step."""
        products = self.experts.fetch(expert, False)
        self.experts.moved.streamed += sum(one.nbytes for one in products)
        return products


def _to_host(x: Tensor) -> Tensor:
    """Copy to pinned memory, synchronously."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
