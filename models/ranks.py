"""`Ranks`: this process among those that compute a model together, and what makes one result of their parts."""

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
    """The default group of `torch.distributed`. Every rank calls the same in the same order.

    ordered  sums are made in the order of the ranks, whatever the size of what is summed: a token's result then does
             not depend on the others of its step
    """

    share: Share
    ordered: bool = True

    def span(self, num_layers: int) -> tuple[int, int]:
        """The layers that this rank has, of each a part or the whole."""
        return self.share.span if self.share.split == "layers" else (0, num_layers)

    def total(self, given: Tensor) -> Tensor:
        """The sum over all ranks."""
        given = given.contiguous()
        if not self.ordered and self.share.world > 2:  # of two numbers the order does not matter
            dist.all_reduce(given)
            return given
        parts = self._all(given)
        whole = parts[0].float()
        for part in parts[1:]:
            whole = whole + part
        return whole.to(given.dtype)

    def gathered(self, given: Tensor, sizes: Sequence[int]) -> Tensor:
        """[.., sum of sizes] of what each rank has, [.., its size]."""
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
        """What rank 0 has, in the place of `values`."""
        if values.numel():
            dist.broadcast(values, 0)
        return values

    def passed_on(self, values: Tensor, source: int, target: int) -> None:
        """From one rank to another; the others do nothing."""
        if values.numel() and self.share.rank == source:
            dist.send(values.contiguous(), target)
        elif values.numel() and self.share.rank == target:
            dist.recv(values, source)


@dataclass(frozen=True, slots=True)
class Summed:
    """Each rank has some of the inputs of a product."""

    ranks: Ranks

    def __call__(self, linear: Linear, x: Tensor) -> Tensor:
        return self.ranks.total(linear(x))

    def total(self, given: Tensor) -> Tensor:
        return self.ranks.total(given)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Each rank has some of the outputs of a product, and of its inputs as many as `inputs` says; () for all."""

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
    """Rows of an embedding of which this rank has `count`, from `first` on."""

    ranks: Ranks
    rows: Callable[[Tensor], Tensor]
    first: int
    count: int

    def __call__(self, token_ids: Tensor) -> Tensor:
        own = token_ids - self.first
        is_here = (own >= 0) & (own < self.count)
        found = self.rows(own.clamp(0, self.count - 1))
        return self.ranks.total(found.masked_fill(~is_here.unsqueeze(-1), 0))
