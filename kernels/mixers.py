"""Token mixers composed from single ops: paged attention, latent attention and the recurrent mixers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .kv_pages import KVPages
from .layer_weights import (
    AttentionWeights,
    ConvWeights,
    DeltaWeights,
    LatentWeights,
    MambaWeights,
    Norm,
    View,
    product,
)
from .recurrent import sigmoid, softplus
from .state_slots import StateSlots


def norm_rows(rms_norm: Callable[..., Tensor], x: Tensor, norm: Norm | None) -> Tensor:
    """Normalize x over its last dimension; return x unchanged if there is no norm."""
    if norm is None:
        return x
    if norm.bias is not None:
        return reference.layer_norm(x, norm.weight, norm.bias, norm.eps)
    if norm.groups > 1:
        return reference.group_norm(x, norm.weight, norm.eps, norm.groups)
    return rms_norm(x, norm.weight, norm.eps)


def add_output(rms_norm: Callable[..., Tensor], x: Tensor, out: Tensor, post_norm: Norm | None) -> Tensor:
    """x + post_norm(out), in place."""
    return x.add_(norm_rows(rms_norm, out, post_norm))


def norm_heads(rms_norm: Callable[..., Tensor], heads: Tensor, norm: Norm, whole: bool) -> Tensor:
    """Normalize each head, or all heads of a token together if `whole`: [num_tokens, heads, head_dim]."""
    return norm_rows(rms_norm, heads.flatten(1).unsqueeze(1) if whole else heads, norm).view(heads.shape)


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
    """Norm, QKV, QK-norm, RoPE and KV write. Returns q [num_tokens, num_heads, head_dim].

    With gated heads, q is [num_tokens, num_heads, 2 head_dim]: each query followed by its gate.
    """
    heads, dim = weights.num_heads, weights.head_dim
    kv_heads = 0 if weights.reads_only else weights.num_kv_heads
    v_heads = 0 if weights.k_is_v else kv_heads
    normed = norm_rows(rms_norm, x, weights.norm)  # stays alive to the end; the memory plan counts it
    rows = weights.qkv(normed)
    gates = None
    if weights.head_gates:
        queries, numbers, rest = rows.split([heads * dim, heads, (kv_heads + v_heads) * dim], -1)
        gates = numbers.unsqueeze(-1).expand(-1, -1, dim)
        rows = torch.cat([queries, rest], -1)
    elif weights.gate:
        gated, rest = rows.split([2 * heads * dim, (kv_heads + v_heads) * dim], -1)
        queries, gates = gated.view(-1, heads, 2 * dim).split(dim, -1)
        rows = torch.cat([queries.flatten(1), rest], -1)
    if weights.value_dim:
        rows, values = rows.split([(heads + kv_heads) * dim, v_heads * weights.value_dim], -1)
        values = functional.pad(values.unflatten(-1, (v_heads, -1)), (0, dim - weights.value_dim))
        rows = torch.cat([rows, values.flatten(1)], -1)
    qkv = rows.view(-1, heads + kv_heads + v_heads, dim)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, -kv_heads:]

    def turned(part: Tensor, norm: Norm | None) -> Tensor:
        if norm is not None and not weights.late_norms:
            part = norm_heads(rms_norm, part, norm, weights.whole_norms)
        part = rope(part, cos, sin, weights.interleaved)
        return part if norm is None or not weights.late_norms else norm_heads(rms_norm, part, norm, weights.whole_norms)

    if weights.reads_only:
        q = turned(q, weights.q_norm)
    else:
        v = norm_rows(rms_norm, v if weights.value_scale == 1.0 else v * weights.value_scale, weights.v_norm)
        if weights.k_norm is None:
            rotated = turned(qkv[:, : heads + kv_heads], None)
            q, k = rotated[:, :heads], rotated[:, heads:]
        else:
            q, k = turned(q, weights.q_norm), turned(k, weights.k_norm)
        kv_write(k, v, pages, slot_mapping)
    return q if gates is None else torch.cat([q, gates], -1)


def growth(
    temperature: tuple[float, int], num_tokens: int, cu_query_lens: Tensor, seq_lens: Tensor, offset: int = 0
) -> Tensor:
    """Position-dependent factor of each token's query: float32 [num_tokens].

    1 + strength · log1p(floor((position + offset) / every)), temperature = (strength, every)
    """
    strength, every = temperature
    tokens = torch.arange(num_tokens, dtype=cu_query_lens.dtype, device=cu_query_lens.device)
    ends = cu_query_lens[1:].contiguous()
    owner = torch.searchsorted(ends, tokens, right=True).clamp_(max=ends.shape[0] - 1)
    steps = (seq_lens[owner] - ends[owner] + tokens + offset) // every
    return 1 + strength * torch.log1p(steps.float())


def _grown(
    rows: Tensor, weights: AttentionWeights | LatentWeights, cu_query_lens: Tensor, seq_lens: Tensor, offset: int = 0
) -> Tensor:
    """Multiply queries, or the latents they are projected from, [num_tokens, ...], by their `growth`."""
    if weights.temperature is None:
        return rows
    grown = growth(weights.temperature, rows.shape[0], cu_query_lens, seq_lens, offset).to(rows.dtype)
    return rows * grown.view(-1, *[1] * (rows.ndim - 1))


def attention(
    paged_attention: Callable[..., Tensor],
    q: Tensor,
    weights: AttentionWeights,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """Attention over the pages, times sigmoid(gate) for gated heads: [num_tokens, num_heads * values]."""
    options = (weights.scale, weights.window, weights.softcap, weights.sinks, weights.chunked)
    if not weights.causal:  # only the reference supports it
        mixed = reference.paged_attention(q, pages, block_table, cu_query_lens, seq_lens, *options, causal=False)
        return mixed[..., : weights.values].flatten(1)
    if not weights.gate:
        q = _grown(q, weights, cu_query_lens, seq_lens, weights.temperature_offset)
        mixed = paged_attention(q, pages, block_table, cu_query_lens, seq_lens, *options)
        return mixed[..., : weights.values].flatten(1)
    queries, gates = q.split(weights.head_dim, -1)
    queries = _grown(queries.contiguous(), weights, cu_query_lens, seq_lens, weights.temperature_offset)
    mixed = paged_attention(queries, pages, block_table, cu_query_lens, seq_lens, *options)
    factors = softplus(gates.float()) if weights.softplus_gate else sigmoid(gates)
    return (mixed * factors).to(mixed.dtype)[..., : weights.values].flatten(1)


def attn_out(rms_norm: Callable[..., Tensor], attended: Tensor, x: Tensor, weights: AttentionWeights) -> Tensor:
    """x + post_norm(attended Wᵀ): [num_tokens, hidden], in place; attended Wᵀ with hyper-connections."""
    output = product(weights.out, attended, weights.join)
    if weights.hyper is not None:
        return output
    return norm_rows(rms_norm, add_output(rms_norm, x, output, weights.post_norm), weights.sum_norm)


def latent_attention(
    rms_norm: Callable[..., Tensor],
    rope: Callable[..., Tensor],
    x: Tensor,
    weights: LatentWeights,
    pages: KVPages,
    view: View,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    attend: Callable[..., Tensor] = reference.latent_attention,
) -> Tensor:
    """x + out(latent attention of norm(x), times sigmoid(gate) for gated heads): [num_tokens, hidden], in place.

    With hyper-connections x is not added.

    Absorbed form, without materializing keys and values: `k_up` maps a head's query into latent space, and `v_up` maps
    the weighted sum of latents to the head's output. Prefill and decode therefore sum in the same order.
    """
    cos, sin, block_table, slot_mapping = view
    count, heads, rank, turned = x.shape[0], len(weights.k_up), weights.rank, weights.turned
    asked = weights.qkv.out_features - rank - turned - heads * weights.gated
    rows, latent, gates = weights.qkv(norm_rows(rms_norm, x, weights.norm)).tensor_split(
        [asked, asked + rank + turned], -1
    )
    rows = _grown(norm_rows(rms_norm, rows.contiguous(), weights.q_norm), weights, cu_query_lens, seq_lens)
    if weights.q_up is not None:
        rows = weights.q_up(rows)
    rows = rows.reshape(count, heads, -1)
    still = rows.shape[2] - turned
    kept = norm_rows(rms_norm, latent[:, :rank].contiguous(), weights.kv_norm)
    key = rope(latent[:, rank:].contiguous().unsqueeze(1), cos, sin, weights.interleaved)
    factors = sigmoid(gates).to(x.dtype) if weights.gated else None
    reference.kv_write(kept.unsqueeze(1), key, pages, slot_mapping)  # the kernels need values as wide as keys
    q = rows.new_empty((count, heads, rank + turned))
    q[..., rank:] = rope(rows[..., still:].contiguous(), cos, sin, weights.interleaved)
    for head, up in enumerate(weights.k_up):
        q[:, head, :rank] = up(rows[:, head, :still].contiguous())
    mixed = attend(q, pages, block_table, cu_query_lens, seq_lens, weights.scale)
    values = torch.cat([up(mixed[:, head].contiguous()) for head, up in enumerate(weights.v_up)], -1)
    if factors is not None:
        values = (values.unflatten(-1, (heads, -1)) * factors.unsqueeze(-1)).flatten(1)
    output = product(weights.out, values, weights.join)
    return output if weights.hyper is not None else add_output(rms_norm, x, output, weights.post_norm)


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
    """x + out(norm(y) · act(z)), y = gated delta rule of norm(x): [num_tokens, hidden], in place.

    act is silu, or sigmoid with `sigmoid_gate`. With hyper-connections x is not added.

    kept    recurrent states, modified
    slots   int64 [num_seqs]: slot of each sequence's state
    """
    keys, heads, dim = weights.num_k_heads * weights.k_dim, weights.num_v_heads, weights.v_dim
    normed, channels = norm_rows(rms_norm, x, weights.norm), 2 * keys + heads * dim
    mixed, z = weights.qkvz(normed).tensor_split([channels], -1)
    b, a = weights.ba(normed).tensor_split([heads], -1)
    z = z if weights.z_up is None else weights.z_up(z.contiguous())
    a = a if weights.a_up is None else weights.a_up(a.contiguous())
    mixed = causal_conv(mixed, weights.conv, None, kept.conv, slots, cu_query_lens, True)
    q, k, v = mixed.split([keys, keys, heads * dim], -1)
    of_keys, of_values = (-1, weights.num_k_heads, weights.k_dim), (-1, heads, dim)
    qkv = q.reshape(of_keys), k.reshape(of_keys), v.reshape(of_values)
    beta = sigmoid(b).mul_(weights.beta_scale)
    y = delta_rule(*qkv, log_decay(a, weights), beta, kept.state, slots, cu_query_lens, weights.tiled)
    y = norm_rows(rms_norm, y, weights.out_norm).flatten(1)
    gated = y.mul_(sigmoid(z)) if weights.sigmoid_gate else silu_mul(torch.cat([z.float(), y], -1))
    output = product(weights.out, gated.to(x.dtype), weights.join)
    return output if weights.hyper is not None else x.add_(output)


def log_decay(a: Tensor, weights: DeltaWeights) -> Tensor:
    """The log decays of `delta_rule`: float32 [num_tokens, num_v_heads], or [..., k_dim] with one per key channel."""
    given, decay = a.float() + weights.dt_bias, weights.decay
    if given.shape[-1] > weights.num_v_heads:
        given, decay = given.unflatten(-1, (weights.num_v_heads, -1)), decay.unsqueeze(-1)
    if weights.floor is None:
        return softplus(given).mul_(decay)
    return sigmoid(given.mul_(-decay)).mul_(weights.floor)


def short_conv(
    rms_norm: Callable[..., Tensor],
    causal_conv: Callable[..., Tensor],
    x: Tensor,
    weights: ConvWeights,
    kept: StateSlots,
    slots: Tensor,
    cu_query_lens: Tensor,
) -> Tensor:
    """x + post_norm(out(c · conv(b · h))), with b, c, h = inputs(norm(x)): [num_tokens, hidden], in place.

    kept, slots   as in `gated_delta`; the only state is the convolution's
    """
    b, c, h = weights.inputs(norm_rows(rms_norm, x, weights.norm)).chunk(3, -1)
    mixed = causal_conv(b * h, weights.conv, weights.bias, kept.conv, slots, cu_query_lens)
    output = product(weights.out, (c * mixed).to(x.dtype), weights.join)
    return add_output(rms_norm, x, output, weights.post_norm)


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
    """x + out(norm(y · silu(z))), y = Mamba-2 state space of norm(x): [num_tokens, hidden], in place.

    Some models have no second norm.

    kept, slots   as in `gated_delta`
    """
    heads, dim, groups, size = weights.num_heads, weights.head_dim, weights.num_groups, weights.state_size
    inner, shared = heads * dim, groups * size
    z, mixed, steps = weights.inputs(norm_rows(rms_norm, x, weights.norm)).split([inner, inner + 2 * shared, heads], -1)
    mixed = causal_conv(mixed, weights.conv, weights.conv_bias, kept.conv, slots, cu_query_lens, True)
    values, b, c = mixed.split([inner, shared, shared], -1)
    steps = softplus(steps.float() + weights.dt_bias)
    if weights.steps is not None:
        steps = steps.clamp_(*weights.steps)
    values, b, c = values.unflatten(-1, (heads, dim)), b.unflatten(-1, (groups, size)), c.unflatten(-1, (groups, size))
    y = state_space(values, b, c, steps, weights.decay, kept.state, slots, cu_query_lens)
    y += values * weights.skip.unsqueeze(-1)
    gated = silu_mul(torch.cat([z.float(), y.flatten(1)], -1))
    if weights.gain is not None:
        gated = norm_rows(rms_norm, gated.unflatten(-1, (groups, -1)), weights.out_norm).flatten(1) * weights.gain
    return x.add_(product(weights.out, gated.to(x.dtype), weights.join))
