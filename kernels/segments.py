"""Segments: the parts of a forward pass that a model calls, composed here from single ops, and their `KernelTable`.

    attn_in      norm, QKV, QK-norm, RoPE, KV write        attention   paged attention
    attn_out     output projection, residual               mlp         norm, gate/up, activation, down, residual
    latent_attention  norm, projections, RoPE, latent write, attention over latents, output projection, residual
    compressed_attention  the same over the last tokens and compressed entries, which it writes
    gated_delta  norm, projections, convolution, gated delta rule, gated norm, output projection, residual
    short_conv   norm, projection, gate, convolution, gate, output projection, residual
    mamba        norm, projection, convolution, state space, gated norm, output projection, residual
    experts      as mlp, with a router and a mixture of experts
    layer_input  gate, per-layer input, projection, norm, residual
    streams_in   with several residual streams: predict all, select the first for the layer, LAuReL
    streams_out  correct all streams with the layer's output, per-layer input
    hyper_in     with hyper-connections: a block's input, and the gains of its output
    hyper_out    add a block's output to all streams
    ngrams       add n-gram embeddings to all streams
    token_index  with sparse attention: store index keys, choose what queries see
    head         norm, vocabulary projection, soft-cap  (and a norm before each residual if the model has one)

Built from these: `decoder`, all layers; `step`, from token ids to logits. The composed segments are always available
and are the references of fused ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import recurrent, reference, sparse
from .compressed import compressed_attention
from .embedding import Embedding
from .experts import OTHER_ACTIVATIONS, limited, mixture, shared
from .hyper import hyper_in, hyper_out, ngrams, reduced, widened
from .kv_pages import KVPages
from .layer_weights import (
    AttentionWeights,
    CompressedWeights,
    ConvWeights,
    DeltaWeights,
    ExpertsWeights,
    HeadWeights,
    InputWeights,
    LatentWeights,
    LayerCache,
    LayerCall,
    MambaWeights,
    MlpWeights,
    Stepped,
    StreamWeights,
    View,
    product,
)
from .mixers import (
    add_output,
    attention,
    attn_in,
    attn_out,
    gated_delta,
    latent_attention,
    mamba,
    norm_rows,
    short_conv,
)
from .registry import OPS, RECURRENT, SEGMENTS, SPARSE
from .streams import joined, let_in, moments, narrowed, streams_in, streams_out
from .token_index import Chosen, sparse_attention, sparse_latent, token_index

# weights of a recurrent mixer -> its segment
STATEFUL = {DeltaWeights: "gated_delta", ConvWeights: "short_conv", MambaWeights: "mamba"}


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The segments of one model, chosen at load. If a kernel fails, a new table is built without it.

    Each has the signature of the function of the same name, without the leading op and segment arguments. `step`
    returns logits of every token. x may be overwritten.
    """

    attn_in: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    attn_out: Callable[..., Tensor]
    latent_attention: Callable[..., Tensor]
    compressed_attention: Callable[..., Tensor]
    gated_delta: Callable[..., Tensor]
    short_conv: Callable[..., Tensor]
    mamba: Callable[..., Tensor]
    token_index: Callable[..., Chosen | None]
    mlp: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    layer_input: Callable[..., Tensor]
    streams_in: Callable[..., tuple[Tensor, Tensor, Tensor]]
    streams_out: Callable[..., Tensor]
    hyper_in: Callable[..., tuple[Tensor, Tensor]]
    hyper_out: Callable[..., Tensor]
    ngrams: Callable[..., Tensor]
    head: Callable[..., Tensor]
    decoder: Callable[..., Tensor]
    step: Callable[..., Stepped]
    ops: tuple[tuple[str, str], ...]  # (op or fused segment, name of the implementation chosen)


def mlp(
    rms_norm: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    gelu_tanh_mul: Callable[..., Tensor],
    x: Tensor,
    weights: MlpWeights,
) -> Tensor:
    """x + post_norm(down(act(gate) · up)), gate and up of norm(x): [num_tokens, hidden], in place.

    With hyper-connections x is not added.
    """
    plain: dict[str, Callable[..., Tensor]] = {
        "silu_clamped": reference.silu_clamped,
        "gelu": reference.gelu,
        "gelu_erf": reference.gelu_mul,
        "relu2": reference.relu2,
    }
    if weights.curve is not None:
        plain["xielu"] = partial(reference.xielu, curve=weights.curve)
    activated = limited({"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, **plain}[weights.activation], weights.limit)
    normed = norm_rows(rms_norm, x, weights.norm)  # stays alive to the end; the memory plan counts it
    out = product(weights.down, activated(thinned(weights.gate_up(normed), weights.cut)), weights.join)
    if weights.hyper is not None:
        return out
    x = norm_rows(rms_norm, add_output(rms_norm, x, out, weights.post_norm), weights.sum_norm)
    return x if weights.scale == 1.0 else x.mul_(weights.scale)


def thinned(rows: Tensor, cut: float | None) -> Tensor:
    """Sparsify gates in place: relu(gate - (mean + cut · std)) over a token's gates; unchanged if `cut` is None.

    rows   gates and ups [num_tokens, 2 inner]
    """
    if cut is None:
        return rows
    gates = rows[:, : rows.shape[1] // 2]
    mean, spread = moments(gates)
    gates.copy_(gates.float().sub(spread.mul_(cut).add_(mean)).relu_())
    return rows


def experts(
    rms_norm: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    gelu_tanh_mul: Callable[..., Tensor],
    x: Tensor,
    weights: ExpertsWeights,
    mix: Callable[..., Tensor] = mixture,
    ids: Tensor | None = None,
    add: Callable[..., Tensor] | None = None,
    feed: Callable[..., Tensor] | None = None,
) -> Tensor:
    """x + post_norm(mixture of experts of norm(x)): [num_tokens, hidden], in place.

    With hyper-connections x is not added.

    mix   replacement for `experts.mixture`
    ids   as in `experts.route`
    add   replacement for `mixers.add_output` with this `rms_norm`
    feed  replacement for the norm before a shared expert that has one of its own, and the expert
    """
    add = partial(add_output, rms_norm) if add is None else add
    if ids is not None:
        mix = partial(mix, ids=ids)
    activations = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, **OTHER_ACTIVATIONS}
    activate, own = activations[weights.activation], weights.apart
    normed = norm_rows(rms_norm, x, weights.norm)

    def total(given: Tensor) -> Tensor:
        return given if weights.join is None else weights.join.total(given)

    if own is None:
        out = mix(normed, normed, weights, activate)
        out = total(shared(normed, weights, activate, out)).to(x.dtype)
    else:
        out = total(mix(normed, norm_rows(rms_norm, x, own.router), weights, activate)).to(x.dtype)
        out = norm_rows(rms_norm, out, own.after_experts)
        if feed is None:
            given = shared(norm_rows(rms_norm, x, own.shared), weights, activate)
        else:
            given = feed(x, weights, own.shared)
        out = add(out, total(given).to(x.dtype), own.after_shared)
    if weights.hyper is not None:
        return out
    x = add(x, out, weights.post_norm)
    return x if weights.layer_scale == 1.0 else x.mul_(weights.layer_scale)


def layer_input(
    rms_norm: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    gelu_tanh_mul: Callable[..., Tensor],
    x: Tensor,
    weights: InputWeights,
    given: Tensor,
) -> Tensor:
    """(x + norm(projection(act(gate(x)) · given))) · scale: [num_tokens, hidden], in place.

    given   [num_tokens, size]: per-layer inputs
    """
    x = x.add_(let_in(rms_norm, silu_mul, gelu_tanh_mul, x, weights, given))
    return x if weights.scale == 1.0 else x.mul_(weights.scale)


def decoder(
    attn_in: Callable[..., Tensor],
    attention: Callable[..., Tensor],
    attn_out: Callable[..., Tensor],
    latent_attention: Callable[..., Tensor],
    compressed_attention: Callable[..., Tensor],
    gated_delta: Callable[..., Tensor],
    short_conv: Callable[..., Tensor],
    mamba: Callable[..., Tensor],
    token_index: Callable[..., Chosen | None],
    mlp: Callable[..., Tensor],
    experts: Callable[..., Tensor],
    layer_input: Callable[..., Tensor],
    streams_in: Callable[..., tuple[Tensor, Tensor, Tensor]],
    streams_out: Callable[..., Tensor],
    hyper_in: Callable[..., tuple[Tensor, Tensor]],
    hyper_out: Callable[..., Tensor],
    ngrams: Callable[..., Tensor],
    x: Tensor,
    layers: Sequence[LayerCall],
    caches: Sequence[LayerCache],
    views: Sequence[View],
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    wanted: Tensor | None = None,
    slots: Tensor | None = None,
    inputs: Tensor | None = None,
    state_starts: Tensor | None = None,
) -> Tensor:
    """Run all layers of a forward pass: [num_tokens, hidden], in place.

    slots    int64 [num_seqs]: state slots of the sequences; None if no layer is recurrent
    wanted   int64 [num_rows], ascending, last tokens of some sequences: only these rows are returned, and for other
             rows the last layer computes only keys and values
    inputs   [num_tokens, layers, size]: per-layer inputs, if the model has them; [num_tokens, size]: rows for `ngrams`;
             int64 [num_tokens]: token ids, if some experts are chosen by these
    state_starts  int32 [len(slots) + 1], replaces `cu_query_lens` for recurrent layers: sequences may be empty
    """
    starts = cu_query_lens if state_starts is None else state_starts
    stateful = {"gated_delta": gated_delta, "short_conv": short_conv, "mamba": mamba}

    streams: Tensor | None = None  # residual streams, if a token has several
    own: StreamWeights | None = None  # the layer's stream weights

    def fed(x: Tensor, ffn: MlpWeights | ExpertsWeights | None, number: int, rows: Tensor | None) -> Tensor:
        if ffn is None:
            return x
        feed = experts if isinstance(ffn, ExpertsWeights) else mlp
        if isinstance(ffn, ExpertsWeights) and ffn.table is not None:
            assert inputs is not None
            feed = partial(experts, ids=inputs if rows is None else inputs[rows])
        if ffn.hyper is not None:
            mixed, gains = hyper_in(x, ffn.hyper)
            x = hyper_out(x, feed(mixed, ffn), gains)
            return reduced(hyper_in, x, ffn.hyper)
        x = feed(x, ffn)
        if ffn.input is None:
            return x
        assert inputs is not None
        given = inputs[slice(None) if rows is None else rows, number]
        return layer_input(x, ffn.input, given) if own is None else streams_out(streams, x, own, ffn.input, given)

    of_layer: Any
    for number, ((weights, ffn, view), of_layer) in enumerate(zip(layers, caches, strict=True)):
        rows = wanted if number == len(layers) - 1 else None
        hyper = getattr(weights, "hyper", None)
        if hyper is not None:
            wide = widened(x, hyper)
            if isinstance(weights, DeltaWeights) and weights.ngrams is not None:
                wide = ngrams(wide, inputs, weights.ngrams, of_layer.ngrams, slots, starts)
            x, gains = hyper_in(wide, hyper)
        if isinstance(weights, AttentionWeights):
            cos, sin, block_table, slot_mapping = views[view]
            own = weights.streams
            if own is not None:
                streams, x, added = streams_in(x, weights)
            where = block_table, cu_query_lens, seq_lens
            chosen = None
            pages, kept = of_layer if weights.second is not None else (of_layer, None)
            if weights.index is not None:
                chosen = token_index(x, weights, pages, views[view], cu_query_lens, seq_lens)
            q = attn_in(x, weights, cos, sin, pages, slot_mapping)
            if weights.second is not None:
                x = mamba(x, weights.second, kept, slots, starts)
            if rows is not None and rows.shape[0] == 0:
                return x[:0]
            attended = sparse_attention(attention, q, weights, pages, *where, chosen)
            if rows is not None:
                attended, x = attended[rows], x[rows]
                if streams is not None:
                    streams, added = streams[rows], added[rows]
                if hyper is not None:
                    wide, gains = wide[rows], gains[rows]
            x = attn_out(attended, fed(x, ffn, number, rows) if weights.parallel else x, weights)
            if hyper is not None:
                x = hyper_out(wide, x, gains)
            if own is not None:
                x = joined(x, added)
                del added
            if weights.parallel:
                continue
        else:
            if isinstance(weights, LatentWeights):
                given = of_layer, views[view], cu_query_lens, seq_lens
                chosen = None if weights.index is None else token_index(x, weights, *given)
                x = sparse_latent(latent_attention, x, weights, *given, chosen)
            elif isinstance(weights, CompressedWeights):
                of_entries = views[weights.entry_view] if weights.pools else None
                x = compressed_attention(x, weights, of_layer, views[view], of_entries, cu_query_lens, seq_lens)
            elif weights is not None:
                x = stateful[STATEFUL[type(weights)]](x, weights, of_layer, slots, starts)
            if hyper is not None:
                x = hyper_out(wide, x, gains)
            x = x if rows is None else x[rows]
        x = fed(x, ffn, number, rows) if x.shape[0] else x
        streams = None  # free the predictions; the memory plan counts on it
    return x if own is None else narrowed(x, own)


def with_images(table: KernelTable, images: Sequence[Any], windowed: bool = False) -> Callable[..., Tensor]:
    """Return `decoder` for a step with image rows, which attend bidirectionally within their image.

    images    `models.inputs.ImageRows`
    windowed  only in layers with a window
    """

    def attention(
        q: Tensor,
        weights: AttentionWeights,
        pages: KVPages,
        block_table: Tensor,
        cu_query_lens: Tensor,
        seq_lens: Tensor,
    ) -> Tensor:
        out = table.attention(q, weights, pages, block_table, cu_query_lens, seq_lens)
        how = (weights.scale, weights.window, weights.softcap, weights.sinks)
        for image in () if windowed and weights.window is None else images:
            rows = slice(image.first, image.first + image.vectors.shape[0])
            seen = reference.image_attention(q[rows], pages, block_table[image.sequence], image.position, *how)
            out[rows] = seen.flatten(1).to(out.dtype)
        return out

    function, parts = COMPOSED["decoder"]
    return partial(function, *(attention if part == "attention" else getattr(table, part) for part in parts))


def head(rms_norm: Callable[..., Tensor], x: Tensor, weights: HeadWeights) -> Tensor:
    """Logits, float32 [rows, vocab]."""
    logits = product(weights.linear, norm_rows(rms_norm, x, weights.norm), weights.join).float()
    if weights.softcap is None:
        return logits
    return torch.tanh(logits / weights.softcap).mul_(weights.softcap)


def step(
    decoder: Callable[..., Tensor],
    head: Callable[..., Tensor],
    token_ids: Tensor,
    positions: Tensor,
    embedding: Embedding,
    layers: Sequence[LayerCall],
    caches: Sequence[LayerCache],
    views: Sequence[View],
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    weights: HeadWeights,
    finds_best: bool = False,
    slots: Tensor | None = None,
) -> Stepped:
    """Run the whole forward pass, from token ids to logits of every token.

    token_ids, positions   int64 [num_tokens]
    views                  with cos and sin of all positions: float32 [positions, half]
    """
    turned = [(cos[positions], sin[positions], *pages) for cos, sin, *pages in views]
    x = embedding(token_ids, positions)
    inputs = embedding.layer_inputs(token_ids, x)
    x = decoder(x, layers, caches, turned, cu_query_lens, seq_lens, None, slots, inputs)
    return x, head(x, weights), None


# segment -> (function, the ops and segments it takes as leading arguments)
COMPOSED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "attn_in": (attn_in, ("rms_norm", "rope", "kv_write")),
    "attention": (attention, ("paged_attention",)),
    "attn_out": (attn_out, ("rms_norm",)),
    "latent_attention": (latent_attention, ("rms_norm", "rope")),
    "compressed_attention": (compressed_attention, ("rms_norm", "rope", "index_scores")),
    "gated_delta": (gated_delta, ("rms_norm", "causal_conv", "delta_rule", "silu_mul")),
    "short_conv": (short_conv, ("rms_norm", "causal_conv")),
    "mamba": (mamba, ("rms_norm", "causal_conv", "state_space", "silu_mul")),
    "token_index": (token_index, ("rms_norm", "rope", *SPARSE)),
    "mlp": (mlp, ("rms_norm", "silu_mul", "gelu_tanh_mul")),
    "head": (head, ("rms_norm",)),
    "experts": (experts, ("rms_norm", "silu_mul", "gelu_tanh_mul")),
    "layer_input": (layer_input, ("rms_norm", "silu_mul", "gelu_tanh_mul")),
    "streams_in": (streams_in, ("rms_norm",)),
    "streams_out": (streams_out, ("rms_norm", "silu_mul", "gelu_tanh_mul")),
    "hyper_in": (hyper_in, ("rms_norm",)),
    "hyper_out": (hyper_out, ()),
    "ngrams": (ngrams, ("rms_norm", "causal_conv")),
    "decoder": (
        decoder,
        (
            *("attn_in", "attention", "attn_out", "latent_attention", "compressed_attention"),
            *("gated_delta", "short_conv", "mamba"),
            *("token_index", "mlp", "experts", "layer_input", "streams_in", "streams_out"),
            *("hyper_in", "hyper_out", "ngrams"),
        ),
    ),
    "step": (step, ("decoder", "head")),
}


def composed(segment: str, runs: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Build a segment from the parts in `runs`."""
    function, parts = COMPOSED[segment]
    return partial(function, *(runs[part] for part in parts))


# every op and segment in plain PyTorch
_MODULES = {op: module for module, ops in ((recurrent, RECURRENT), (sparse, SPARSE)) for op in ops}
REFERENCES: dict[str, Callable[..., Any]] = {op: getattr(_MODULES.get(op, reference), op) for op in OPS}
for _segment in SEGMENTS:
    REFERENCES[_segment] = composed(_segment, REFERENCES)
