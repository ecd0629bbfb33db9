"""A DFlash drafter: a small decoder that drafts a block of tokens in one pass.

Its pages hold keys and values of earlier tokens, which each layer computes from hidden states between the larger
model's layers (`store`). The input of a pass is the last known token and masks; all of them see each other (`draft`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import Tensor

from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import (
    AttentionWeights,
    LayerCache,
    LayerCall,
    Linear,
    Norm,
    nbytes_of,
)

from .architectures import OpenModel
from .architectures.facts import drafter_views
from .architectures.sharding import Shard
from .drafter import DrafterModel, normed
from .inputs import ForwardBatch
from .kv_cache import KVCache
from .layers import load_layer
from .loader import Loading, device_failures
from .model import DecoderLayer, Model
from .reader import LoadOptions
from .samples import model_shapes


@dataclass(frozen=True, slots=True)
class DFlashModel(DrafterModel):
    """The loaded weights.

    spans    consecutive layers that see the same of a block: whether causal, their range, each with its view's number
    context  each layer's attention as it stores keys and values of earlier tokens, with its view
    """

    spans: tuple[tuple[bool, slice, tuple[LayerCall, ...]], ...]
    context: tuple[tuple[AttentionWeights, int], ...]
    fc: Linear
    hidden_norm: Norm
    norm: Norm

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the larger model whose outputs it reads."""
        assert self.facts.dflash is not None
        return self.facts.dflash.taps

    @property
    def weight_bytes(self) -> int:
        """Bytes of all prepared weights."""
        return sum(layer.nbytes for layer in self.layers) + nbytes_of(self)


def load_dflash(checkpoint: OpenModel, options: LoadOptions, target: Model) -> DFlashModel:
    """Load every weight of `checkpoint`; the facts of `target` include its layers (`ModelFacts.drafting`).

    Raises BadModelFile or UnsupportedFormat, and OutOfMemory or DeviceError for GPU failures.
    """
    with device_failures(checkpoint):
        return read_dflash(Loading(checkpoint, Shard(checkpoint.facts), options), target)


def read_dflash(loading: Loading, target: Model) -> DFlashModel:
    """As `load_dflash`, by a load in progress."""
    facts, hidden = loading.facts, loading.facts.hidden_size
    assert facts.dflash is not None and target.facts.drafting == facts.layers
    shapes = model_shapes(facts, loading.op_facts())
    table = loading.op_table(shapes)
    layers = tuple(load_layer(loading, index) for index in range(facts.num_layers))
    ropes = {rope: loading.rope(rope) for rope in facts.ropes}
    kinds, numbers = drafter_views(facts, target.facts)
    (fc, shape), *_ = facts.dflash.linears(hidden).items()
    made = DFlashModel(
        facts=facts,
        layers=layers,
        spans=tuple(_spans(facts.dflash.causal, layers, numbers)),
        context=tuple((_keys_and_values(layer.mixer), view) for layer, view in zip(layers, numbers, strict=True)),
        views=tuple((group, ropes[rope]) for group, rope in kinds),
        fc=loading.linear("draft", (fc,), (shape,)),
        hidden_norm=loading.norm("hidden_norm", hidden),
        norm=loading.norm("model.norm", hidden),
        table=table,
    )
    if loading.selftest is None:
        return made
    of_views = [ropes[rope] for _, rope in kinds]
    table = loading.segments(shapes, table, layers, numbers, of_views, target.embedding, target.head)
    loading.selftest.save()
    return replace(made, table=table)


def _spans(
    causal: Sequence[bool], layers: Sequence[DecoderLayer], views: Sequence[int]
) -> Iterator[tuple[bool, slice, tuple[LayerCall, ...]]]:
    start = 0
    for is_causal, some in groupby(causal):
        span = slice(start, start + len(list(some)))
        pairs = zip(layers[span], views[span], strict=True)
        yield is_causal, span, tuple((layer.mixer, layer.ffn, view) for layer, view in pairs)
        start = span.stop


def _keys_and_values(weights: object) -> AttentionWeights:
    """The attention of a layer without queries; its input is normed already."""
    assert isinstance(weights, AttentionWeights)
    _, *parts = weights.qkv.parts
    return replace(weights, norm=None, qkv=Linear(tuple(parts)), num_heads=0)


Kept = tuple[tuple[LayerCache, ...], ...]


def kept_by(own: DFlashModel, cache: KVCache) -> Kept:
    """The pages of each span of layers. Kernels cache what they derive from them, so they are kept with the cache."""
    return tuple(cache.drafting[span] for _, span, _ in own.spans)


def store(own: DFlashModel, cache: KVCache, batch: ForwardBatch, hidden: Tensor) -> None:
    """Store keys and values of the batch's tokens.

    hidden   [num_tokens, taps * hidden]: outputs of the layers `own.taps` for these tokens
    """
    context, views = normed(own.fc(hidden), own.hidden_norm), own.views_of(batch)
    for (weights, view), pages in zip(own.context, cache.drafting, strict=True):
        cos, sin, _, slot_mapping = views[view]
        assert isinstance(pages, KVPages)
        own.table.attn_in(context, weights, cos, sin, pages, slot_mapping)


def draft(own: DFlashModel, model: Model, kept: Kept, batch: ForwardBatch, places: Tensor, rows: Tensor) -> Tensor:
    """The likeliest tokens of the masks at `rows` (int64, ascending) of a batch of blocks: int64 [rows].

    kept     of `kept_by`
    batch    each token is a sequence of its own that ends where its block does, so all tokens of a block see each other
    places   int32 [num_tokens]: tokens of the block behind each
    """
    x = replace(model.embedding, norm_eps=0.0)(batch.token_ids)
    whole, views = batch.seq_lens_tensor, own.views_of(batch)
    for (is_causal, _, calls), pages in zip(own.spans, kept, strict=True):
        lens = (whole - places).clamp_(min=1) if is_causal else whole  # 1: a padding row of a captured pass
        wanted = rows if pages is kept[-1] else None
        x = own.table.decoder(x, calls, pages, views, batch.cu_query_lens, lens, wanted)
    return model.head.linear(normed(x, own.norm))[:, : model.facts.vocab_size].argmax(-1)
