"""What the models that only draft for a larger one have in common."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localllm.kernels.layer_weights import Norm, View, forget, linears_of_calls
from localllm.kernels.reference import rms_norm
from localllm.kernels.rope import RopeTable
from localllm.kernels.table import KernelTable

from .architectures.facts import ModelFacts
from .inputs import ForwardBatch
from .model import DecoderLayer


@dataclass(frozen=True, slots=True)
class DrafterModel:
    """Loaded weights.

    views   (cache group, rotation) of its layers
    """

    facts: ModelFacts
    layers: tuple[DecoderLayer, ...]
    views: tuple[tuple[int, RopeTable], ...]
    table: KernelTable

    def reserve_positions(self, length: int) -> None:
        """As of `Model`."""
        for _, rope in self.views:
            rope.reserve(length)

    def forget_pages(self) -> None:
        """As of `Model`."""
        forget(linears_of_calls([(layer.mixer, layer.ffn, 0) for layer in self.layers]), pages_only=True)

    def forget_layers(self) -> None:
        """As of `Model`."""
        forget(linears_of_calls([(layer.mixer, layer.ffn, 0) for layer in self.layers]))

    def views_of(self, batch: ForwardBatch) -> list[View]:
        """Its views of a batch."""
        found, length = [], max(batch.seq_lens)
        for group, rope in self.views:
            pages = batch.groups[group]
            found.append((*rope.rows(batch.positions, length), readable(pages.block_table), pages.slot_mapping))
        return found


def normed(x: Tensor, norm: Norm) -> Tensor:
    """x over its last dimension."""
    return rms_norm(x, norm.weight, norm.eps)


def readable(block_table: Tensor) -> Tensor:
    """Block tables for a drafter, which lags behind the model: pages that left the model's window may be in its own.
    It sees others' tokens there, which can make a draft worse, but never an answer.
    """
    return block_table.clamp(min=0)
