"""`Ranks`: this process among those that run a model together, and the collectives that combine their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from localllm.kernels.layer_weights import Linear

from .architectures.sharding import Share


@dataclass(frozen=True, slots=True)
class Ranks:
    """The default group of `torch.distributed`. All ranks make the same calls in the same order.

    ordered  sum in rank order regardless of tensor size, so that a token's result does not depend on the other tokens
             of its step
    """

    share: Share
    ordered: bool = True

    def span(self, num_layers: int) -> tuple[int, int]:
        """The range of layers of which this rank has a part, or all."""
        return self.share.span if self.share.split == "layers" else (0, num_layers)

    def total(self, given: Tensor) -> Tensor:
        """The sum over all ranks."""
        given = given.contiguous()
        if not self.ordered and self.share.world > 2:  # a sum of two does not depend on the order
            dist.all_reduce(given)
            return given
        parts = self._all(given)
        whole = parts[0].float()
        for part in parts[1:]:
            whole = whole + part
        return whole.to(given.dtype)

    def gathered(self, given: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate the ranks' parts, [.., its size] each -> [.., sum of sizes]."""
        widest = max(sizes)
        if given.shape[-1] < widest:
            given = torch.cat([given, given.new_zeros(*given.shape[:-1], widest - given.shape[-1])], -1)
        parts = self._all(given.contiguous())
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def _all(self, given: Tensor) -> list[Tensor]:
        if given.numel() == 0:
            return [given] * self.share.world
        parts = [torch.empty_like(given) for _ in range(self.share.world)]
        dist.all_gather(parts, given)
        return parts

    def told(self, values: Tensor) -> Tensor:
        """Broadcast from rank 0 into `values`."""
        if values.numel():
            dist.broadcast(values, 0)
        return values

    def passed_on(self, values: Tensor, source: int, target: int) -> None:
        """Send from one rank to another; the other ranks do nothing."""
        if values.numel() and self.share.rank == source:
            dist.send(values.contiguous(), target)
        elif values.numel() and self.share.rank == target:
            dist.recv(values, source)


@dataclass(frozen=True, slots=True)
class Summed:
    """Row-parallel product: each rank has part of the inputs, and the outputs are summed."""

    ranks: Ranks

    def __call__(self, linear: Linear, x: Tensor) -> Tensor:
        return self.ranks.total(linear(x))

    def total(self, given: Tensor) -> Tensor:
        return self.ranks.total(given)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Column-parallel product: each rank has part of the outputs, which are concatenated.

    inputs   input sizes of the ranks, gathered first; () if every rank has them all
    """

    ranks: Ranks
    outputs: tuple[int, ...]
    inputs: tuple[int, ...] = ()

    def __call__(self, linear: Linear, x: Tensor) -> Tensor:
        whole = self.ranks.gathered(x, self.inputs) if self.inputs else x
        return self.ranks.gathered(linear(whole), self.outputs)

    def total(self, given: Tensor) -> Tensor:
        raise TypeError("outputs are not summed")


@dataclass(frozen=True, slots=True)
class VocabularyRows:
    """Embedding lookup in a table of which this rank has `count` rows from `first` on."""

    ranks: Ranks
    rows: Callable[[Tensor], Tensor]
    first: int
    count: int

    def __call__(self, token_ids: Tensor) -> Tensor:
        own = token_ids - self.first
        is_here = (own >= 0) & (own < self.count)
        found = self.rows(own.clamp(0, self.count - 1))
        return self.ranks.total(found.masked_fill(~is_here.unsqueeze(-1), 0))
