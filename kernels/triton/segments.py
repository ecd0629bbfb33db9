"""Fused segments for decode: norm, product, gate and residual in one or two launches, for few rows.

The last programs of a single row's products also do what follows them: heads, convolutions, conversions.

Products that cannot fuse these (`perm`, many rows, batch-invariant sums) run by themselves, or the whole segment is the
composed one. The kernels between the products, of recurrent layers and of gates, also run for prompts. Decode is
memory-bound: at batch 1 a layer's products read all of W once, and the fused operations add a few KB; each launch saved
is worth about a microsecond.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..kv_pages import KVPages
from ..layer_weights import (
    FUSED_ATTENTION,
    FUSED_CONV,
    FUSED_DELTA,
    FUSED_HEAD,
    FUSED_HYPER,
    FUSED_MAMBA,
    FUSED_MLP,
    AttentionWeights,
    ConvWeights,
    DeltaWeights,
    HeadWeights,
    InputWeights,
    Linear,
    LinearPart,
    MambaWeights,
    MlpWeights,
    Norm,
    has_only,
)
from ..state_slots import StateSlots
from .activation import gate_rows, times_gates
from .heads import projected_heads, qk_norm_rope_kv
from .product import Extras, chained, fusable, product
from .recurrent import Raw, causal_conv, gated_conv, gated_delta_rule, gated_state_space, projected_conv
from .rms_norm import add_normed, normed

# implementations whose products of few rows can fuse norm, gate and residual
FUSED = frozenset({"triton", "triton_fp8_w8a8", "triton_nvfp4_w4a4"})
_GATES = ("silu", "silu_clamped", "gelu_tanh")
_ATTENTION, _DELTA = FUSED_ATTENTION | FUSED_HYPER, FUSED_DELTA | FUSED_HYPER
# fields that `attn_in` uses or that concern only what follows it
_ATTN_IN = _ATTENTION | {"v_norm", "k_is_v", "reads_only", "temperature", "temperature_offset", "streams"}
_MLP = FUSED_MLP | {"scale", "input"}  # per-layer inputs are applied after `mlp`
LONGEST = 3e38  # a time step without an upper limit


def attn_in(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: AttentionWeights,
    cos: Tensor,
    sin: Tensor,
    pages: KVPages,
    slot_mapping: Tensor,
    *,
    apart: bool = False,
) -> Tensor:
    """QK-norm, RoPE and KV write after the norm and the QKV product; for a single row all in one launch.

    apart   what products' programs could also do is left to kernels of its own, here and below
    """
    reads_only = weights.reads_only
    uneven = (weights.q_norm is None) != (weights.k_norm is None) and not reads_only
    if uneven or not has_only(weights, _ATTN_IN, "norm", True):
        return composed(x, weights, cos, sin, pages, slot_mapping)
    sizes = weights.num_heads, 0 if reads_only else weights.num_kv_heads, weights.head_dim, weights.values
    k_norm = weights.q_norm if reads_only else weights.k_norm
    norms = None if weights.q_norm is None or k_norm is None else (weights.q_norm, k_norm)
    kept = None if reads_only else (pages, slot_mapping)
    how: dict[str, Any] = {"interleaved": weights.interleaved, "late_norms": weights.late_norms}
    how |= {"value_scale": weights.value_scale, "v_norm": weights.v_norm}
    rows, norm = centred(x, weights.norm)
    if not apart and _finishes_heads(rows, weights):
        return projected_heads(rows, norm, weights.qkv.parts, sizes, (cos, sin), kept, norms, weights.gate, **how)
    (qkv,) = of_normed(rows, norm, weights.qkv)
    how |= {"gate": "heads" if weights.head_gates else "queries" if weights.gate else "", "k_is_v": weights.k_is_v}
    return qk_norm_rope_kv(qkv, sizes, (cos, sin), kept, norms, **how)


def _finishes_heads(x: Tensor, weights: AttentionWeights) -> bool:
    """Whether the products of a single row can finish their heads, each of which is then in one part."""
    whole = weights.head_dim * (2 if weights.gate else 1)
    ends = accumulate(part.shape[0] for part in weights.qkv.parts)
    queries = weights.num_heads * whole
    return (
        x.shape[0] == 1
        and not (weights.head_gates or weights.k_is_v or weights.value_dim)
        and _fuses(x, weights.qkv)
        and all(end % (whole if end < queries else weights.head_dim) == 0 for end in ends)
    )


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
    if not weights.gate or not has_only(weights, _ATTENTION, "norm", True):
        return composed(q, weights, *arguments)
    plain = replace(weights, gate=False, head_gates=False, softplus_gate=False)
    return times_gates(composed(q[..., : weights.head_dim], plain, *arguments), q, weights.softplus_gate)


def attn_out(composed: Callable[..., Tensor], attended: Tensor, x: Tensor, weights: AttentionWeights) -> Tensor:
    """x + post_norm(attended Wᵀ): [num_tokens, hidden], in place."""
    part = only_part(weights.out, attended)
    own = weights.hyper is None and weights.sum_norm is None and weights.join is None and x.is_contiguous()
    if own and weights.post_norm is not None:
        return add_normed(x, weights.out(attended), weights.post_norm)
    if part is None or not own:
        return composed(attended, x, weights)
    return product(attended, part.prepared, Extras(part.bias, residual=x), out=x)


def mlp(composed: Callable[..., Tensor], x: Tensor, weights: MlpWeights, *, apart: bool = False) -> Tensor:
    """(x + post_norm(down(act(gate) · up))) · scale, gate and up of norm(x): [num_tokens, hidden], in place."""
    gate_up = only_part(weights.gate_up, x)
    known = weights.activation in _GATES and has_only(weights, _MLP, "norm", True)
    if gate_up is None or not known or not x.is_contiguous():
        return composed(x, weights)
    seen, norm = centred(x, weights.norm)
    first = Extras(gate_up.bias, norm, gate=weights.activation, limit=weights.limit or 0.0)
    alone = weights.hyper is not None or weights.post_norm is not None
    rows = through(seen, gate_up, first, weights.down, None if alone else x, apart=apart)
    if weights.hyper is not None:
        return rows
    if weights.post_norm is not None:
        return add_normed(x, rows, weights.post_norm, weights.scale)
    return x if weights.scale == 1.0 else x.mul_(weights.scale)


def layer_input(composed: Callable[..., Tensor], x: Tensor, weights: InputWeights, given: Tensor) -> Tensor:
    """`segments.layer_input` in four launches: product, gate, product, and the norm with all that follows."""
    if weights.norm.bias is not None or weights.norm.groups > 1 or not x.is_contiguous():
        return composed(x, weights, given)
    hidden = gate_rows(weights.gate(x), given, weights.activation)
    return add_normed(x, weights.projection(hidden), weights.norm, weights.scale)


def head(composed: Callable[..., Tensor], x: Tensor, weights: HeadWeights) -> Tensor:
    """Logits, float32 [rows, vocab]."""
    part = only_part(weights.linear, x)
    if part is None or not has_only(weights, FUSED_HEAD, "norm", True):
        return composed(x, weights)
    logits = torch.empty(x.shape[0], part.shape[0], dtype=torch.float32, device=x.device)
    x, norm = centred(x, weights.norm)
    product(x, part.prepared, Extras(part.bias, norm), out=logits)
    return logits if weights.softcap is None else logits.div_(weights.softcap).tanh_().mul_(weights.softcap)


def gated_delta(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: DeltaWeights,
    kept: StateSlots,
    slots: Tensor,
    cu_query_lens: Tensor,
    *,
    by_token: bool = False,
    apart: bool = False,
) -> Tensor:
    """`mixers.gated_delta` in four launches for a single row: product and convolution, rates, recurrence and gates,
    output.
    """
    if not has_only(weights, _DELTA) or not x.is_contiguous():
        return composed(x, weights, kept, slots, cu_query_lens)
    heads, keys, values = weights.num_v_heads, weights.num_k_heads * weights.k_dim, weights.num_v_heads * weights.v_dim
    conv = (weights.conv, None), (kept.conv, slots, cu_query_lens), 0
    seen, norm = (x, weights.norm) if x.shape[0] == 1 else (normed(x, weights.norm), None)  # several rows: once
    rows, mixed = _convolved(seen, norm, weights.qkvz, conv, by_token or apart)
    (rates,) = of_normed(seen, norm, weights.ba)
    z = rows[:, 2 * keys + values :]
    b, a = rates.tensor_split([heads], -1)
    z = z if weights.z_up is None else weights.z_up(z.contiguous())
    a = a if weights.a_up is None else weights.a_up(a.contiguous())
    q, k, v = mixed.split([keys, keys, values], -1)
    given = v.unflatten(-1, (heads, -1)), *(part.unflatten(-1, (weights.num_k_heads, -1)) for part in (k, q))
    a = a.unflatten(-1, (heads, -1)) if a.shape[-1] > heads else a
    raw = Raw(weights.dt_bias, weights.decay, weights.floor or 0.0, scale=weights.beta_scale)
    ending = z, weights.out_norm, weights.sigmoid_gate
    how = by_token, weights.tiled, raw
    gated = gated_delta_rule(given, a, b, (kept.state, slots, cu_query_lens), *how, ending, apart=apart)
    return onto(x, weights.out, gated) if weights.hyper is None else weights.out(gated)


def _convolved(
    x: Tensor,
    norm: Norm | None,
    linear: Linear,
    conv: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor], int],
    apart: bool,
) -> tuple[Tensor, Tensor]:
    """The product of norm(x), and the causal convolution with SiLU of its outputs from a place on, float32.

    For a single row the product's kernels also convolve, unless `apart`: they round another way.

    conv   weight and bias; state, slots and cu_query_lens; the first output
    """
    taps, kept, first = conv
    seen, inside = centred(x, norm)
    if x.shape[0] == 1 and not apart and _fuses(seen, linear):
        return projected_conv(seen, inside, linear.parts, taps, kept, first)
    (rows,) = of_normed(seen, inside, linear)
    return rows, causal_conv(rows[:, first : first + taps[0].shape[0]], *taps, *kept, True)


def mamba(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: MambaWeights,
    kept: StateSlots,
    slots: Tensor,
    cu_query_lens: Tensor,
    *,
    by_token: bool = False,
    apart: bool = False,
) -> Tensor:
    """`mixers.mamba` in three launches for a single row: product and convolution, recurrence and gates, output."""
    if not has_only(weights, FUSED_MAMBA) or not x.is_contiguous():
        return composed(x, weights, kept, slots, cu_query_lens)
    heads, groups, inner = weights.num_heads, weights.num_groups, weights.num_heads * weights.head_dim
    conv = (weights.conv, weights.conv_bias), (kept.conv, slots, cu_query_lens), inner
    rows, mixed = _convolved(x, weights.norm, weights.inputs, conv, by_token or apart)
    z, steps = rows[:, :inner], rows[:, rows.shape[1] - heads :]
    values, *shared = mixed.split([inner, *[groups * weights.state_size] * 2], -1)
    given = values.unflatten(-1, (heads, -1)), *(part.unflatten(-1, (groups, -1)) for part in shared)
    shortest, longest = weights.steps or (0.0, math.inf)
    limits = (shortest, min(longest, LONGEST)) if weights.steps else (0.0, 0.0)
    raw = Raw(weights.dt_bias, weights.decay, steps=limits)
    norms = None if weights.out_norm is None or weights.gain is None else (weights.out_norm, weights.gain)
    ending = z, weights.skip, norms, groups
    states = kept.state, slots, cu_query_lens
    gated = gated_state_space(given, weights.decay, steps, states, by_token, raw, ending, apart=apart)
    return onto(x, weights.out, gated)


def short_conv(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: ConvWeights,
    kept: StateSlots,
    slots: Tensor,
    cu_query_lens: Tensor,
) -> Tensor:
    """`mixers.short_conv` in three launches for a single row: product, gated convolution, output."""
    if not has_only(weights, FUSED_CONV) or not x.is_contiguous():
        return composed(x, weights, kept, slots, cu_query_lens)
    (rows,) = of_normed(x, weights.norm, weights.inputs)
    gated = gated_conv(rows, weights.conv, weights.bias, kept.conv, slots, cu_query_lens)
    if weights.post_norm is not None:
        return add_normed(x, weights.out(gated), weights.post_norm)
    return onto(x, weights.out, gated)


def of_normed(x: Tensor, norm: Norm | None, *linears: Linear) -> list[Tensor]:
    """The products of norm(x); for a single row, each norms x itself if all can."""
    x, norm = centred(x, norm)
    if x.shape[0] > 1 or not all(_fuses(x, linear) for linear in linears):
        rows = normed(x, norm)
        return [linear(rows) for linear in linears]
    found = []
    for linear in linears:
        outputs = [product(x, part.prepared, Extras(part.bias, norm)) for part in linear.parts]
        found.append(outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1))
    return found


def _fuses(x: Tensor, linear: Linear) -> bool:
    """Whether other operations can be fused into the products of every part."""
    parts = linear.parts if linear.additions is None else ()
    return bool(parts) and all(part.impl.name in FUSED and fusable(x, part.prepared) for part in parts)


def onto(x: Tensor, linear: Linear, rows: Tensor) -> Tensor:
    """x + the product of rows, in place."""
    part = only_part(linear, rows)
    return x.add_(linear(rows)) if part is None else product(rows, part.prepared, Extras(part.bias, residual=x), out=x)


def through(
    x: Tensor,
    part: LinearPart,
    extras: Extras,
    linear: Linear,
    onto: Tensor | None = None,
    given: Tensor | None = None,
    *,
    apart: bool = False,
) -> Tensor:
    """linear(product(x, part, extras)), added to `onto` in place if there is one; other arguments as in `chained`."""
    second = only_part(linear, x)
    if second is None:
        rows = linear(product(x, part.prepared, extras))
        return rows if onto is None else onto.add_(rows)
    then = Extras(second.bias, residual=onto)
    return chained(x, part.prepared, extras, second.prepared, then, out=onto, given=given, apart=apart)


def centred(x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
    """The input of a product and the norm that it can fuse: a LayerNorm, or one over groups, is a launch of its own."""
    return (x, norm) if norm is None or (norm.bias is None and norm.groups == 1) else (normed(x, norm), None)


def only_part(linear: Linear, x: Tensor) -> LinearPart | None:
    """The only part of a linear layer if other operations can be fused into it, else None."""
    part = linear.parts[0]
    alone = len(linear.parts) == 1 and linear.additions is None
    return part if alone and part.impl.name in FUSED and fusable(x, part.prepared) else None
