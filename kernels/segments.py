"""What a decoder layer calls: six segments, each composed of single ops here, and the frozen `KernelTable` of them.

    attn_in    norm, QKV, QK-norm, RoPE, KV write        attention   paged attention
    attn_out   output projection, residual               mlp         norm, gate/up, activation, down, residual
    experts    the same where a router chooses among many
    head       norm, vocabulary projection, soft-cap  (and a norm before each residual where the model has one)

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

from . import reference
from .embedding import Embedding
from .experts import mixture, swiglu_oai
from .kv_pages import KVPages
from .layer_weights import AttentionWeights, ExpertsWeights, HeadWeights, LayerCall, MlpWeights, Norm, Stepped, View
from .registry import OPS, SEGMENTS


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The segments of one model, chosen once at load. Where a kernel fails, another table is built.

    Each is called as the function of its name below, less the ops and segments that it takes first; `step` wants the
    logits of every token, and x may be overwritten.
    """

    attn_in: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    attn_out: Callable[..., Tensor]
    mlp: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    head: Callable[..., Tensor]
    decoder: Callable[..., Tensor]
    step: Callable[..., Stepped]
    ops: tuple[tuple[str, str], ...]  # (op or fused segment, name of the implementation chosen)


def _normed(rms_norm: Callable[..., Tensor], x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight, norm.eps)


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
    """Norm, QKV, QK-norm and RoPE; stores keys and values. Returns q [num_tokens, num_heads, head_dim]."""
    heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    normed = _normed(rms_norm, x, weights.norm)  # lives on until the end: the plan counts it
    qkv = weights.qkv(normed).view(-1, heads + 2 * kv_heads, dim)
    v = qkv[:, heads + kv_heads :]
    if weights.q_norm is None or weights.k_norm is None:
        rotated = rope(qkv[:, : heads + kv_heads], cos, sin, weights.interleaved)
        q, k = rotated[:, :heads], rotated[:, heads:]
    else:
        q = _normed_heads(rms_norm, qkv[:, :heads], weights.q_norm, weights.whole_norms)
        k = _normed_heads(rms_norm, qkv[:, heads : heads + kv_heads], weights.k_norm, weights.whole_norms)
        q = rope(q, cos, sin, weights.interleaved)
        k = rope(k, cos, sin, weights.interleaved)
    kv_write(k, v, pages, slot_mapping)
    return q


def attention(
    paged_attention: Callable[..., Tensor],
    q: Tensor,
    weights: AttentionWeights,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """Attention over the pages: [num_tokens, num_heads * head_dim]."""
    given = (weights.scale, weights.window, weights.softcap, weights.sinks)
    mixed = paged_attention(q, pages, block_table, cu_query_lens, seq_lens, *given)
    return mixed.view(q.shape[0], -1)


def attn_out(rms_norm: Callable[..., Tensor], attended: Tensor, x: Tensor, weights: AttentionWeights) -> Tensor:
    """x + post_norm(attended Wᵀ): [num_tokens, hidden], in the place of x."""
    return _added(rms_norm, x, weights.out(attended), weights.post_norm)


def mlp(
    rms_norm: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    gelu_tanh_mul: Callable[..., Tensor],
    x: Tensor,
    weights: MlpWeights,
) -> Tensor:
    """x + post_norm(down(act(gate) · up)) of the normed x: [num_tokens, hidden], in the place of x."""
    activated = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}[weights.activation]
    normed = _normed(rms_norm, x, weights.norm)  # lives on until the end: the plan counts it
    out = weights.down(activated(weights.gate_up(normed)))
    return _added(rms_norm, x, out, weights.post_norm)


def experts(
    rms_norm: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    gelu_tanh_mul: Callable[..., Tensor],
    x: Tensor,
    weights: ExpertsWeights,
) -> Tensor:
    """x + post_norm(sum of the chosen experts of the normed x): [num_tokens, hidden], in the place of x."""
    activations = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, "swiglu_oai": swiglu_oai}
    out = mixture(_normed(rms_norm, x, weights.norm), weights, activations[weights.activation])
    return _added(rms_norm, x, out, weights.post_norm)


def decoder(
    attn_in: Callable[..., Tensor],
    attention: Callable[..., Tensor],
    attn_out: Callable[..., Tensor],
    mlp: Callable[..., Tensor],
    experts: Callable[..., Tensor],
    x: Tensor,
    layers: Sequence[LayerCall],
    pages: Sequence[KVPages],
    views: Sequence[View],
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    wanted: Tensor | None = None,
) -> Tensor:
    """All layers of a forward pass: [num_tokens, hidden], in the place of x.

    wanted   int64 [num_rows], ascending, of every sequence none or its last tokens: the result has these rows only, and
             the last layer computes no more than that of the others but their keys and values
    """
    for number, ((weights, ffn, view), of_layer) in enumerate(zip(layers, pages, strict=True)):
        cos, sin, block_table, slot_mapping = views[view]
        q = attn_in(x, weights, cos, sin, of_layer, slot_mapping)
        rows = wanted if number == len(layers) - 1 else None
        if rows is not None and rows.shape[0] == 0:
            return x[:0]
        attended = attention(q, weights, of_layer, block_table, cu_query_lens, seq_lens)
        if rows is not None:
            attended, x = attended[rows], x[rows]
        x = attn_out(attended, x, weights)
        x = experts(x, ffn) if isinstance(ffn, ExpertsWeights) else mlp(x, ffn)
    return x


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
    pages: Sequence[KVPages],
    views: Sequence[View],
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    weights: HeadWeights,
    finds_best: bool = False,
) -> Stepped:
    """From token ids to logits of every token.

    token_ids, positions   int64 [num_tokens]
    views                  cos and sin are those of all positions: float32 [positions, half]
    """
    turned = [(cos[positions], sin[positions], block_table, slots) for cos, sin, block_table, slots in views]
    x = decoder(embedding(token_ids), layers, pages, turned, cu_query_lens, seq_lens)
    return x, head(x, weights), None


# segment -> the function above, and the ops and segments it takes first
COMPOSED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "attn_in": (attn_in, ("rms_norm", "rope", "kv_write")),
    "attention": (attention, ("paged_attention",)),
    "attn_out": (attn_out, ("rms_norm",)),
    "mlp": (mlp, ("rms_norm", "silu_mul", "gelu_tanh_mul")),
    "head": (head, ("rms_norm",)),
    "experts": (experts, ("rms_norm", "silu_mul", "gelu_tanh_mul")),
    "decoder": (decoder, ("attn_in", "attention", "attn_out", "mlp", "experts")),
    "step": (step, ("decoder", "head")),
}


def composed(segment: str, runs: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A segment made of what `runs` has under the names of its parts."""
    function, parts = COMPOSED[segment]
    return partial(function, *(runs[part] for part in parts))


# every op and segment in plain PyTorch
REFERENCES: dict[str, Callable[..., Any]] = {op: getattr(reference, op) for op in OPS}
for _segment in SEGMENTS:
    REFERENCES[_segment] = composed(_segment, REFERENCES)
