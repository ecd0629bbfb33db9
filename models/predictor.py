"""The multi-token prediction (MTP) head: loading it, and one pass through it.

Its input is the model's hidden state at a position and the embedding of the next token, both normed. They go through a
projection and a decoder layer with its own KV cache. The normed output goes to the model's LM head; it can also replace
the model's hidden state at the next position, to predict one more token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .architectures.facts import ModelFacts, layer_views
from .drafter import normed
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
    return Predictor(
        embedding_norm=own.norm("enorm"),
        hidden_norm=own.norm("hnorm"),
        projection=own.linear("mtp", "eh_proj"),
        layer=layer,
        norm=own.norm("shared_head.norm"),
        calls=((layer.mixer, layer.ffn, 0),),
        view=views[of_layers[first]],
    )


def predict(model: Model, cache: KVCache, batch: ForwardBatch, hidden: Tensor, wanted: Tensor | None) -> Tensor:
    """Run the head: normed hidden states [rows, hidden] of all rows, or of the `wanted` ones (int64, ascending).

    batch    each token has the position of the hidden state it is combined with, one before its own
    hidden   [num_tokens, hidden]: the model's normed hidden states (`Model.normed`), or an earlier result
    """
    own = model.predictor
    assert own is not None
    rows = model.embedded(batch)
    both = torch.cat([normed(rows, own.embedding_norm), normed(hidden.to(rows.dtype), own.hidden_norm)], -1)
    x = own.projection(both)
    group, rope = own.view
    pages = batch.groups[group]
    view = (*model.turned(rope, batch), pages.block_table, pages.slot_mapping)
    lens = batch.cu_query_lens, batch.seq_lens_tensor
    return normed(model.table.decoder(x, own.calls, cache.predictor, [view], *lens, wanted), own.norm)


class MtpHead:
    """A model's MTP head over its cache, in the form that `engine.mtp.HeadDrafter` drives."""

    taps: tuple[int, ...] = ()  # layers of the model whose outputs it reads; (): only the last hidden state

    def __init__(self, model: Model, cache: KVCache, vocab_size: int) -> None:
        assert model.predictor is not None
        self.group = model.predictor.view[0]  # of the cache
        self.hidden_size = model.facts.hidden_size
        self._model, self._cache, self._vocab_size = model, cache, vocab_size

    def reserve_positions(self, length: int) -> None:
        """As of `Model`."""
        self._model.reserve_positions(length)

    def read(self, hidden: Tensor) -> Tensor:
        """Hidden states of the model -> those that `states` takes: [rows, hidden]."""
        return self._model.normed(hidden)

    def states(self, batch: ForwardBatch, hidden: Tensor, wanted: Tensor | None) -> Tensor:
        """`predict`: the hidden states for the next draft, [rows, hidden]."""
        return predict(self._model, self._cache, batch, hidden, wanted)

    def best(self, states: Tensor) -> Tensor:
        """The most likely tokens after rows of `states`: int64 [rows]."""
        return self._model.head.linear(states).float()[:, : self._vocab_size].argmax(-1)
