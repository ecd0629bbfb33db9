"""Between the QKV product and attention, in one launch: QK-norm, RoPE, and keys and values into their slots.

A program takes a few heads of one token, of whatever kind: a row is normalised and turned when it is a query or a key,
rotated (`hadamard`) when it is a key of int8 pages, and stored as its kind asks. All in float32 from the product's
output on, where the single ops round to 16 bits in between. What goes where is decided by rows, so a tile may hold the
last queries and the first keys; tiles have one size for every number of tokens, so that a sum has one order.

Bytes, 8B shapes (32 + 8 + 8 heads of 128, bf16), a token: 12 KB read, 12 KB written; 12 programs of 4 warps. Four
launches (two norms, RoPE on q and k, the write) become one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_pages import KVPages
from ..layer_weights import Norm
from .hadamard import rotate_rows
from .kv_write import page_constants, page_tensors, store_vectors
from .launch import launch, wait_for_previous
from .rope import angle, partner, rotate


@triton.jit
def _qk_norm_rope_kv(
    qkv, cosines, sines, q_weight, k_weight, q_out, k_pages, v_pages, k_scales, v_scales, slot_mapping,
    token_stride, q_eps, k_eps, q_offset, k_offset,
    DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, RUN: tl.constexpr, FORMAT: tl.constexpr, LAYER_SCALE: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    head = first + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    other_d = partner(d, HALF, INTERLEAVED)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    real = (head < HEADS + 2 * KV_HEADS) & (d < DIM)
    slot = tl.load(slot_mapping + token) + tl.zeros([ROWS, 1], tl.int64)
    if HAS_NORM:
        q_gain = tl.load(q_weight + d, mask=d < DIM, other=0.0).to(tl.float32) + q_offset
        k_gain = tl.load(k_weight + d, mask=d < DIM, other=0.0).to(tl.float32) + k_offset
        gain = tl.where(is_query, q_gain, k_gain)
        q_gain = tl.load(q_weight + other_d, mask=d < DIM, other=0.0).to(tl.float32) + q_offset
        k_gain = tl.load(k_weight + other_d, mask=d < DIM, other=0.0).to(tl.float32) + k_offset
        other_gain = tl.where(is_query, q_gain, k_gain)
    wait_for_previous(PDL)
    row = qkv + token * token_stride + head * DIM
    plain = tl.load(row + d, mask=real, other=0.0).to(tl.float32)
    own = plain
    other = tl.load(row + other_d, mask=real, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = tl.sum(own * own, 1, keep_dims=True) * (1.0 / DIM)
        scale = 1.0 / tl.sqrt_rn(mean + tl.where(is_query, q_eps, k_eps))
        own, other = own * scale * gain, other * scale * other_gain
    place = token * HALF + angle(d, HALF, INTERLEAVED)
    cosine = tl.load(cosines + place, mask=d < 2 * HALF, other=1.0)
    sine = tl.load(sines + place, mask=d < 2 * HALF, other=0.0)
    turned = rotate(own, other, cosine, sine, d, HALF, INTERLEAVED)
    q_at = q_out + (token * HEADS + head) * DIM + d
    tl.store(q_at, turned.to(q_out.dtype.element_ty), mask=real & is_query)
    if first + ROWS > HEADS:  # some row is a key or a value
        real = real & (slot >= 0)
        slot = tl.maximum(slot, 0)
        if FORMAT == "int8":
            turned = rotate_rows(turned, RUN)
        kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
        kv_head = tl.maximum(kv_head, 0)
        store_vectors(
            turned, k_pages, k_scales, slot, kv_head, d, real & is_key, DIM, KV_HEADS, PAGE, FORMAT, LAYER_SCALE
        )
        store_vectors(
            plain, v_pages, v_scales, slot, kv_head, d, real & is_value, DIM, KV_HEADS, PAGE, FORMAT, LAYER_SCALE
        )


def qk_norm_rope_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: KVPages,
    slot_mapping: Tensor,
    num_heads: int,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Queries ready for attention; keys and values in their slots.

    qkv           [num_tokens, num_heads + 2 · num_kv_heads, head_dim]   f32 | bf16 | f16; tokens may be strided
    cos, sin      float32 [num_tokens, half]
    slot_mapping  int64 [num_tokens]; a negative slot is passed over
    q_norm        with k_norm: over head_dim, before RoPE; None for models without
    returns       q [num_tokens, num_heads, head_dim], dtype of qkv

    Reference: `segments.attn_in` without its first norm and product.
    """
    num_tokens, _, dim = qkv.shape
    if qkv.stride(2) != 1 or qkv.stride(1) != dim:
        qkv = qkv.contiguous()
    constants = page_constants(pages)
    q = torch.empty((num_tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    has_norm = q_norm is not None and k_norm is not None
    weights = (q_norm.weight, k_norm.weight) if q_norm is not None and k_norm is not None else (qkv, qkv)
    numbers = [(n.eps, n.offset) if n is not None else (0.0, 0.0) for n in (q_norm, k_norm)]
    launch(
        _qk_norm_rope_kv,
        (num_tokens, triton.cdiv(num_heads + 2 * pages.k.shape[1], constants["ROWS"])),
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        *weights,
        q,
        *page_tensors(pages),
        slot_mapping,
        qkv.stride(0),
        *(eps for eps, _ in numbers),
        *(offset for _, offset in numbers),
        HEADS=num_heads,
        HALF=cos.shape[-1],
        INTERLEAVED=interleaved,
        HAS_NORM=has_norm,
        **constants,
    )
    return q
