"""Fused segments for decode: norm, product, gate and residual in one or two launches, for few rows.

Everything else (several parts, `perm`, many rows, batch-invariant sums) uses the composed segment. Decode is
memory-bound: at batch 1 a layer's products read all of W once, and the fused operations add a few KB; each launch saved
is worth about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..kv_pages import KVPages
from ..layer_weights import (
    FUSED_ATTENTION,
    FUSED_HEAD,
    FUSED_MLP,
    AttentionWeights,
    HeadWeights,
    Linear,
    LinearPart,
    MlpWeights,
    Norm,
    has_only,
)
from .activation import times_gates
from .heads import qk_norm_rope_kv
from .product import Extras, fusable, product
from .rms_norm import rms_norm

# implementations whose products of few rows can fuse norm, gate and residual
FUSED = frozenset({"triton", "triton_fp8_w8a8", "triton_nvfp4_w4a4"})
_GATES = ("silu", "gelu_tanh")


def attn_in(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: AttentionWeights,
    cos: Tensor,
    sin: Tensor,
    pages: KVPages,
    slot_mapping: Tensor,
) -> Tensor:
    """Norm and QKV product in one launch (for a single row); QK-norm, RoPE and KV write in another."""
    parts, plain = weights.qkv.parts, weights.qkv.additions is None
    if not has_only(weights, FUSED_ATTENTION) or (weights.q_norm is None) != (weights.k_norm is None):
        return composed(x, weights, cos, sin, pages, slot_mapping)
    if plain and x.shape[0] == 1 and all(part.impl.name in FUSED and fusable(x, part.prepared) for part in parts):
        outputs = [product(x, part.prepared, Extras(part.bias, weights.norm)) for part in parts]
        qkv = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    else:
        qkv = weights.qkv(_normed(x, weights.norm))
    sizes = weights.num_heads, weights.num_kv_heads, weights.head_dim
    norms = None if weights.q_norm is None or weights.k_norm is None else (weights.q_norm, weights.k_norm)
    gate = "heads" if weights.head_gates else "queries" if weights.gate else ""
    arguments = (qkv, sizes, (cos, sin), (pages, slot_mapping), norms)
    return qk_norm_rope_kv(*arguments, weights.interleaved, weights.late_norms, gate)


def attention(
    composed: Callable[..., Tensor],
    q: Tensor,
    weights: AttentionWeights,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """Composed attention without gates, then one launch that multiplies by all gates."""
    arguments = pages, block_table, cu_query_lens, seq_lens
    if not weights.gate or not has_only(weights, FUSED_ATTENTION):
        return composed(q, weights, *arguments)
    plain = replace(weights, gate=False, head_gates=False, softplus_gate=False)
    return times_gates(composed(q[..., : weights.head_dim], plain, *arguments), q, weights.softplus_gate)


def attn_out(composed: Callable[..., Tensor], attended: Tensor, x: Tensor, weights: AttentionWeights) -> Tensor:
    """x + attended Wᵀ: [num_tokens, hidden], in place."""
    part = only_part(weights.out, attended)
    known = weights.post_norm is None and has_only(weights, FUSED_ATTENTION)
    if part is None or not known or not x.is_contiguous():
        return composed(attended, x, weights)
    return product(attended, part.prepared, Extras(part.bias, residual=x), out=x)


def mlp(composed: Callable[..., Tensor], x: Tensor, weights: MlpWeights) -> Tensor:
    """x + post_norm(down(act(gate) · up)), gate and up of norm(x): [num_tokens, hidden], in place."""
    gate_up = only_part(weights.gate_up, x)
    known = weights.activation in _GATES and has_only(weights, FUSED_MLP)
    if gate_up is None or not known or not x.is_contiguous():
        return composed(x, weights)
    hidden = product(x, gate_up.prepared, Extras(gate_up.bias, weights.norm, gate=weights.activation))
    down = only_part(weights.down, hidden)
    if down is not None and weights.post_norm is None:
        return product(hidden, down.prepared, Extras(down.bias, residual=x), out=x)
    out = weights.down(hidden)
    return x.add_(out if weights.post_norm is None else _normed(out, weights.post_norm))


def head(composed: Callable[..., Tensor], x: Tensor, weights: HeadWeights) -> Tensor:
    """Logits, float32 [rows, vocab]."""
    part = only_part(weights.linear, x)
    if part is None or not has_only(weights, FUSED_HEAD):
        return composed(x, weights)
    logits = torch.empty(x.shape[0], part.shape[0], dtype=torch.float32, device=x.device)
    product(x, part.prepared, Extras(part.bias, weights.norm), out=logits)
    return logits if weights.softcap is None else logits.div_(weights.softcap).tanh_().mul_(weights.softcap)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight, norm.eps)


def only_part(linear: Linear, x: Tensor) -> LinearPart | None:
    """The only part of a linear layer if other operations can be fused into it, else None."""
    part = linear.parts[0]
    alone = len(linear.parts) == 1 and linear.additions is None
    return part if alone and part.impl.name in FUSED and fusable(x, part.prepared) else None
