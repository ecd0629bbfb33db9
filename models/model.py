"""`Model`: loaded weights and a forward pass that depends only on its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.embedding import Embedding
from localllm.kernels.host_experts import HostExperts
from localllm.kernels.hyper import reduced
from localllm.kernels.layer_weights import (
    CompressedWeights,
    ExpertsWeights,
    FeedForwardWeights,
    HeadWeights,
    HyperWeights,
    LayerCache,
    LayerCall,
    Linear,
    MixedWeights,
    MixerWeights,
    MlpWeights,
    Norm,
    Stepped,
    View,
    forget,
    linears_of,
    linears_of_calls,
    nbytes_of,
)
from localllm.kernels.mixers import norm_rows
from localllm.kernels.reference import rms_norm
from localllm.kernels.rope import RopeTable
from localllm.kernels.segments import KernelTable, with_images

from .adapters import Adapters
from .architectures.facts import ModelFacts, layer_views
from .architectures.vision import GridFacts, RowFacts
from .inputs import ForwardBatch
from .kv_cache import CacheGroup, KVCache, state_groups
from .ngram_table import NGramRows
from .vision_pooled import AnyTower


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A token mixer and a feed-forward layer, each added to the residual stream."""

    mixer: MixerWeights | None
    ffn: FeedForwardWeights | None

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights, including norms."""
        return nbytes_of(self.mixer) + nbytes_of(self.ffn)


@dataclass(frozen=True, slots=True)
class Predictor:
    """Weights of a multi-token prediction (MTP) head; `models.predictor` runs them."""

    embedding_norm: Norm
    hidden_norm: Norm
    projection: Linear  # of the normed embedding and hidden state, side by side; with streams of the embedding alone
    layer: DecoderLayer
    norm: Norm | None
    calls: tuple[LayerCall, ...]  # the layer in the form that `decoder` takes
    view: tuple[int, int]  # (cache group, rotation)
    of_streams: Linear | None = None  # of each normed residual stream of the hidden state
    final: HyperWeights | MixedWeights | None = None  # how the streams after the layer are reduced

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        shared = None if self.final is None else replace(self.final, final=None)  # weights of the layer's last block
        return nbytes_of(self) - nbytes_of(shared) + self.layer.nbytes


@dataclass(slots=True)
class Taps:
    """The outputs of some layers in the latest pass, for a drafter that reads them.

    layers  ascending
    few     [tokens, len(layers), hidden]: fixed memory for passes of as many tokens, as captured ones need
    many    that of a larger pass
    """

    layers: tuple[int, ...]
    few: Tensor
    many: Tensor | None = None

    def rows(self, count: int) -> Tensor:
        """Those of a pass of `count` tokens: [count, len(layers), hidden]."""
        if count <= self.few.shape[0]:
            return self.few[:count]
        if self.many is None or self.many.shape[0] != count:
            self.many = self.few.new_empty((count, *self.few.shape[1:]))
        return self.many


class Model:
    """A decoder, built by `loader.load_model`. Immutable afterwards, except that RoPE tables grow, `exchange` moves
    experts between host and device memory, and a runner sets `taps`.
    """

    def __init__(
        self,
        facts: ModelFacts,
        groups: Sequence[CacheGroup],
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        head: HeadWeights,
        ropes: Sequence[RopeTable],
        table: KernelTable,
        span: tuple[int, int] | None = None,
    ) -> None:
        """`ropes` has one table per entry of `facts.ropes`; `span` is the range of the facts' layers in `layers`."""
        self.facts = facts
        self.groups = tuple(groups)
        self.states = state_groups(facts)
        self.embedding = embedding
        self.layers = tuple(layers)
        self.head = head
        self.table = table
        # for the run summary: op -> name of its implementation; the loader adds the layer classes
        feeds = {type(layer.ffn) for layer in layers}
        unused = {name for name, kind in (("mlp", MlpWeights), ("experts", ExpertsWeights)) if kind not in feeds}
        unused |= {"decoder", "step"} if facts.hyper is not None else set()  # such layers run one by one
        self.kernels = {name: impl for name, impl in table.ops if name not in unused}
        compresses = any(isinstance(layer.mixer, CompressedWeights) for layer in layers)
        entries = self.kernels.pop("compressed_attention", "torch")
        if compresses:
            self.kernels["attention"] = entries
        self.tower: AnyTower | None = None  # vision tower, set by the loader
        self.predictor: Predictor | None = None  # MTP head, set by the loader
        self.ngrams: NGramRows | None = None  # table of n-gram embeddings, set by the loader
        self.taps: Taps | None = None  # set by a runner whose drafter reads them
        # layers and their caches cut at these stops, as in the last step with `taps`
        self._cut: tuple[object, object, tuple[int, ...], Sequence[Any]] | None = None
        self.projections: Sequence[tuple[Tensor, Tensor | None, str]] = ()  # applied to pooled vectors
        self._ropes = tuple(ropes)
        # whether token ids choose some layer's experts
        self._routes_ids = any(isinstance(one.ffn, ExpertsWeights) and one.ffn.table is not None for one in layers)
        self._view_keys, views = layer_views(facts)
        self.adapters: Adapters | None = None  # adapter slots, created with the first adapter
        self._span = slice(*span) if span is not None else slice(None)
        self._final: HyperWeights | MixedWeights | None = None  # the last block's, if it keeps the residual streams
        self._calls: tuple[LayerCall, ...] = tuple(
            (layer.mixer, layer.ffn, view) for layer, view in zip(self.layers, views[self._span], strict=True)
        )

    def forward(
        self, batch: ForwardBatch, cache: KVCache, num_layers: int | None = None, every_row: bool = False
    ) -> Tensor:
        """Run every layer and store keys and values; return hidden [num_rows, hidden] of the wanted rows, before the
        final norm; [num_rows, streams * hidden] after `keep_streams`.

        num_layers   run only the first `num_layers` layers, to measure a step whose result is not needed
        every_row    return all rows
        """
        x = self.embedded(batch)
        inputs = self.embedding.layer_inputs(self._ids_for_layers(batch), x)
        if self._routes_ids:
            inputs = batch.token_ids
        if self.ngrams is not None:
            inputs = self.ngrams(batch, cache, x.dtype) if batch.ngram_rows is None else batch.ngram_rows
        rows = batch.logits_indices
        wanted = None if every_row or rows.shape[0] == x.shape[0] else rows  # rows are ascending: equal counts mean all
        calls = self._layers(batch, every_row) if num_layers is None else self._calls[:num_layers]
        hidden = self._run_layers(x, calls, cache, batch, wanted, inputs)
        if self._final is not None or hidden.shape[1] == self.facts.hidden_size:
            return hidden
        return hidden[:, : self.facts.hidden_size].contiguous()  # only the last layer reduces the residual streams

    def _run_layers(
        self,
        x: Tensor,
        calls: tuple[LayerCall, ...],
        cache: KVCache,
        batch: ForwardBatch,
        wanted: Tensor | None,
        inputs: Tensor | None,
    ) -> Tensor:
        """Run x through `calls`, the first layers of this model."""
        views = self._views(batch, [self.turned(rope, batch) for rope in range(len(self._ropes))])
        kept = cache.layers[self._span]
        kept = kept if len(kept) == len(calls) else kept[: len(calls)]
        lens = batch.cu_query_lens, batch.seq_lens_tensor
        vision = self.facts.vision
        kind = vision.bidirectional if batch.images and vision is not None else ""
        decoder = with_images(self.table, batch.images, kind == "windowed") if kind else self.table.decoder
        apart = {} if batch.state_starts is None else {"state_starts": batch.state_starts}
        first, tapped = self._span.start or 0, self.taps.layers if self.taps is not None else ()
        deep = len(vision.taps) if batch.images and isinstance(vision, GridFacts) else 0
        stops = tuple(sorted({*range(first, deep), *tapped} & set(range(first, first + len(calls)))))
        if not stops:
            return decoder(x, calls, kept, views, *lens, wanted, batch.slots, inputs, **apart)
        *spans, last = self._spans(calls, kept, stops, keeps=not deep)
        for number, span in zip(stops, spans, strict=True):
            x = decoder(x, *span, views, *lens, None, batch.slots, inputs, **apart)
            if number < deep:
                x = self._add_deepstack(x, batch, number)
            if self.taps is not None and number in tapped:
                self.taps.rows(x.shape[0])[:, tapped.index(number)] = x
        if not last[0]:
            return x if wanted is None else x[wanted]
        return decoder(x, *last, views, *lens, wanted, batch.slots, inputs, **apart)

    def _spans(
        self, calls: tuple[LayerCall, ...], kept: tuple[LayerCache, ...], stops: tuple[int, ...], keeps: bool
    ) -> Sequence[tuple[Sequence[LayerCall], Sequence[LayerCache]]]:
        """The layers up to each of `stops`, and the rest. Kernels cache what they derive from a tuple of layers, so
        `keeps` returns the same tuples again, and otherwise these are lists.
        """
        if self._cut is not None and keeps and self._cut[0] is calls and self._cut[1] is kept and self._cut[2] == stops:
            return self._cut[3]
        first = self._span.start or 0
        ends = [0, *(number + 1 - first for number in stops), len(calls)]
        cut = [(calls[start:end], kept[start:end]) for start, end in pairwise(ends)]
        if not keeps:
            return [(list(some), list(theirs)) for some, theirs in cut]
        self._cut = calls, kept, stops, cut
        return cut

    def _add_deepstack(self, x: Tensor, batch: ForwardBatch, number: int) -> Tensor:
        """Add the images' DeepStack vectors for layer `number` to x, in place."""
        size = x.shape[1]
        for image in batch.images:
            added = image.vectors[:, (number + 1) * size : (number + 2) * size]
            x[image.first : image.first + added.shape[0]] += added.to(x.dtype)
        return x

    def step(self, batch: ForwardBatch, cache: KVCache, finds_best: bool = False) -> Stepped:
        """`forward` and `logits` of a batch that wants every token's logits, valid until the next step. With
        `finds_best`, also the first index of each row's largest logit, if the kernel finds it on the way.
        """
        if self.facts.composed:
            hidden = self.forward(batch, cache, every_row=True)
            return hidden, self.logits(hidden), None
        length = max(batch.seq_lens)
        views = self._views(batch, [rope.upto(length) for rope in self._ropes])
        where = batch.cu_query_lens, batch.seq_lens_tensor
        layers = self.embedding, self._layers(batch), cache.layers
        rest = *layers, views, *where, self.head, finds_best, batch.slots
        return self.table.step(batch.token_ids, batch.positions, *rest)

    def new_cache(
        self, num_pages: Sequence[int], page_size: int, kv_format: str, device: torch.device, num_slots: int = 0
    ) -> KVCache:
        """Allocate empty pages and slots for all layers; `num_pages` has one entry per cache group."""
        formats = page_size, kv_format, device
        facts = self.facts
        counts = num_slots, facts.num_layers, len(facts.drafting)
        return KVCache(self.groups, num_pages, *formats, self.states, *counts, entries=tuple(facts.entries))

    def hold_adapters(self, device: torch.device, **promises: bool) -> Adapters:
        """Create the adapter slots, once. `promises` are those of `Adapters`; unused slots cost nothing."""
        if self.adapters is None:
            self.adapters = Adapters(self._calls, device, **promises)
        return self.adapters

    def _layers(self, batch: ForwardBatch, every_row: bool = False) -> tuple[LayerCall, ...]:
        if batch.places is None or self.adapters is None:
            return self._calls
        of_tokens, of_wanted = batch.places
        return self.adapters.begin(of_tokens, of_tokens if every_row else of_wanted)

    def embedded(self, batch: ForwardBatch) -> Tensor:
        """Embed the tokens of a step, images included: [num_tokens, hidden]."""
        x, vision = self.embedding(batch.token_ids, batch.positions), self.facts.vision
        for image in batch.images:
            rows, vectors = slice(image.first, image.first + image.vectors.shape[0]), image.vectors[:, : x.shape[1]]
            if isinstance(vision, RowFacts):  # the token between two rows of an image is an ordinary one
                between = batch.token_ids[rows] == vision.break_token
                vectors = torch.where(between[:, None], x[rows], vectors.to(x.dtype))
            x[rows] = vectors.to(x.dtype)
        return x

    def _ids_for_layers(self, batch: ForwardBatch) -> Tensor:
        """The token ids for the per-layer embedding lookup. Image tokens have no row there and use the padding row."""
        if not batch.images or self.facts.inputs is None:
            return batch.token_ids
        ids = batch.token_ids.clone()
        for image in batch.images:
            ids[image.first : image.first + image.vectors.shape[0]] = self.facts.inputs.pad
        return ids

    def turned(self, number: int, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a step's tokens for the rotation `facts.ropes[number]`."""
        rope, vision, length = self._ropes[number], self.facts.vision, max(batch.seq_lens)
        if batch.image_positions is None or vision is None:
            return rope.rows(batch.positions, length)
        axes = torch.tensor(vision.axes, device=batch.positions.device)
        return rope.mixed(torch.cat([batch.positions[None], batch.image_positions]), axes, length)

    def _views(self, batch: ForwardBatch, rotations: Sequence[tuple[Tensor, Tensor]]) -> list[View]:
        return [
            (*rotations[rope], batch.groups[group].block_table, batch.groups[group].slot_mapping)
            for group, rope in self._view_keys
        ]

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` -> float32 [rows, vocab], soft-capped if the model does so."""
        return self.table.head(self._reduced(hidden), self.head)

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` -> float32 [rows, hidden] after the final norm; embeddings are pooled from these."""
        norm, hidden = self.head.norm, self._reduced(hidden)
        if norm is None:
            return hidden.float()
        return norm_rows(rms_norm, hidden.float(), replace(norm, weight=norm.weight.float() / self.facts.logit_scale))

    def keep_streams(self) -> None:
        """Return residual streams from `forward`, for an MTP head; `logits` and `normed` reduce them."""
        *rest, last = self.layers
        assert last.ffn is not None and last.ffn.hyper is not None
        self._final = last.ffn.hyper
        if isinstance(self._final, MixedWeights):
            ffn = replace(last.ffn, hyper=replace(self._final, final=None, last=False))
        else:
            ffn = replace(last.ffn, hyper=replace(self._final, final=None))
        self.layers = (*rest, replace(last, ffn=ffn))
        self._calls = (*self._calls[:-1], (last.mixer, ffn, self._calls[-1][2]))

    def _reduced(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`, their residual streams reduced to one vector."""
        return hidden if self._final is None else reduced(self.table.hyper_in, hidden, self._final)

    def projected(self, vector: Tensor) -> Tensor:
        """A pooled vector, float32 [hidden] -> float32 [facts.embedding_size]."""
        for weight, bias, activation in self.projections:
            vector = functional.linear(vector, weight, bias)
            vector = torch.tanh(vector) if activation == "tanh" else vector
        return vector

    def reserve_positions(self, length: int) -> None:
        """Grow the RoPE tables for sequences of this length now, because they must not grow during graph capture."""
        for rope in self._ropes:
            rope.reserve(length)

    def image_vectors(self, pixels: Tensor) -> Tensor:
        """uint8 [height, width, 3], resized for the tower -> the vectors that replace its tokens' embeddings."""
        assert self.tower is not None, "checked when the request was created"
        return self.tower(pixels)

    def forget_pages(self) -> None:
        """Drop the references that fused kernels hold to the KV cache they used last."""
        for calls in (self._calls, () if self.predictor is None else self.predictor.calls):
            linears = linears_of_calls(calls)
            forget(linears if self._cut is not None else islice(linears, 1), pages_only=True)
        self._cut = self.taps = None
        if self.adapters is not None:
            self.adapters.forget(pages_only=True)

    def forget_layers(self) -> None:
        """Break the reference cycles between weights and the layer data that kernels cache. Called when the model is
        discarded: after `gc.freeze` the garbage collector would not find them.
        """
        calls = (*self._calls, *(() if self.predictor is None else self.predictor.calls))
        beside = (linear for part in (self.head, self.predictor, self._final) for linear in linears_of(part))
        forget((*linears_of_calls(calls), *beside))
        if self.adapters is not None:
            self.adapters.forget()

    @property
    def host_experts(self) -> tuple[HostExperts, ...]:
        """The experts in host memory, one entry per layer that has any; `weight_bytes` does not count them."""
        ffns = (layer.ffn for layer in self.layers)
        return tuple(ffn.host for ffn in ffns if isinstance(ffn, ExpertsWeights) and ffn.host is not None)

    def exchange(self, layer: int, comes: int, goes: int) -> None:
        """Swap two experts of a layer between steps: `comes` moves to the device, `goes` to host memory."""
        ffn = self.layers[layer].ffn
        assert isinstance(ffn, ExpertsWeights) and ffn.host is not None
        products = zip((ffn.gate_up, ffn.down), ffn.host.exchange(comes, goes), strict=True)
        empty = Linear(())
        gate_up, down = (
            tuple(moved if number == comes else empty if number == goes else one for number, one in enumerate(each))
            for each, moved in products
        )
        changed = replace(self.layers[layer], ffn=replace(ffn, gate_up=gate_up, down=down))
        self.layers = (*self.layers[:layer], changed, *self.layers[layer + 1 :])
        call = changed.mixer, changed.ffn, self._calls[layer][2]
        self._calls = (*self._calls[:layer], call, *self._calls[layer + 1 :])
        if self.adapters is not None:
            self.adapters.exchange(layer, gate_up, down)

    @property
    def num_kinds(self) -> int:
        """How many leading layers it takes to have every kind of cache and a feed-forward layer among them."""
        kinds = [group.layers for group in self.groups] + [group.layers for group in self.states]
        feeding = next((index for index, layer in enumerate(self.layers) if layer.ffn is not None), 0)
        return 1 + max([feeding, *(min(layers) - (self._span.start or 0) for layers in kinds if layers)])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all prepared weights; a table shared by embedding and head counts once."""
        extra = sum(part.nbytes for part in (self.tower, self.predictor) if part is not None)
        stored = self.layers[: len(self.layers) // self.facts.loops]
        return self.embedding.nbytes + sum(layer.nbytes for layer in stored) + nbytes_of(self.head) + extra
