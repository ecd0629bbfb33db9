"""A small decoder that drafts tokens for a larger model and stores nothing: its layers read that model's pages.

Its input is the larger model's embedding of the last token, beside the hidden state that this token was sampled from.
Its output, projected back, stands in for the hidden state behind the draft. All drafts of a round stand at the position
of the last token that is known, since no later one has keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.checkpoint.mapped_file import bad
from localllm.kernels.embedding import Embedding
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import (
    HeadWeights,
    LayerCall,
    Linear,
    Norm,
    nbytes_of,
)

from .architectures import OpenModel
from .architectures.facts import ModelFacts, read_layers
from .architectures.layers import CLUSTERS
from .architectures.mixers import Attention
from .architectures.sharding import Shard
from .drafter import DrafterModel, normed
from .inputs import ForwardBatch
from .kv_cache import KVCache
from .layers import load_layer
from .loader import Loading, device_failures
from .model import Model
from .reader import LoadOptions
from .samples import model_shapes


@dataclass(frozen=True, slots=True)
class Clusters:
    """Logits for the tokens of the likeliest clusters only.

    centroids  rows [clusters, hidden]
    tokens     int64 [clusters, tokens of a cluster]
    chosen     clusters whose tokens get a logit
    """

    centroids: Linear
    tokens: Tensor
    chosen: int


@dataclass(frozen=True, slots=True)
class AssistantModel(DrafterModel):
    """The loaded weights.

    calls    each layer with the number of its view
    sources  the layer of the larger model that each layer reads
    views    (a layer of the larger model, rotation): what layers of one kind share
    """

    calls: tuple[LayerCall, ...]
    sources: tuple[int, ...]
    before: Linear
    after: Linear
    norm: Norm
    embedding: Embedding  # its rows are those of `head`
    head: Linear
    clusters: Clusters | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all prepared weights."""
        clusters = 0 if self.clusters is None else self.clusters.centroids.nbytes + self.clusters.tokens.nbytes
        beside = self.before.nbytes + self.after.nbytes + self.head.nbytes + clusters
        return sum(layer.nbytes for layer in self.layers) + nbytes_of(self.norm) + beside


def load_assistant(checkpoint: OpenModel, options: LoadOptions, target: ModelFacts) -> AssistantModel:
    """Load every weight of `checkpoint`, whose facts fit `target` (`read_layers`).

    Raises BadModelFile or UnsupportedFormat, and OutOfMemory or DeviceError for GPU failures.
    """
    with device_failures(checkpoint):
        return _load(checkpoint, options, target)


def _load(checkpoint: OpenModel, options: LoadOptions, target: ModelFacts) -> AssistantModel:
    facts = checkpoint.facts
    own, sources = facts.assistant, read_layers(facts, target)
    assert own is not None and sources is not None
    loading = Loading(checkpoint, Shard(_without_own_key(facts)), options)
    shapes = model_shapes(loading.facts, loading.op_facts())
    table = loading.op_table(shapes)
    embedding, head = loading.tables()
    layers = tuple(load_layer(loading, index) for index in range(facts.num_layers))
    ropes = {rope: loading.rope(rope) for rope in facts.ropes}
    kinds = [(source, mixer.rope) for source, mixer in zip(sources, facts.attention, strict=True)]
    views = list(dict.fromkeys(kinds))
    linears = own.linears(facts.hidden_size)
    before, after, *rest = (loading.linear("draft", (name,), (shape,)) for name, shape in linears.items())
    clusters = None
    if own.clusters:
        clusters = Clusters(rest[0], _tokens(checkpoint, own.clusters).to(loading.device), own.chosen)
    norm, numbers = loading.norm("model.norm", facts.hidden_size), [views.index(kind) for kind in kinds]
    if loading.selftest is not None:
        of_views = [ropes[rope] for _, rope in views]
        ends = embedding, HeadWeights(norm, head, facts.logit_softcap)
        table = loading.segments(shapes, table, layers, numbers, of_views, *ends)
        loading.selftest.save()
    return AssistantModel(
        facts=facts,
        layers=layers,
        calls=tuple((layer.mixer, layer.ffn, view) for layer, view in zip(layers, numbers, strict=True)),
        sources=sources,
        views=tuple((source, ropes[rope]) for source, rope in views),
        before=before,
        after=after,
        norm=norm,
        embedding=embedding,
        head=head,
        clusters=clusters,
        table=table,
    )


def _tokens(checkpoint: OpenModel, clusters: int) -> Tensor:
    """int64 [clusters, tokens of a cluster]"""
    stored = {"I32": "<i4", "I64": "<i8"}[checkpoint.tensors[CLUSTERS].dtype]
    tokens = checkpoint.read(CLUSTERS).view(stored).astype("int64")
    if tokens.min() < 0 or tokens.max() >= checkpoint.facts.vocab_size:
        what = f"has token ids from {tokens.min():,} to {tokens.max():,}; the vocabulary has"
        raise bad(checkpoint.path, f"{what} {checkpoint.facts.vocab_size:,} tokens", key=CLUSTERS)
    return torch.from_numpy(tokens).view(clusters, -1)


def _without_own_key(facts: ModelFacts) -> ModelFacts:
    """A token is one of those in its window, and no key of it is stored: the last key is that of the token before."""
    layers = []
    for layer in facts.layers:
        assert isinstance(layer.mixer, Attention)
        window = None if layer.mixer.window is None else max(1, layer.mixer.window - 1)
        layers.append(replace(layer, mixer=replace(layer.mixer, window=window)))
    return replace(facts, layers=tuple(layers))


def pages_of(own: AssistantModel, cache: KVCache) -> tuple[KVPages, ...]:
    """What each layer reads of the larger model's cache."""
    found = tuple(cache.layers[source] for source in own.sources)
    return tuple(pages for pages in found if isinstance(pages, KVPages))


def draft(
    own: AssistantModel, model: Model, cache: KVCache, kept: tuple[KVPages, ...], batch: ForwardBatch, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """What stands for the hidden state behind each token, [rows, hidden], and the likeliest next token, int64 [rows].

    kept     of `pages_of`
    batch    the last known token of each sequence, or its last draft, at the place of the token before the last known
             one: keys and values end there
    hidden   [rows, hidden] of the larger model, normed (`Model.normed`), or what this returned before
    """
    rows = model.embedding(batch.token_ids)
    x = own.before(torch.cat([rows, hidden.to(rows.dtype)], -1))
    positions, length = batch.positions + 1, max(batch.seq_lens) + 1
    group_of = {layer: index for index, group in enumerate(cache.groups) for layer in group.layers}
    views = []
    for source, rope in own.views:
        pages = batch.groups[group_of[source]]
        views.append((*rope.rows(positions, length), pages.block_table, pages.slot_mapping))
    x = own.table.decoder(x, own.calls, kept, views, batch.cu_query_lens, batch.seq_lens_tensor, None)
    x = normed(x, own.norm)
    return own.after(x), _likeliest(own, x)


def _likeliest(own: AssistantModel, x: Tensor) -> Tensor:
    """The token with the largest logit: int64 [rows]."""
    if own.clusters is None:
        return own.head(x).argmax(-1)
    best = own.clusters.centroids(x).topk(own.clusters.chosen, -1)[1]
    tokens = own.clusters.tokens[best].flatten(1)  # [rows, tokens of the chosen clusters]
    logits = torch.einsum("nd,ntd->nt", x.float(), own.embedding(tokens.flatten()).view(*tokens.shape, -1).float())
    return tokens.gather(1, logits.argmax(-1, keepdim=True)).squeeze(1)
