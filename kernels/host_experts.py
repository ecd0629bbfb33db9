"""Experts of a mixture that lie in host memory and are computed by the CPU, beside a device that has the others.

Only activations cross: a layer's rows go over once, and what an expert gives for them comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Product(Protocol):
    """A `layer_weights.Linear` over weights in host memory."""

    def __call__(self, x: Tensor, /) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class HostExperts:
    """The experts of one layer that lie in host memory, their weights prepared for the CPU.

    gate_up, down   by the expert's number
    activate        what lies between them
    uses            int64 [num_experts]: tokens that each expert of the layer had, on either side
    to_host, to_device, read  bytes of activations that went over, and of weights that the CPU read, so far
    """

    gate_up: Mapping[int, Product]
    down: Mapping[int, Product]
    activate: Callable[[Tensor], Tensor]
    uses: Tensor
    to_host: int = 0
    to_device: int = 0
    read: int = 0

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for each in (self.gate_up, self.down) for one in each.values())

    def take(self, x: Tensor, rows: Tensor, counts: Sequence[int]) -> HostRows | None:
        """A step's rows for the experts here; None where no token goes to one of them.

        rows    int64: the row of every token that an expert has, by expert
        counts  tokens of each expert of the layer
        """
        self.uses += torch.tensor(counts)
        if not any(counts[expert] for expert in self.gate_up):
            return None
        self.to_host += x.nbytes
        return HostRows(self, _to_host(x).float(), rows.cpu(), x.device)


@dataclass(frozen=True, slots=True)
class HostRows:
    """The rows of a step in host memory."""

    experts: HostExperts
    x: Tensor  # float32
    rows: Tensor
    device: torch.device

    def __contains__(self, expert: int) -> bool:
        return expert in self.experts.gate_up

    def given(self, expert: int, start: int, end: int) -> Tensor:
        """What an expert gives for its rows `rows[start:end]`: float32 on the device."""
        here = self.experts
        gate_up, down = here.gate_up[expert], here.down[expert]
        given = down(here.activate(gate_up(self.x[self.rows[start:end]])))
        here.to_device += given.nbytes
        here.read += gate_up.nbytes + down.nbytes
        if self.device.type == "cpu":
            return given
        return given.pin_memory().to(self.device, non_blocking=True)


def _to_host(x: Tensor) -> Tensor:
    """A copy in pinned memory, complete when this returns."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
