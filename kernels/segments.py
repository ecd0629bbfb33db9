"""What a decoder layer calls: a few segments, each composed of single ops here, and the frozen `KernelTable` of them.

    attn_in      norm, QKV, QK-norm, RoPE, KV write        attention   paged attention
    attn_out     output projection, residual               mlp         norm, gate/up, activation, down, residual
    latent_attention  norm, projections, RoPE, latents written, attention over them, output projection, residual
    gated_delta  norm, projections, convolution, gated delta rule, gated norm, output projection, residual
    short_conv   norm, projection, gate, convolution, gate, output projection, residual
    mamba        norm, projection, convolution, state space, gated norm, output projection, residual
    experts      as mlp, where a router chooses among many
    layer_input  gate, a token's numbers for the layer, projection, norm, residual
    streams_in   where a token has several residual streams: each predicted, the first for the layer, LAuReL
    streams_out  each corrected by what the layer made of the first, a token's numbers for the layer
    head         norm, vocabulary projection, soft-cap  (and a norm before each residual where the model has one)

and what is made of them: `decoder`, all layers; `step`, from token ids to logits. The composed segments are always
there and are the references of fused ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import recurrent, reference
from .embedding import Embedding
from .experts import mixture, shared, swiglu_oai
from .kv_pages import KVPages
from .layer_weights import (
    AttentionWeights,
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
from .registry import OPS, RECURRENT, SEGMENTS
from .streams import joined, let_in, moments, narrowed, streams_in, streams_out

# weights of a mixer that keeps a state -> its segment
STATEFUL = {DeltaWeights: "gated_delta", ConvWeights: "short_conv", MambaWeights: "mamba"}


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The segments of one model, chosen once at load. Where a kernel fails, another table is built.

    Each is called as the function of its name below, less the ops and segments that it takes first; `step` wants the
    logits of every token, and x may be overwritten.
    """

    attn_in: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    attn_out: Callable[..., Tensor]
    latent_attention: Callable[..., Tensor]
    gated_delta: Callable[..., Tensor]
    short_conv: Callable[..., Tensor]
    mamba: Callable[..., Tensor]
    mlp: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    layer_input: Callable[..., Tensor]
    streams_in: Callable[..., tuple[Tensor, Tensor, Tensor]]
    streams_out: Callable[..., Tensor]
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
    """x + post_norm(down(act(gate) · up)) of the normed x: [num_tokens, hidden], in the place of x."""
    plain = {"gelu": reference.gelu, "gelu_erf": reference.gelu_mul, "relu2": reference.relu2}
    activated = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, **plain}[weights.activation]
    normed = norm_rows(rms_norm, x, weights.norm)  # lives on until the end: the plan counts it
    out = product(weights.down, activated(thinned(weights.gate_up(normed), weights.cut)), weights.join)
    x = norm_rows(rms_norm, add_output(rms_norm, x, out, weights.post_norm), weights.sum_norm)
    return x if weights.scale == 1.0 else x.mul_(weights.scale)


def thinned(rows: Tensor, cut: float | None) -> Tensor:
    """Gates and ups [num_tokens, 2 inner], in their place: gates less mean + `cut` deviations of a token's gates, where
    they are above that, and 0 elsewhere. All of them without a cut.
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
) -> Tensor:
    """x + post_norm(sum of the chosen experts of the normed x): [num_tokens, hidden], in the place of x.

    mix   what stands for `experts.mixture`
    """
    plain = {"swiglu_oai": swiglu_oai, "relu2": reference.relu2}
    activations = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, **plain}
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
        given = total(shared(norm_rows(rms_norm, x, own.shared), weights, activate)).to(x.dtype)
        out = out + norm_rows(rms_norm, given, own.after_shared)
    x = add_output(rms_norm, x, out, weights.post_norm)
    return x if weights.layer_scale == 1.0 else x.mul_(weights.layer_scale)


def layer_input(
    rms_norm: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    gelu_tanh_mul: Callable[..., Tensor],
    x: Tensor,
    weights: InputWeights,
    given: Tensor,
) -> Tensor:
    """(x + norm(projection(act(gate of x) · given))) · scale: [num_tokens, hidden], in the place of x.

    given   [num_tokens, size]: what each token has for this layer
    """
    x = x.add_(let_in(rms_norm, silu_mul, gelu_tanh_mul, x, weights, given))
    return x if weights.scale == 1.0 else x.mul_(weights.scale)


def decoder(
    attn_in: Callable[..., Tensor],
    attention: Callable[..., Tensor],
    attn_out: Callable[..., Tensor],
    latent_attention: Callable[..., Tensor],
    gated_delta: Callable[..., Tensor],
    short_conv: Callable[..., Tensor],
    mamba: Callable[..., Tensor],
    mlp: Callable[..., Tensor],
    experts: Callable[..., Tensor],
    layer_input: Callable[..., Tensor],
    streams_in: Callable[..., tuple[Tensor, Tensor, Tensor]],
    streams_out: Callable[..., Tensor],
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
    """All layers of a forward pass: [num_tokens, hidden], in the place of x.

    slots    int64 [num_seqs]: of the sequences' states; None where no layer keeps one
    wanted   int64 [num_rows], ascending, of every sequence none or its last tokens: the result has these rows only, and
             the last layer computes no more than that of the others but their keys and values
    inputs   [num_tokens, layers, size]: what each token has for each layer, where layers take it in
    state_starts  int32 [len(slots) + 1], in place of `cu_query_lens` for layers with states: sequences may be empty
    """
    starts = cu_query_lens if state_starts is None else state_starts
    stateful = {"gated_delta": gated_delta, "short_conv": short_conv, "mamba": mamba}

    streams: Tensor | None = None  # where a token has several
    own: StreamWeights | None = None  # of the layer

    def fed(x: Tensor, ffn: MlpWeights | ExpertsWeights | None, number: int, rows: Tensor | None) -> Tensor:
        if ffn is None:
            return x
        x = experts(x, ffn) if isinstance(ffn, ExpertsWeights) else mlp(x, ffn)
        if ffn.input is None:
            return x
        assert inputs is not None
        given = inputs[slice(None) if rows is None else rows, number]
        return layer_input(x, ffn.input, given) if own is None else streams_out(streams, x, own, ffn.input, given)

    for number, ((weights, ffn, view), of_layer) in enumerate(zip(layers, caches, strict=True)):
        rows = wanted if number == len(layers) - 1 else None
        if isinstance(weights, AttentionWeights):
            cos, sin, block_table, slot_mapping = views[view]
            own = weights.streams
            if own is not None:
                streams, x, added = streams_in(x, weights)
            q = attn_in(x, weights, cos, sin, of_layer, slot_mapping)
            if rows is not None and rows.shape[0] == 0:
                return x[:0]
            attended = attention(q, weights, of_layer, block_table, cu_query_lens, seq_lens)
            if rows is not None:
                attended, x = attended[rows], x[rows]
                if streams is not None:
                    streams, added = streams[rows], added[rows]
            x = attn_out(attended, fed(x, ffn, number, rows) if weights.parallel else x, weights)
            if own is not None:
                x = joined(x, added)
                del added
            if weights.parallel:
                continue
        else:
            if isinstance(weights, LatentWeights):
                x = latent_attention(x, weights, of_layer, views[view], cu_query_lens, seq_lens)
            elif weights is not None:
                x = stateful[STATEFUL[type(weights)]](x, weights, of_layer, slots, starts)
            x = x if rows is None else x[rows]
        x = fed(x, ffn, number, rows) if x.shape[0] else x
        streams = None  # what was predicted goes: the plan counts on it
    return x if own is None else narrowed(x, own)


def with_images(table: KernelTable, images: Sequence[Any], windowed: bool = False) -> Callable[..., Tensor]:
    """`decoder` for a step with rows of images, each of which sees all of its image; other rows come out as always.

    images    `models.inputs.ImageRows`
    windowed  in layers with a window only
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
    """From token ids to logits of every token.

    token_ids, positions   int64 [num_tokens]
    views                  cos and sin are those of all positions: float32 [positions, half]
    """
    turned = [(cos[positions], sin[positions], *pages) for cos, sin, *pages in views]
    x = embedding(token_ids, positions)
    inputs = embedding.layer_inputs(token_ids, x)
    x = decoder(x, layers, caches, turned, cu_query_lens, seq_lens, None, slots, inputs)
    return x, head(x, weights), None


# segment -> the function above, and the ops and segments it takes first
COMPOSED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "attn_in": (attn_in, ("rms_norm", "rope", "kv_write")),
    "attention": (attention, ("paged_attention",)),
    "attn_out": (attn_out, ("rms_norm",)),
    "latent_attention": (latent_attention, ("rms_norm", "rope")),
    "gated_delta": (gated_delta, ("rms_norm", "causal_conv", "delta_rule", "silu_mul")),
    "short_conv": (short_conv, ("rms_norm", "causal_conv")),
    "mamba": (mamba, ("rms_norm", "causal_conv", "state_space", "silu_mul")),
    "mlp": (mlp, ("rms_norm", "silu_mul", "gelu_tanh_mul")),
    "head": (head, ("rms_norm",)),
    "experts": (experts, ("rms_norm", "silu_mul", "gelu_tanh_mul")),
    "layer_input": (layer_input, ("rms_norm", "silu_mul", "gelu_tanh_mul")),
    "streams_in": (streams_in, ("rms_norm",)),
    "streams_out": (streams_out, ("rms_norm", "silu_mul", "gelu_tanh_mul")),
    "decoder": (
        decoder,
        (
            *("attn_in", "attention", "attn_out", "latent_attention", "gated_delta", "short_conv", "mamba"),
            *("mlp", "experts", "layer_input", "streams_in", "streams_out"),
        ),
    ),
    "step": (step, ("decoder", "head")),
}


def composed(segment: str, runs: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A segment made of what `runs` has under the names of its parts."""
    function, parts = COMPOSED[segment]
    return partial(function, *(runs[part] for part in parts))


# every op and segment in plain PyTorch
REFERENCES: dict[str, Callable[..., Any]] = {op: getattr(recurrent if op in RECURRENT else reference, op) for op in OPS}
for _segment in SEGMENTS:
    REFERENCES[_segment] = composed(_segment, REFERENCES)
