"""The multi-token prediction (MTP) head: loading it, and one pass through it.

Its input is the model's hidden state at a position and the embedding of the next token, both normed. They go through a
projection and a decoder layer with its own KV cache. The normed output goes to the model's LM head; it can also replace
the model's hidden state at the next position, to predict one more token.

A head with residual streams (`Fusion.streams`) takes the model's streams, and returns its own: only what goes to the LM
head is reduced to one vector and normed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from localllm.kernels.hyper import reduced
from localllm.kernels.layer_weights import HyperWeights, MixedWeights

from .architectures.facts import ModelFacts, layer_views
from .architectures.layers import MIXER, Fusion
from .drafter import normed, readable
from .inputs import ForwardBatch
from .kv_cache import KVCache
from .layers import LayerReader, load_layer
from .model import Model, Predictor
from .reader import Reader


def load_predictor(reader: Reader, facts: ModelFacts) -> Predictor:
    """Load the head of `facts.predictor`."""
    own = LayerReader(reader, facts.num_layers)
    layer = load_layer(reader, facts.num_layers)
    assert layer.mixer is not None
    first = next(i for i, one in enumerate(facts.layers) if facts.predictor and one.mixer == facts.predictor.mixer)
    views, of_layers = layer_views(facts)  # it shares cache group and rotation with the layers of the same mixer
    fusion = facts.predictor and facts.predictor.fusion
    assert isinstance(fusion, Fusion)
    final = None if fusion.streams is None or layer.ffn is None else _final(own, layer.ffn.hyper)
    sizes = fusion.vectors(facts.hidden_size)
    return Predictor(
        embedding_norm=own.norm("enorm"),
        hidden_norm=own.norm("hnorm", *sizes["hnorm.weight"]),
        projection=own.linear("mtp", "eh_proj" if final is None else "e_proj"),
        of_streams=None if final is None else own.linear("mtp", "h_proj"),
        final=final,
        layer=layer,
        norm=own.norm("shared_head.norm") if "shared_head.norm.weight" in sizes else None,
        calls=((layer.mixer, layer.ffn, 0),),
        view=views[of_layers[first]],
    )


def _final(own: LayerReader, block: HyperWeights | MixedWeights | None) -> HyperWeights | MixedWeights:
    """The weights of the layer's last block, with those that reduce the streams after it."""
    if isinstance(block, MixedWeights):
        sums = own.matrix("hc_head_fn"), *(own.vector(f"hc_head_{name}.weight") for name in ("base", "scale"))
        return replace(block, final=sums)
    assert isinstance(block, HyperWeights)
    mixer = MIXER.removeprefix("model.")
    norm, down = own.norm(f"{mixer}.hc_norm", block.wide), own.linear("hyper_in", f"{mixer}.input_mix_weight_down")
    up = own.linear("hyper_up", f"{mixer}.input_mix_weight_up")
    return replace(block, final=replace(block, norm=norm, down=down, up=up))


def predict(model: Model, cache: KVCache, batch: ForwardBatch, hidden: Tensor, wanted: Tensor | None) -> Tensor:
    """Run the head: normed hidden states [rows, hidden] of all rows, or of the `wanted` ones (int64, ascending); with
    streams [rows, streams * hidden], not normed.

    batch    each token has the position of the hidden state it is combined with, one before its own
    hidden   one per token: the model's normed hidden states (`Model.normed`) or its streams, or an earlier result
    """
    own = model.predictor
    assert own is not None
    rows = model.embedded(batch)
    embedded, hidden = normed(rows, own.embedding_norm), hidden.to(rows.dtype)
    if own.of_streams is None:
        x = own.projection(torch.cat([embedded, normed(hidden, own.hidden_norm)], -1))
    else:
        streams = hidden.view(len(rows), -1, own.hidden_norm.weight.shape[0])
        each = own.of_streams(normed(streams, own.hidden_norm).view(-1, rows.shape[1]))
        each = each.view(len(rows), -1, rows.shape[1])
        x = (each + own.projection(embedded).unsqueeze(1)).flatten(1)
    group, rope = own.view
    pages = batch.groups[group]
    view = (*model.turned(rope, batch), readable(pages.block_table), pages.slot_mapping)
    lens = batch.cu_query_lens, batch.seq_lens_tensor
    x = model.table.decoder(x, own.calls, cache.predictor, [view], *lens, wanted)
    return x if own.final is not None or own.norm is None else normed(x, own.norm)


class MtpHead:
    """A model's MTP head over its cache, in the form that `engine.mtp.HeadDrafter` drives."""

    taps: tuple[int, ...] = ()  # layers of the model whose outputs it reads; (): only the last hidden state

    def __init__(self, model: Model, cache: KVCache, vocab_size: int) -> None:
        assert model.predictor is not None
        self.group = model.predictor.view[0]  # of the cache
        self.hidden_size = model.facts.head_width
        self._model, self._cache, self._vocab_size = model, cache, vocab_size
        self._own = model.predictor

    def reserve_positions(self, length: int) -> None:
        """As of `Model`."""
        self._model.reserve_positions(length)

    def read(self, hidden: Tensor) -> Tensor:
        """Hidden states of the model -> those that `states` takes: [rows, hidden_size]."""
        return self._model.normed(hidden) if self._own.final is None else hidden

    def states(self, batch: ForwardBatch, hidden: Tensor, wanted: Tensor | None) -> Tensor:
        """`predict`: the hidden states for the next draft, [rows, hidden_size]."""
        return predict(self._model, self._cache, batch, hidden, wanted)

    def logits(self, states: Tensor) -> Tensor:
        """Rows of `states` -> float32 [rows, vocab]."""
        own = self._own
        if own.final is not None:
            states = reduced(self._model.table.hyper_in, states, own.final)
            states = states if own.norm is None else normed(states, own.norm)
        return self._model.head.linear(states).float()[:, : self._vocab_size]

    def best(self, states: Tensor) -> Tensor:
        """The most likely tokens after rows of `states`: int64 [rows]."""
        return self.logits(states).argmax(-1)
