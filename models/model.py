"""`Model`: loaded weights and one forward pass, a function of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.embedding import Embedding
from localllm.kernels.host_experts import HostExperts
from localllm.kernels.layer_weights import (
    ExpertsWeights,
    FeedForwardWeights,
    HeadWeights,
    MixerWeights,
    Stepped,
    View,
    forget,
    linears_of,
    nbytes_of,
)
from localllm.kernels.mixers import norm_rows
from localllm.kernels.reference import rms_norm
from localllm.kernels.rope import RopeTable
from localllm.kernels.segments import KernelTable, with_images

from .architectures.facts import ModelFacts, layer_views
from .inputs import ForwardBatch
from .kv_cache import CacheGroup, KVCache, state_groups
from .vision import Tower
from .vision_grid import GridTower


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """What mixes tokens and what follows, each added to the residual stream."""

    mixer: MixerWeights | None
    ffn: FeedForwardWeights | None

    @property
    def nbytes(self) -> int:
        """Bytes of its prepared weights, norms included."""
        return nbytes_of(self.mixer) + nbytes_of(self.ffn)


class Model:
    """A decoder. Made by `loader.load_model`; nothing in it changes afterwards but the growing RoPE tables."""

    def __init__(
        self,
        facts: ModelFacts,
        groups: Sequence[CacheGroup],
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        head: HeadWeights,
        ropes: Sequence[RopeTable],
        table: KernelTable,
        kernels: Mapping[str, str],
    ) -> None:
        """`ropes` has a table for each of `facts.ropes`."""
        self.facts = facts
        self.groups = tuple(groups)
        self.states = state_groups(facts)
        self.embedding = embedding
        self.layers = tuple(layers)
        self.head = head
        self.table = table
        # what runs what, for the run summary: layer class or op -> names of implementations
        self.kernels = dict(kernels)
        self.tower: Tower | GridTower | None = None  # what reads images: the loader puts it here
        self.projections: Sequence[tuple[Tensor, Tensor | None, str]] = ()  # what pooled vectors go through
        self._ropes = tuple(ropes)
        self._seen, views = layer_views(facts)
        self._calls = tuple((layer.mixer, layer.ffn, view) for layer, view in zip(self.layers, views, strict=True))

    def forward(self, batch: ForwardBatch, cache: KVCache, num_layers: int | None = None) -> Tensor:
        """Run every layer, storing keys and values: hidden [num_rows, hidden] of the wanted rows, before the last norm.

        num_layers   only the first so many, for who wants to know what a step takes and not what it gives
        """
        calls = self._calls if num_layers is None else self._calls[:num_layers]
        length = max(batch.seq_lens)
        views = self._views(batch, [self._turned(rope, batch, length) for rope in self._ropes])
        kept = cache.layers if num_layers is None else cache.layers[: len(calls)]
        x = self.embedding(batch.token_ids, batch.positions)
        for image in batch.images:
            x[image.first : image.first + image.vectors.shape[0]] = image.vectors.to(x.dtype)
        inputs = self.embedding.layer_inputs(batch.token_ids, x)
        rows = batch.logits_indices
        wanted = None if rows.shape[0] == x.shape[0] else rows  # they are in order
        lens = batch.cu_query_lens, batch.seq_lens_tensor
        see_each_other = batch.images and self.facts.vision is not None and not self.facts.vision.axes
        decoder = with_images(self.table, batch.images) if see_each_other else self.table.decoder
        return decoder(x, calls, kept, views, *lens, wanted, batch.slots, inputs)

    def step(self, batch: ForwardBatch, cache: KVCache, finds_best: bool = False) -> Stepped:
        """`forward` and `logits` of a batch whose every token's logits are wanted, valid until the next step; the first
        place of the largest of each row, too, where that is asked for and found on the way.
        """
        length = max(batch.seq_lens)
        views = self._views(batch, [rope.upto(length) for rope in self._ropes])
        where = batch.cu_query_lens, batch.seq_lens_tensor
        layers = self.embedding, self._calls, cache.layers
        given = *layers, views, *where, self.head, finds_best, batch.slots
        return self.table.step(batch.token_ids, batch.positions, *given)

    def _turned(self, rope: RopeTable, batch: ForwardBatch, length: int) -> tuple[Tensor, Tensor]:
        vision = self.facts.vision
        if batch.image_positions is None or vision is None:
            return rope.rows(batch.positions, length)
        axes = torch.tensor(vision.axes, device=batch.positions.device)
        return rope.mixed(torch.cat([batch.positions[None], batch.image_positions]), axes, length)

    def _views(self, batch: ForwardBatch, rotations: Sequence[tuple[Tensor, Tensor]]) -> list[View]:
        return [
            (*rotations[rope], batch.groups[group].block_table, batch.groups[group].slot_mapping)
            for group, rope in self._seen
        ]

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` -> float32 [rows, vocab], soft-capped where the model does so."""
        return self.table.head(hidden, self.head)

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` -> float32 [rows, hidden] after the last norm: what embeddings are pooled from."""
        norm = self.head.norm
        if norm is None:
            return hidden.float()
        return norm_rows(rms_norm, hidden.float(), replace(norm, weight=norm.weight.float() / self.facts.logit_scale))

    def projected(self, vector: Tensor) -> Tensor:
        """A pooled vector, float32 [hidden] -> float32 [facts.embedding_size]."""
        for weight, bias, activation in self.projections:
            vector = functional.linear(vector, weight, bias)
            vector = torch.tanh(vector) if activation == "tanh" else vector
        return vector

    def reserve_positions(self, length: int) -> None:
        """Let the RoPE tables grow for sequences of this length now: what is captured must not."""
        for rope in self._ropes:
            rope.reserve(length)

    def image_vectors(self, pixels: Tensor) -> Tensor:
        """uint8 [height, width, 3], as the tower takes it -> what its tokens have in place of an embedding."""
        assert self.tower is not None, "checked when the request was made"
        return self.tower(pixels)

    def forget_pages(self) -> None:
        """Let go of the cache that fused kernels have seen last."""
        first = next(linear for mixer, ffn, _ in self._calls for one in (mixer, ffn) for linear in linears_of(one))
        for part in first.parts:
            forget(part.prepared, pages_only=True)

    def forget_layers(self) -> None:
        """The end: break the circles of weights and what kernels know of their layers. After `gc.freeze` no collector
        would find them.
        """
        for weights in (*(w for mixer, ffn, _ in self._calls for w in (mixer, ffn)), self.head):
            for part in (part for linear in linears_of(weights) for part in linear.parts):
                forget(part.prepared)

    @property
    def host_experts(self) -> tuple[HostExperts, ...]:
        """Of each layer that has some, the experts in host memory; `weight_bytes` counts none of them."""
        ffns = (layer.ffn for layer in self.layers)
        return tuple(ffn.host for ffn in ffns if isinstance(ffn, ExpertsWeights) and ffn.host is not None)

    @property
    def num_kinds(self) -> int:
        """So many layers from the first on have one of each kind of cache among them, and a feed-forward layer."""
        kinds = [group.layers for group in self.groups] + [group.layers for group in self.states]
        feeding = next((index for index, layer in enumerate(self.layers) if layer.ffn is not None), 0)
        return 1 + max(*map(min, kinds), feeding)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all prepared weights; a table that embedding and head share counts once."""
        head, tower = nbytes_of(self.head), 0 if self.tower is None else self.tower.nbytes
        return self.embedding.nbytes + sum(layer.nbytes for layer in self.layers) + head + tower
