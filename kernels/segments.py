"""What a decoder layer calls: five segments, each composed of single ops here, and the frozen `KernelTable` of them.

    attn_in    norm, QKV, QK-norm, RoPE, KV write        attention   paged attention
    attn_out   output projection, residual               mlp         norm, gate/up, activation, down, residual
    head       norm, vocabulary projection, soft-cap  (and a norm before each residual where the model has one)

and what is made of them: `decoder`, all layers; `step`, from token ids to logits.

The composed segments are always there and are the twins of fused ones. Weights come as frozen values; a fused
implementation may look at `Linear.parts` to see by which implementation they were prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import Impl
from .embedding import Embedding
from .kv_pages import KVPages
from .ops import OPS, OpFacts, choose_op, choose_segment


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One prepared weight with the implementation that reads it."""

    impl: Impl
    prepared: Any
    bias: Tensor | None
    """float32 [N]"""
    shape: tuple[int, int]
    """(N, K)"""


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x Wᵀ + b. Several parts where weights could not be fused exactly; their outputs lie end to end."""

    parts: tuple[LinearPart, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, K] -> [num_tokens, sum of N], dtype of x."""
        if len(self.parts) == 1:
            part = self.parts[0]
            return part.impl.run(x, part.prepared, part.bias)
        return torch.cat([part.impl.run(x, part.prepared, part.bias) for part in self.parts], -1)

    @property
    def out_features(self) -> int:
        """Rows of all parts together."""
        return sum(part.shape[0] for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights and biases."""
        biases = sum(part.bias.nbytes for part in self.parts if part.bias is not None)
        return biases + sum(part.impl.nbytes(part.prepared) for part in self.parts)

    @property
    def impl_names(self) -> tuple[str, ...]:
        """Names of the implementations, each once, in order."""
        return tuple(dict.fromkeys(part.impl.name for part in self.parts))


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: weight [dim], and what is added to it."""

    weight: Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """What attention in one layer needs, besides its caches."""

    norm: Norm
    qkv: Linear
    """rows: all query heads, then key heads, then value heads"""
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """of q·k"""
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    """over head_dim, before RoPE"""
    post_norm: Norm | None = None
    """on the output, before the residual"""
    window: int | None = None
    softcap: float | None = None
    interleaved: bool = False
    """RoPE pairs (2j, 2j + 1) instead of (j, j + half)"""
    sinks: Tensor | None = None
    """float32 [num_heads]: a score more for every query of a head, without a value"""


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated feed-forward layer."""

    norm: Norm
    gate_up: Linear
    """rows: gate, then up"""
    down: Linear
    activation: str
    """silu | gelu_tanh"""
    post_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The last norm and the projection to the vocabulary."""

    norm: Norm
    linear: Linear
    softcap: float | None = None


LayerCall = tuple[AttentionWeights, MlpWeights, int]
"""a layer's weights, and which of the step's views it sees"""
View = tuple[Tensor, Tensor, Tensor, Tensor]
"""cos, sin, block_table, slot_mapping: what the layers of one cache group share in a step"""
Stepped = tuple[Tensor, Tensor, Tensor | None]
"""hidden [num_tokens, hidden], logits float32 [num_tokens, vocab], and where somebody looked int64 [num_tokens], the
first place of the largest logit, -1 where one is NaN; all are valid until the next step"""


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The segments of one model, chosen once at load. A quarantine builds another table; nothing is changed in one."""

    attn_in: Callable[..., Tensor]
    """(x [num_tokens, hidden], AttentionWeights, cos, sin, KVPages, slot_mapping) -> q; stores k, v"""
    attention: Callable[..., Tensor]
    """(q, AttentionWeights, KVPages, block_table, cu_query_lens, seq_lens) -> [num_tokens, heads * dim]"""
    attn_out: Callable[..., Tensor]
    """(attended, x, AttentionWeights) -> x; x may be overwritten"""
    mlp: Callable[..., Tensor]
    """(x, MlpWeights) -> x; x may be overwritten"""
    head: Callable[..., Tensor]
    """(x [rows, hidden], HeadWeights) -> float32 [rows, vocab]"""
    decoder: Callable[..., Tensor]
    """all layers: (x, LayerCalls, KVPages per layer, Views, cu_query_lens, seq_lens, wanted rows or None) -> x of all
    tokens or of those rows; x may be overwritten"""
    step: Callable[..., Stepped]
    """all of it, where every token's logits are wanted: (token ids, positions, Embedding, LayerCalls, KVPages per
    layer, Views whose cosines are those of all positions, cu_query_lens, seq_lens, HeadWeights, whether to look for the
    largest logits)"""
    ops: tuple[tuple[str, str], ...]
    """(op or fused segment, name of the implementation chosen)"""


def forget(prepared: Any, *, pages_only: bool = False) -> None:
    """Let go of what fused segments keep with a prepared weight: pages of the last call, and layers it is a part of."""
    let_go = getattr(prepared, "forget", None)
    if let_go is not None:
        let_go(pages_only)


def kernel_table(facts: OpFacts, quarantined: frozenset[str] = frozenset()) -> KernelTable:
    """Choose an implementation for every op, compose the segments of them, and take fused ones where they fit. Pure.

    quarantined  "op:name" or "segment:name" of what failed its self-test
    """
    chosen = {op: choose_op(op, facts, quarantined) for op in OPS}
    run = {op: impl.run for op, impl in chosen.items()}
    norm = run["rms_norm"]
    activations = {"silu": run["silu_mul"], "gelu_tanh": run["gelu_tanh_mul"]}
    segments: dict[str, Callable[..., Any]] = {
        "attn_in": partial(attn_in, norm, run["rope"], run["kv_write"]),
        "attention": partial(attention, run["paged_attention"]),
        "attn_out": partial(attn_out, norm),
        "mlp": partial(mlp, norm, activations),
        "head": partial(head, norm),
    }
    for name in (*segments, "decoder", "step"):
        if name == "decoder":  # made of the other segments, fused or not
            first, second, third, last = (segments[part] for part in ("attn_in", "attention", "attn_out", "mlp"))
            segments[name] = partial(decoder, first, second, third, last)
        elif name == "step":
            segments[name] = partial(step, segments["decoder"], segments["head"])
        fused = choose_segment(name, facts, quarantined)
        if fused is not None:
            chosen[name], segments[name] = fused, partial(fused.run, segments[name])
    return KernelTable(**segments, ops=tuple((name, impl.name) for name, impl in chosen.items()))


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
    normed = rms_norm(x, weights.norm.weight, weights.norm.eps, weights.norm.offset)
    qkv = weights.qkv(normed).view(-1, heads + 2 * kv_heads, dim)
    v = qkv[:, heads + kv_heads :]
    if weights.q_norm is None or weights.k_norm is None:
        rotated = rope(qkv[:, : heads + kv_heads], cos, sin, weights.interleaved)
        q, k = rotated[:, :heads], rotated[:, heads:]
    else:
        q_norm, k_norm = weights.q_norm, weights.k_norm
        q = rms_norm(qkv[:, :heads], q_norm.weight, q_norm.eps, q_norm.offset)
        k = rms_norm(qkv[:, heads : heads + kv_heads], k_norm.weight, k_norm.eps, k_norm.offset)
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
    out = weights.out(attended)
    if weights.post_norm is not None:
        out = rms_norm(out, weights.post_norm.weight, weights.post_norm.eps, weights.post_norm.offset)
    return x.add_(out)


def mlp(
    rms_norm: Callable[..., Tensor], activations: dict[str, Callable[..., Tensor]], x: Tensor, weights: MlpWeights
) -> Tensor:
    """x + post_norm(down(act(gate) · up)) of the normed x: [num_tokens, hidden], in the place of x."""
    normed = rms_norm(x, weights.norm.weight, weights.norm.eps, weights.norm.offset)
    out = weights.down(activations[weights.activation](weights.gate_up(normed)))
    if weights.post_norm is not None:
        out = rms_norm(out, weights.post_norm.weight, weights.post_norm.eps, weights.post_norm.offset)
    return x.add_(out)


def decoder(
    attn_in: Callable[..., Tensor],
    attention: Callable[..., Tensor],
    attn_out: Callable[..., Tensor],
    mlp: Callable[..., Tensor],
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
    for number, ((weights, mlp_weights, view), of_layer) in enumerate(zip(layers, pages, strict=True)):
        cos, sin, block_table, slot_mapping = views[view]
        q = attn_in(x, weights, cos, sin, of_layer, slot_mapping)
        rows = wanted if number == len(layers) - 1 else None
        if rows is not None and rows.shape[0] == 0:
            return x[:0]
        attended = attention(q, weights, of_layer, block_table, cu_query_lens, seq_lens)
        if rows is not None:
            attended, x = attended[rows], x[rows]
        x = mlp(attn_out(attended, x, weights), mlp_weights)
    return x


def head(rms_norm: Callable[..., Tensor], x: Tensor, weights: HeadWeights) -> Tensor:
    """Logits, float32 [rows, vocab]."""
    normed = rms_norm(x, weights.norm.weight, weights.norm.eps, weights.norm.offset)
    logits = weights.linear(normed).float()
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
