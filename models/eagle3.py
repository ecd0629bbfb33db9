"""An EAGLE-3 drafter: loading it, and one pass through it (see `architectures.layers.Eagle3`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.checkpoint.mapped_file import bad
from localllm.kernels.embedding import Embedding
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import (
    AttentionWeights,
    LayerCall,
    Linear,
    MlpWeights,
    Norm,
    nbytes_of,
)

from .architectures import OpenModel
from .architectures.facts import drafter_views
from .architectures.layers import D2T, Eagle3
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
class Eagle3Model(DrafterModel):
    """The loaded weights.

    taps         layers of the larger model whose outputs it reads, ascending
    calls        each layer with its view's number; the first has no norm and takes two inputs side by side
    token_norm   over a token's embedding, for the first layer
    hidden_norm  over the hidden state, for the first layer
    input_norms  over the hidden states before `fc`: none, one over all of a token, or one for each
    input_scale  multiplies the hidden states first
    embedding    for the first layer, whose norm ignores the scale of a row
    tokens       int64 [rows of the head]: their tokens; None if they are numbered alike
    """

    taps: tuple[int, ...]
    calls: tuple[LayerCall, ...]
    token_norm: Norm
    hidden_norm: Norm
    input_norms: tuple[Norm, ...]
    input_scale: float
    fc: Linear
    embedding: Embedding
    norm: Norm
    head: Linear
    tokens: Tensor | None

    @property
    def own(self) -> Eagle3:
        assert self.facts.eagle3 is not None
        return self.facts.eagle3

    @property
    def weight_bytes(self) -> int:
        """Bytes of all prepared weights that are not the larger model's."""
        tables = self.embedding.nbytes + (self.head.nbytes if self.own.head else 0)
        norms = (self.hidden_norm, self.norm, *self.input_norms)
        return sum(layer.nbytes for layer in self.layers) + sum(map(nbytes_of, norms)) + self.fc.nbytes + tables


def load_eagle3(checkpoint: OpenModel, options: LoadOptions, target: Model) -> Eagle3Model:
    """Load every weight of `checkpoint`; the facts of `target` include its layers (`ModelFacts.drafting`).

    Raises BadModelFile or UnsupportedFormat, and OutOfMemory or DeviceError for GPU failures.
    """
    with device_failures(checkpoint):
        return read_eagle3(Loading(checkpoint, Shard(checkpoint.facts), options), target)


def read_eagle3(loading: Loading, target: Model) -> Eagle3Model:
    """As `load_eagle3`, by a load in progress."""
    facts, hidden = loading.facts, loading.facts.hidden_size
    own = facts.eagle3
    assert own is not None and target.facts.drafting == facts.layers
    layers = tuple(load_layer(loading, index) for index in range(facts.num_layers))
    first = layers[0].mixer
    assert isinstance(first, AttentionWeights) and first.norm is not None
    ropes = {rope: loading.rope(rope) for rope in facts.ropes}
    kinds, numbers = drafter_views(facts, target.facts)
    theirs = replace(target.embedding, norm_eps=0.0, nbytes=0)
    table = loading.weight("model.embed_tokens", (own.table, hidden)) if own.table else None
    mixers = (replace(first, norm=None), *(layer.mixer for layer in layers[1:]))
    made = Eagle3Model(
        facts=facts,
        taps=own.taps_in(target.facts.num_layers),
        layers=layers,
        calls=tuple((mixer, layer.ffn, view) for mixer, layer, view in zip(mixers, layers, numbers, strict=True)),
        token_norm=first.norm,
        hidden_norm=loading.norm("model.layers.0.hidden_norm", hidden),
        views=tuple((group, ropes[rope]) for group, rope in kinds),
        input_norms=tuple(
            loading.norm(name.removesuffix(".weight"), size) for name, (size,) in own.vectors(hidden).items()
        ),
        input_scale=target.facts.residual_scale,
        fc=loading.linear("draft", ("fc",), (own.linears(hidden)["fc"],)),
        embedding=theirs if table is None else loading.embedding(table, None),
        norm=loading.norm("model.norm", hidden),
        head=loading.linear("lm_head", ("lm_head",), ((own.head, hidden),)) if own.head else target.head.linear,
        tokens=_tokens(loading, own, target.facts.vocab_size) if own.mapped else None,
        table=loading.composed_table(model_shapes(facts, loading.op_facts())),
    )
    if loading.selftest is not None:
        loading.selftest.save()
    return made


def _tokens(loading: Loading, own: Eagle3, vocab_size: int) -> Tensor:
    """The tokens of the head's rows, int64 [rows]. GGUF files hold them, others what is added to a row's number."""
    checkpoint = loading.checkpoint
    stored = {"I32": "<i4", "I64": "<i8"}[checkpoint.tensors[D2T].dtype]
    tokens = torch.from_numpy(checkpoint.read(D2T).view(stored).astype("int64").reshape(-1))
    if checkpoint.kind != "gguf":
        tokens = tokens + torch.arange(own.head)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        what = f"names tokens from {int(tokens.min()):,} to {int(tokens.max()):,}; the vocabulary has {vocab_size:,}"
        raise bad(checkpoint.path, what, key=D2T)
    return tokens.to(loading.device)


class Eagle3Head:
    """An EAGLE-3 drafter over a model's cache, in the form that `engine.mtp.HeadDrafter` drives."""

    def __init__(self, own: Eagle3Model, cache: KVCache, vocab_size: int) -> None:
        """`vocab_size`: the larger model's."""
        self.taps, self.group, self._own = own.taps, own.views[own.calls[0][2]][0], own
        self.hidden_size = own.facts.hidden_size
        self.reserve_positions = own.reserve_positions
        self._vocab_size = vocab_size
        self._first, self._rest = cache.drafting[0], cache.drafting[1:]
        self._calls = own.calls[1:]  # kept, because kernels cache what they derive from a tuple of layers

    def read(self, hidden: Tensor) -> Tensor:
        """The larger model's hidden states, [rows, taps * hidden] -> [rows, hidden]."""
        norms = self._own.input_norms
        hidden = hidden if self._own.input_scale == 1.0 else hidden * self._own.input_scale
        if norms:
            parts = zip(hidden.chunk(len(norms), -1), norms, strict=True)
            hidden = torch.cat([normed(part, norm) for part, norm in parts], -1)
        return self._own.fc(hidden)

    def states(self, batch: ForwardBatch, hidden: Tensor, wanted: Tensor | None) -> Tensor:
        """As `predictor.MtpHead.states`."""
        own, table = self._own, self._own.table
        rows = own.embedding(batch.token_ids)
        hidden = hidden.to(rows.dtype)
        second = normed(hidden, own.hidden_norm)
        both = torch.cat([normed(rows, own.token_norm), second], -1)
        x = second if own.own.norm_residual else hidden.clone()
        views = own.views_of(batch)
        weights, ffn, view = own.calls[0]
        assert isinstance(weights, AttentionWeights) and isinstance(ffn, MlpWeights)
        assert isinstance(self._first, KVPages)
        cos, sin, block_table, slot_mapping = views[view]
        lens = batch.cu_query_lens, batch.seq_lens_tensor
        q = table.attn_in(both, weights, cos, sin, self._first, slot_mapping)
        attended = table.attention(q, weights, self._first, block_table, *lens)
        if wanted is not None and not self._rest:
            attended, x = attended[wanted], x[wanted]
        x = table.mlp(table.attn_out(attended, x, weights), ffn)
        if self._rest:
            x = table.decoder(x, self._calls, self._rest, views, *lens, wanted)
        return normed(x, own.norm) if own.own.norm_output else x

    def best(self, states: Tensor) -> Tensor:
        """As `predictor.MtpHead.best`."""
        own = self._own
        rows = states if own.own.norm_output else normed(states, own.norm)
        if own.tokens is not None:
            return own.tokens[own.head(rows)[:, : own.own.head].argmax(-1)]
        return own.head(rows)[:, : self._vocab_size].argmax(-1)
