"""The first segment of a layer in two launches: norm and QKV product in one, QK-norm, RoPE and page write in the other.

With many rows, or where a row's result must not depend on their number, the norm is a launch of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kv_pages import KVPages
from ..segments import AttentionWeights, LinearPart, Norm
from .product import Extras, NormArgs, fusable, product
from .qk_norm_rope_kv import qk_norm_rope_kv
from .rms_norm import rms_norm

FUSED = "triton"
"""the implementation whose products take a norm with them; that with one order of sums does not"""


def attn_in(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: AttentionWeights,
    cos: Tensor,
    sin: Tensor,
    pages: KVPages,
    slot_mapping: Tensor,
) -> Tensor:
    """As `segments.attn_in`: x [num_tokens, hidden] -> q [num_tokens, num_heads, head_dim]; stores keys and values."""
    parts = weights.qkv.parts
    if (weights.q_norm is None) != (weights.k_norm is None):
        return composed(x, weights, cos, sin, pages, slot_mapping)
    if all(part.impl.name == FUSED and fusable(x, part.prepared) for part in parts):
        outputs = [_with_norm(x, part, weights.norm) for part in parts]
        qkv = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    else:
        qkv = weights.qkv(rms_norm(x, weights.norm.weight, weights.norm.eps, weights.norm.offset))
    heads = qkv.view(x.shape[0], -1, weights.head_dim)
    return qk_norm_rope_kv(
        heads, cos, sin, pages, slot_mapping, weights.num_heads, weights.q_norm, weights.k_norm, weights.interleaved
    )


def _with_norm(x: Tensor, part: LinearPart, norm: Norm) -> Tensor:
    return product(x, part.prepared, Extras(part.bias, NormArgs(norm.weight, norm.eps, norm.offset)))
