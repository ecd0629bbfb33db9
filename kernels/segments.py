"""What a decoder layer calls: a few segments, each composed of single ops here, and the frozen `KernelTable` of them.

    attn_in      norm, QKV, QK-norm, RoPE, KV write        attention   paged attention
    attn_out     output projection, residual               mlp         norm, gate/up, activation, down, residual
    latent_attention  norm, projections, RoPE, latents written, attention over them, output projection, residual
    gated_delta  norm, projections, convolution, gated delta rule, gated norm, output projection, residual
    short_conv   norm, projection, gate, convolution, gate, output projection, residual
    mamba        norm, projection, convolution, state space, gated norm, output projection, residual
    experts      as mlp, where a router chooses among many
    layer_input  gate, a token's numbers for the layer, projection, norm, residual
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
    Norm,
    Stepped,
    View,
)
from .recurrent import sigmoid, softplus
from .registry import OPS, RECURRENT, SEGMENTS
from .state_slots import StateSlots

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
    head: Callable[..., Tensor]
    decoder: Callable[..., Tensor]
    step: Callable[..., Stepped]
    ops: tuple[tuple[str, str], ...]  # (op or fused segment, name of the implementation chosen)


def _normed(rms_norm: Callable[..., Tensor], x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    if norm.bias is not None:
        return reference.layer_norm(x, norm.weight, norm.bias, norm.eps)
    return rms_norm(x, norm.weight, norm.eps)


def _added(rms_norm: Callable[..., Tensor], x: Tensor, out: Tensor, post_norm: Norm | None) -> Tensor:
    return x.add_(_normed(rms_norm, out, post_norm))


def _normed_heads(rms_norm: Callable[..., Tensor], heads: Tensor, norm: Norm, whole: bool) -> Tensor:
    """Norms of each of a token's heads, or of all of them as one: [num_tokens, heads, head_dim]."""
    return _normed(rms_norm, heads.flatten(1).unsqueeze(1) if whole else heads, norm).view(heads.shape)


def attn_in(
    rms_norm: Callable[..., Tensor],
    rope: Callable[..., Tensor],
    kv_write: Callable[..., None],
    x: Tensor,
    weights: AttentionWeights,
    cos: Tensor,
    sin: Tensor,
    pages: KVPages,
    slot_mapping: Tensor,
) -> Tensor:
    """Norm, QKV, QK-norm and RoPE; stores keys and values. Returns q [num_tokens, num_heads, head_dim].

    Where heads have gates, q [num_tokens, num_heads, 2 head_dim] has each gate behind its query.
    """
    heads, dim = weights.num_heads, weights.head_dim
    kv_heads = 0 if weights.reads_only else weights.num_kv_heads
    v_heads = 0 if weights.k_is_v else kv_heads
    normed = _normed(rms_norm, x, weights.norm)  # lives on until the end: the plan counts it
    rows = weights.qkv(normed)
    gates = None
    if weights.gate:
        gated, rest = rows.split([2 * heads * dim, (kv_heads + v_heads) * dim], -1)
        queries, gates = gated.view(-1, heads, 2 * dim).split(dim, -1)
        rows = torch.cat([queries.flatten(1), rest], -1)
    qkv = rows.view(-1, heads + kv_heads + v_heads, dim)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, -kv_heads:]
    if weights.q_norm is not None:
        q = _normed_heads(rms_norm, q, weights.q_norm, weights.whole_norms)
    if weights.reads_only:
        q = rope(q, cos, sin, weights.interleaved)
    else:
        v = _normed(rms_norm, v, weights.v_norm)
        if weights.k_norm is None:
            rotated = rope(qkv[:, : heads + kv_heads], cos, sin, weights.interleaved)
            q, k = rotated[:, :heads], rotated[:, heads:]
        else:
            k = _normed_heads(rms_norm, k, weights.k_norm, weights.whole_norms)
            q = rope(q, cos, sin, weights.interleaved)
            k = rope(k, cos, sin, weights.interleaved)
        kv_write(k, v, pages, slot_mapping)
    return q if gates is None else torch.cat([q, gates], -1)


def _grown(q: Tensor, weights: AttentionWeights, cu_query_lens: Tensor, seq_lens: Tensor) -> Tensor:
    """Queries as they grow with their position."""
    if weights.temperature is None:
        return q
    growth, every = weights.temperature
    tokens = torch.arange(q.shape[0], dtype=cu_query_lens.dtype, device=q.device)
    ends = cu_query_lens[1:].contiguous()
    owner = torch.searchsorted(ends, tokens, right=True).clamp_(max=ends.shape[0] - 1)
    steps = (seq_lens[owner] - ends[owner] + tokens) // every
    return q * (1 + growth * torch.log1p(steps.float())).to(q.dtype)[:, None, None]


def attention(
    paged_attention: Callable[..., Tensor],
    q: Tensor,
    weights: AttentionWeights,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """Attention over the pages, gated where heads have gates: [num_tokens, num_heads * head_dim]."""
    given = (weights.scale, weights.window, weights.softcap, weights.sinks)
    if not weights.causal:  # the reference alone knows it
        mixed = reference.paged_attention(q, pages, block_table, cu_query_lens, seq_lens, *given, causal=False)
        return mixed.view(q.shape[0], -1)
    if not weights.gate:
        q = _grown(q, weights, cu_query_lens, seq_lens)
        return paged_attention(q, pages, block_table, cu_query_lens, seq_lens, *given).view(q.shape[0], -1)
    queries, gates = q.split(weights.head_dim, -1)
    queries = _grown(queries.contiguous(), weights, cu_query_lens, seq_lens)
    mixed = paged_attention(queries, pages, block_table, cu_query_lens, seq_lens, *given)
    return (mixed * sigmoid(gates)).to(mixed.dtype).view(q.shape[0], -1)


def attn_out(rms_norm: Callable[..., Tensor], attended: Tensor, x: Tensor, weights: AttentionWeights) -> Tensor:
    """x + post_norm(attended Wᵀ): [num_tokens, hidden], in the place of x."""
    return _normed(rms_norm, _added(rms_norm, x, weights.out(attended), weights.post_norm), weights.sum_norm)


def latent_attention(
    rms_norm: Callable[..., Tensor],
    rope: Callable[..., Tensor],
    x: Tensor,
    weights: LatentWeights,
    pages: KVPages,
    view: View,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """x + what attention over latents gives of the normed x: [num_tokens, hidden], in the place of x.

    Keys and values are never made: a head's query goes to the latents by `k_up`, and their weighted sum becomes its
    value by `v_up`. So prompts and single tokens are summed in the same order.
    """
    cos, sin, block_table, slot_mapping = view
    count, heads, rank, turned = x.shape[0], len(weights.k_up), weights.rank, weights.turned
    rows, latent = weights.qkv(_normed(rms_norm, x, weights.norm)).split(
        [weights.qkv.out_features - rank - turned, rank + turned], -1
    )
    if weights.q_up is not None:
        rows = weights.q_up(_normed(rms_norm, rows.contiguous(), weights.q_norm))
    rows = rows.reshape(count, heads, -1)
    still = rows.shape[2] - turned
    kept = _normed(rms_norm, latent[:, :rank].contiguous(), weights.kv_norm)
    key = rope(latent[:, rank:].contiguous().unsqueeze(1), cos, sin, weights.interleaved)
    reference.kv_write(kept.unsqueeze(1), key, pages, slot_mapping)  # kernels want values as wide as keys
    q = rows.new_empty((count, heads, rank + turned))
    q[..., rank:] = rope(rows[..., still:].contiguous(), cos, sin, weights.interleaved)
    for head, up in enumerate(weights.k_up):
        q[:, head, :rank] = up(rows[:, head, :still].contiguous())
    mixed = reference.latent_attention(q, pages, block_table, cu_query_lens, seq_lens, weights.scale)
    values = [up(mixed[:, head].contiguous()) for head, up in enumerate(weights.v_up)]
    return _added(rms_norm, x, weights.out(torch.cat(values, -1)), weights.post_norm)


def gated_delta(
    rms_norm: Callable[..., Tensor],
    causal_conv: Callable[..., Tensor],
    delta_rule: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    x: Tensor,
    weights: DeltaWeights,
    kept: StateSlots,
    slots: Tensor,
    cu_query_lens: Tensor,
) -> Tensor:
    """x + out(norm(y) silu(z)), y the gated delta rule of the normed x: [num_tokens, hidden], in the place of x.

    kept    the states, changed
    slots   int64 [num_seqs]: whose they are
    """
    keys, heads, dim = weights.num_k_heads * weights.k_dim, weights.num_v_heads, weights.v_dim
    normed = _normed(rms_norm, x, weights.norm)
    rows = weights.qkvz(normed)
    mixed, z = rows.split([2 * keys + heads * dim, heads * dim], -1)
    b, a = weights.ba(normed).float().chunk(2, -1)
    mixed = causal_conv(mixed, weights.conv, None, kept.conv, slots, cu_query_lens)
    q, k, v = (mixed * sigmoid(mixed)).split([keys, keys, heads * dim], -1)
    of_keys, of_values = (-1, weights.num_k_heads, weights.k_dim), (-1, heads, dim)
    given = q.reshape(of_keys), k.reshape(of_keys), v.reshape(of_values)
    decay = softplus(a + weights.dt_bias).mul_(weights.decay)
    y = delta_rule(*given, decay, sigmoid(b), kept.state, slots, cu_query_lens, weights.tiled)
    y = _normed(rms_norm, y, weights.out_norm).flatten(1)
    gated = silu_mul(torch.cat([z.float(), y], -1)).to(x.dtype)
    return x.add_(weights.out(gated))


def short_conv(
    rms_norm: Callable[..., Tensor],
    causal_conv: Callable[..., Tensor],
    x: Tensor,
    weights: ConvWeights,
    kept: StateSlots,
    slots: Tensor,
    cu_query_lens: Tensor,
) -> Tensor:
    """x + out(c · conv(b · h)), where b, c and h are made of the normed x: [num_tokens, hidden], in the place of x.

    kept, slots   as of `gated_delta`; there is no state but the convolution's
    """
    b, c, h = weights.inputs(_normed(rms_norm, x, weights.norm)).chunk(3, -1)
    mixed = causal_conv(b * h, weights.conv, weights.bias, kept.conv, slots, cu_query_lens)
    return x.add_(weights.out((c * mixed).to(x.dtype)))


def mamba(
    rms_norm: Callable[..., Tensor],
    causal_conv: Callable[..., Tensor],
    state_space: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    x: Tensor,
    weights: MambaWeights,
    kept: StateSlots,
    slots: Tensor,
    cu_query_lens: Tensor,
) -> Tensor:
    """x + out(norm(y silu(z))), y the state space of the normed x: [num_tokens, hidden], in the place of x.

    kept, slots   as of `gated_delta`
    """
    heads, dim, groups, size = weights.num_heads, weights.head_dim, weights.num_groups, weights.state_size
    inner, shared = heads * dim, groups * size
    z, mixed, steps = weights.inputs(_normed(rms_norm, x, weights.norm)).split([inner, inner + 2 * shared, heads], -1)
    mixed = causal_conv(mixed, weights.conv, weights.conv_bias, kept.conv, slots, cu_query_lens)
    values, b, c = mixed.mul_(sigmoid(mixed)).split([inner, shared, shared], -1)
    steps = softplus(steps.float() + weights.dt_bias)
    if weights.steps is not None:
        steps = steps.clamp_(*weights.steps)
    values, b, c = values.unflatten(-1, (heads, dim)), b.unflatten(-1, (groups, size)), c.unflatten(-1, (groups, size))
    y = state_space(values, b, c, steps, weights.decay, kept.state, slots, cu_query_lens)
    y += values * weights.skip.unsqueeze(-1)
    gated = silu_mul(torch.cat([z.float(), y.flatten(1)], -1)).unflatten(-1, (groups, -1))
    normed = _normed(rms_norm, gated, weights.out_norm).flatten(1) * weights.gain
    return x.add_(weights.out(normed.to(x.dtype)))


def mlp(
    rms_norm: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    gelu_tanh_mul: Callable[..., Tensor],
    x: Tensor,
    weights: MlpWeights,
) -> Tensor:
    """x + post_norm(down(act(gate) · up)) of the normed x: [num_tokens, hidden], in the place of x."""
    plain = {"gelu": reference.gelu, "relu2": reference.relu2}
    activated = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, **plain}[weights.activation]
    normed = _normed(rms_norm, x, weights.norm)  # lives on until the end: the plan counts it
    out = weights.down(activated(weights.gate_up(normed)))
    x = _normed(rms_norm, _added(rms_norm, x, out, weights.post_norm), weights.sum_norm)
    return x if weights.scale == 1.0 else x.mul_(weights.scale)


def experts(
    rms_norm: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    gelu_tanh_mul: Callable[..., Tensor],
    x: Tensor,
    weights: ExpertsWeights,
) -> Tensor:
    """x + post_norm(sum of the chosen experts of the normed x): [num_tokens, hidden], in the place of x."""
    plain = {"swiglu_oai": swiglu_oai, "relu2": reference.relu2}
    activations = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, **plain}
    activate, own = activations[weights.activation], weights.apart
    normed = _normed(rms_norm, x, weights.norm)
    if own is None:
        out = mixture(normed, normed, weights, activate)
        out = shared(normed, weights, activate, out).to(x.dtype)
    else:
        out = mixture(normed, _normed(rms_norm, x, own.router), weights, activate).to(x.dtype)
        out = _normed(rms_norm, out, own.after_experts)
        given = shared(_normed(rms_norm, x, own.shared), weights, activate).to(x.dtype)
        out = out + _normed(rms_norm, given, own.after_shared)
    x = _added(rms_norm, x, out, weights.post_norm)
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
    activated = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}[weights.activation]
    let_in = activated(torch.cat([weights.gate(x), given], -1))
    x = _added(rms_norm, x, weights.projection(let_in), weights.norm)
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
    x: Tensor,
    layers: Sequence[LayerCall],
    caches: Sequence[LayerCache],
    views: Sequence[View],
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    wanted: Tensor | None = None,
    slots: Tensor | None = None,
    inputs: Tensor | None = None,
) -> Tensor:
    """All layers of a forward pass: [num_tokens, hidden], in the place of x.

    slots    int64 [num_seqs]: of the sequences' states; None where no layer keeps one
    wanted   int64 [num_rows], ascending, of every sequence none or its last tokens: the result has these rows only, and
             the last layer computes no more than that of the others but their keys and values
    inputs   [num_tokens, layers, size]: what each token has for each layer, where layers take it in
    """
    stateful = {"gated_delta": gated_delta, "short_conv": short_conv, "mamba": mamba}

    def fed(x: Tensor, number: int, rows: Tensor | None) -> Tensor:
        ffn = layers[number][1]
        if ffn is None:
            return x
        x = experts(x, ffn) if isinstance(ffn, ExpertsWeights) else mlp(x, ffn)
        if ffn.input is None:
            return x
        assert inputs is not None
        given = inputs[:, number]
        return layer_input(x, ffn.input, given if rows is None else given[rows])

    for number, ((weights, _, view), of_layer) in enumerate(zip(layers, caches, strict=True)):
        rows = wanted if number == len(layers) - 1 else None
        if isinstance(weights, AttentionWeights):
            cos, sin, block_table, slot_mapping = views[view]
            q = attn_in(x, weights, cos, sin, of_layer, slot_mapping)
            if rows is not None and rows.shape[0] == 0:
                return x[:0]
            attended = attention(q, weights, of_layer, block_table, cu_query_lens, seq_lens)
            if rows is not None:
                attended, x = attended[rows], x[rows]
            x = attn_out(attended, x, weights)
        else:
            if isinstance(weights, LatentWeights):
                x = latent_attention(x, weights, of_layer, views[view], cu_query_lens, seq_lens)
            elif weights is not None:
                x = stateful[STATEFUL[type(weights)]](x, weights, of_layer, slots, cu_query_lens)
            x = x if rows is None else x[rows]
        x = fed(x, number, rows) if x.shape[0] else x
    return x


def with_images(table: KernelTable, images: Sequence[Any]) -> Callable[..., Tensor]:
    """`decoder` for a step with rows of images, each of which sees all of its image; other rows come out as always.

    images  `models.inputs.ImageRows`
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
        for image in images:
            rows = slice(image.first, image.first + image.vectors.shape[0])
            seen = reference.image_attention(q[rows], pages, block_table[image.sequence], image.position, *how)
            out[rows] = seen.flatten(1).to(out.dtype)
        return out

    function, parts = COMPOSED["decoder"]
    return partial(function, *(attention if part == "attention" else getattr(table, part) for part in parts))


def head(rms_norm: Callable[..., Tensor], x: Tensor, weights: HeadWeights) -> Tensor:
    """Logits, float32 [rows, vocab]."""
    logits = weights.linear(_normed(rms_norm, x, weights.norm)).float()
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
    "decoder": (
        decoder,
        (
            *("attn_in", "attention", "attn_out", "latent_attention", "gated_delta", "short_conv", "mamba"),
            *("mlp", "experts", "layer_input"),
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
