"""QK-norm, RoPE and KV write in one launch, between the QKV product and attention.

A program processes a few heads of one token. Queries and keys are normalized and get RoPE, keys of int8 pages are also
rotated (`hadamard`), and every head is stored in its destination. Everything is computed in float32 from the product's
output on, while the single ops round to 16 bits in between. Heads are distinguished per row, so a tile may hold the
last queries and the first keys; the tile size is fixed, so sums always have the same order. The gate of a query is
copied next to it. The ops `rope` and `kv_write` use the same kernel, with queries only, and with keys and values only.

Codes and scales are those of `kv_codes.encode`: divisions are IEEE, E4M3 is encoded with integer operations. Only int8
codes at ties may differ, about one in a million, because a GPU fuses a multiplication with the addition that rounds.
Negative slots are skipped, so buckets of captured graphs can have padding rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_pages import KVPages
from ..layer_weights import LinearPart, Norm
from .e4m3 import e4m3_bits, round_even
from .gemv import gemv_kernel
from .hadamard import rotate_rows, run_length
from .launch import card_of, counters, is_last, launch, power_of_2, wait_for_previous
from .product import COUNTERS, After, Extras, product

TILE = 512  # elements per program


@triton.jit
def _partner(d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The RoPE partner of dimension `d`; `d` itself outside the rotated dimensions."""
    if INTERLEAVED:
        other = d ^ 1
    else:
        other = tl.where(d < HALF, d + HALF, d - HALF)
    return tl.where(d < 2 * HALF, other, d)


@triton.jit
def _turned(own, other, cosines, sines, d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Apply RoPE to vectors [rows, dims], given themselves and their partner dimensions; all float32."""
    if INTERLEAVED:
        place, first = d // 2, d % 2 == 0
    else:
        place, first = tl.where(d < HALF, d, d - HALF), d < HALF
    cosine = tl.load(cosines + place, mask=d < 2 * HALF, other=1.0)
    sine = tl.load(sines + place, mask=d < 2 * HALF, other=0.0)
    return tl.where(d < 2 * HALF, own * cosine + other * (sine * tl.where(first, -1.0, 1.0)), own)


@triton.jit
def _store_vectors(
    x, pages, scales, slot, head, d, ok,
    DIM: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr, LAYER_SCALE: tl.constexpr,
):  # fmt: skip
    """Encode float32 vectors x [rows, dims] of heads [rows, 1] and store them in a token's slot, masked by `ok`."""
    place = ((slot // PAGE) * KV_HEADS + head) * PAGE + slot % PAGE
    at = pages + place * DIM + d
    if (FORMAT == "int8") | (FORMAT == "fp8"):
        largest: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
        if LAYER_SCALE:
            wide = tl.div_rn(x, tl.load(scales) + tl.zeros_like(x))
        else:
            size = tl.abs(x)
            finite = tl.max((size < float("inf")).to(tl.int32) ^ 1, 1, keep_dims=True) == 0
            peak = tl.max(tl.where(finite, size, 0.0), 1, keep_dims=True)
            none = peak <= 1e-30
            safe = tl.where(none, 1.0, peak)
            inverse = tl.where(none, 0.0, tl.div_rn(tl.zeros_like(safe) + largest, safe))
            scale = tl.where(none, 0.0, tl.div_rn(peak, tl.zeros_like(peak) + largest))
            scale = tl.where(finite, scale, float("nan"))
            wide = tl.where(finite, x, 0.0) * inverse
            tl.store(scales + place, scale, mask=tl.max(ok.to(tl.int32), 1, keep_dims=True) > 0)
        if FORMAT == "fp8":
            codes = e4m3_bits(wide).to(tl.uint8)
        else:
            codes = tl.minimum(tl.maximum(round_even(wide), -largest), largest).to(tl.int8)
        tl.store(at, codes, mask=ok)
    else:
        tl.store(at, x.to(pages.dtype.element_ty), mask=ok)


@triton.jit
def _finish_heads(
    qkv, cosines, sines, q_weight, k_weight, v_weight, q_out, k_pages, v_pages, k_scales, v_scales, slot_mapping,
    token, first, token_stride, q_eps, k_eps, v_eps,
    DIM: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, RUN: tl.constexpr, FORMAT: tl.constexpr,
    LAYER_SCALE: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, LATE_NORM: tl.constexpr,
    GATE: tl.constexpr, VALUE_SCALE: tl.constexpr, V_NORM: tl.constexpr, K_IS_V: tl.constexpr, CACHE: tl.constexpr,
    WAITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store ROWS heads of a token from `first` on.

    CACHE   cache modifier of loads of qkv: ".cg" if other programs of this kernel wrote it
    WAITS   wait for the previous kernel, after loading the weights of norms
    """
    head = first + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    other_d = _partner(d, HALF, INTERLEAVED)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    real = (head < HEADS + 2 * KV_HEADS) & (d < DIM)
    if HAS_NORM:
        q_gain = tl.load(q_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
        k_gain = tl.load(k_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
        gain = tl.where(is_query, q_gain, k_gain)
        q_gain = tl.load(q_weight + other_d, mask=d < DIM, other=0.0).to(tl.float32)
        k_gain = tl.load(k_weight + other_d, mask=d < DIM, other=0.0).to(tl.float32)
        other_gain = tl.where(is_query, q_gain, k_gain)
    if KV_HEADS > 0:
        slot = tl.load(slot_mapping + token) + tl.zeros([ROWS, 1], tl.int64)
    if WAITS:
        wait_for_previous(PDL)
    row = qkv + token * token_stride + head * DIM
    if GATE == "queries":
        row += tl.minimum(head, HEADS) * DIM
    elif GATE == "heads":
        row += tl.where(is_query, 0, HEADS)
    if K_IS_V:
        row -= tl.where(is_value, KV_HEADS * DIM, 0)
    given, turns = real, real
    if VALUES < DIM:
        row -= tl.where(is_value, (head - HEADS - KV_HEADS) * (DIM - VALUES), 0)
        turns = real & (head < HEADS + KV_HEADS)  # the partner of a value's last elements would be past its end
        given = turns | (real & (d < VALUES))
    plain = tl.load(row + d, mask=given, other=0.0, cache_modifier=CACHE).to(tl.float32)
    turned = plain
    if HALF > 0:
        other = tl.load(row + other_d, mask=turns, other=0.0, cache_modifier=CACHE).to(tl.float32)
        if HAS_NORM and not LATE_NORM:
            mean = tl.sum(plain * plain, 1, keep_dims=True) * (1.0 / DIM)
            scale = 1.0 / tl.sqrt_rn(mean + tl.where(is_query, q_eps, k_eps))
            turned, other = plain * scale * gain, other * scale * other_gain
        turned = _turned(turned, other, cosines + token * HALF, sines + token * HALF, d, HALF, INTERLEAVED)
        if HAS_NORM and LATE_NORM:
            mean = tl.sum(turned * turned, 1, keep_dims=True) * (1.0 / DIM)
            turned *= 1.0 / tl.sqrt_rn(mean + tl.where(is_query, q_eps, k_eps)) * gain
    q_at = q_out + (token * HEADS + head) * (DIM if GATE == "" else 2 * DIM) + d
    tl.store(q_at, turned.to(q_out.dtype.element_ty), mask=real & is_query)
    if GATE != "":
        if GATE == "queries":
            gates = tl.load(row + DIM + d, mask=real & is_query, other=0.0, cache_modifier=CACHE)
        else:
            gates = tl.load(qkv + token * token_stride + HEADS * DIM + head, mask=is_query, other=0.0)
        tl.store(q_at + DIM, gates, mask=real & is_query)
    if KV_HEADS > 0:
        if first + ROWS > HEADS:  # the tile contains keys or values
            real = real & (slot >= 0)
            slot = tl.maximum(slot, 0)
            if FORMAT == "int8":
                turned = rotate_rows(turned, RUN)
            kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
            kv_head = tl.maximum(kv_head, 0)
            _store_vectors(
                turned, k_pages, k_scales, slot, kv_head, d, real & is_key, DIM, KV_HEADS, PAGE, FORMAT, LAYER_SCALE
            )
            if VALUE_SCALE != 1.0:
                plain *= VALUE_SCALE
            if V_NORM:
                mean = tl.sum(plain * plain, 1, keep_dims=True) * (1.0 / DIM)
                v_gain = tl.load(v_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
                plain *= 1.0 / tl.sqrt_rn(mean + v_eps) * v_gain
            _store_vectors(
                plain, v_pages, v_scales, slot, kv_head, d, real & is_value, DIM, KV_HEADS, PAGE, FORMAT, LAYER_SCALE
            )


@triton.jit
def _heads(
    qkv, cosines, sines, q_weight, k_weight, v_weight, q_out, k_pages, v_pages, k_scales, v_scales, slot_mapping,
    token_stride, q_eps, k_eps, v_eps,
    DIM: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, RUN: tl.constexpr, FORMAT: tl.constexpr,
    LAYER_SCALE: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, LATE_NORM: tl.constexpr,
    GATE: tl.constexpr, VALUE_SCALE: tl.constexpr, V_NORM: tl.constexpr, K_IS_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _finish_heads(
        qkv, cosines, sines, q_weight, k_weight, v_weight, q_out, k_pages, v_pages, k_scales, v_scales, slot_mapping,
        tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS, token_stride, q_eps, k_eps, v_eps,
        DIM, VALUES, PADDED, HEADS, KV_HEADS, PAGE, ROWS, HALF, RUN, FORMAT, LAYER_SCALE, INTERLEAVED, HAS_NORM,
        LATE_NORM, GATE, VALUE_SCALE, V_NORM, K_IS_V, "", True, PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["begin"])
def _gemv_heads_kernel(
    x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
    residual_ptr, expert_ptr, out_ptr, n, eps,
    qkv, cosines, sines, q_weight, k_weight, v_weight, q_out, k_pages, v_pages, k_scales, v_scales, slot_mapping,
    counter, begin, q_eps, k_eps, v_eps,
    K: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, MIN: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, FIXED: tl.constexpr,
    LATE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, HALF: tl.constexpr, ROTATED: tl.constexpr, FORMAT: tl.constexpr, LAYER_SCALE: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, LATE_NORM: tl.constexpr, GATES: tl.constexpr,
    VALUE_SCALE: tl.constexpr, V_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`gemv_kernel` of queries, keys and values from `begin` (in heads) on; a head's last program finishes the head.

    GATES   each query is followed by its gate: the query and its gate are finished together
    """
    gemv_kernel(
        x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
        residual_ptr, expert_ptr, out_ptr, n, eps,
        K, CODE, LOW, HIGH, SCALE, MIN, ZERO, GROUP, RUN, SCALE_ROWS, ROW_SCALE, BIAS, NORM, RESIDUAL, GATE, LIMIT,
        SHARE, ROWS, CHUNKS, TOKENS, FIXED, LATE, PDL,
    )  # fmt: skip
    head = begin + tl.program_id(0) // (DIM // ROWS)
    programs = DIM // ROWS
    if GATES:
        programs = tl.where(head < 2 * HEADS, 2 * programs, programs)
        head = tl.where(head < 2 * HEADS, head // 2, head - HEADS)
    if is_last(counter + head, programs):
        _finish_heads(
            qkv, cosines, sines, q_weight, k_weight, v_weight, q_out, k_pages, v_pages, k_scales, v_scales,
            slot_mapping, 0, head, 0, q_eps, k_eps, v_eps,
            DIM, DIM, PADDED, HEADS, KV_HEADS, PAGE, 1, HALF, ROTATED, FORMAT, LAYER_SCALE, INTERLEAVED, HAS_NORM,
            LATE_NORM, "queries" if GATES else "", VALUE_SCALE, V_NORM, False, ".cg", False, PDL,
        )  # fmt: skip


def qk_norm_rope_kv(
    qkv: Tensor,
    sizes: tuple[int, int, int, int],
    angles: tuple[Tensor, Tensor] | None,
    kept: tuple[KVPages, Tensor] | None,
    norms: tuple[Norm, Norm] | None = None,
    interleaved: bool = False,
    late_norms: bool = False,
    gate: str = "",
    value_scale: float = 1.0,
    v_norm: Norm | None = None,
    k_is_v: bool = False,
) -> Tensor:
    """Return queries after QK-norm and RoPE; write keys and values to their slots.

    qkv      [num_tokens, queries, keys and values of all heads]   f32 | bf16 | f16; tokens may be strided
    sizes    num_heads, num_kv_heads, head_dim, elements of a value head; the pages hold zeros after those
    angles   cos and sin, float32 [num_tokens, half]; None: no RoPE
    kept     pages, and slots int64 [num_tokens], negative ones are skipped; None if there are only queries
    norms    of queries and of keys, over head_dim, before RoPE or after it (`late_norms`); None: no QK-norm
    gate     queries: each query in qkv is followed by its gate; heads: one number per head after all queries
    v_norm   of values, over head_dim
    k_is_v   qkv has no values: they are the keys as they are there
    returns  q [num_tokens, num_heads, head_dim], dtype of qkv; with gates [..., 2 head_dim], each query and its gate

    Reference: `mixers.attn_in` without its input norm and product.
    """
    num_tokens, (num_heads, num_kv_heads, dim, values) = qkv.shape[0], sizes
    q = torch.empty((num_tokens, num_heads, dim * (2 if gate else 1)), dtype=qkv.dtype, device=qkv.device)
    tensors, eps, kinds = _shared(
        q, sizes, angles, kept, norms, interleaved=interleaved, late_norms=late_norms, value_scale=value_scale,
        v_norm=v_norm,
    )  # fmt: skip
    rows = max(1, TILE // kinds["PADDED"])
    launch(
        _heads,
        (num_tokens, -(-(num_heads + 2 * num_kv_heads) // rows)),
        *(qkv, *tensors, qkv.stride(0), *eps),
        VALUES=values,
        ROWS=rows,
        RUN=run_length(dim),
        GATE=gate,
        K_IS_V=k_is_v,
        registers=128,  # with the compiler's 48 on sm_100 Triton 3.6 spills
        **kinds,
    )
    return q


def projected_heads(
    x: Tensor,
    norm: Norm | None,
    parts: Sequence[LinearPart],
    sizes: tuple[int, int, int, int],
    angles: tuple[Tensor, Tensor] | None,
    kept: tuple[KVPages, Tensor] | None,
    norms: tuple[Norm, Norm] | None,
    gated: bool,
    **how: Any,
) -> Tensor:
    """`qk_norm_rope_kv` of the products of norm(x) with `parts`, for one row: the products finish their own heads.

    x       [1, hidden]
    parts   `fusable`, each with whole heads, and gates with their queries; values are as long as keys
    """
    num_heads, _, dim, _ = sizes
    q = torch.empty((1, num_heads, dim * (2 if gated else 1)), dtype=x.dtype, device=x.device)
    tensors, eps, kinds = _shared(q, sizes, angles, kept, norms, **how)
    kinds |= {"ROTATED": run_length(dim), "GATES": gated}
    qkv = torch.empty((1, sum(part.shape[0] for part in parts)), dtype=x.dtype, device=x.device)
    blackwell, begin = card_of(x.device).family == 100, 0
    for part in parts:
        rows = qkv[:, begin : begin + part.shape[0]]
        arguments = qkv, *tensors, counters(x.device, COUNTERS), begin // dim, *eps
        # with the compiler's 64 registers there, Triton 3.6 spills for Q4_K
        registers = 80 if blackwell and part.prepared.code == "int4" else 0
        after = After(_gemv_heads_kernel, 0, arguments, kinds, registers=registers)
        product(x, part.prepared, Extras(part.bias, norm), out=rows, after=after)
        begin += part.shape[0]
    return q


def _shared(
    q: Tensor,
    sizes: tuple[int, int, int, int],
    angles: tuple[Tensor, Tensor] | None,
    kept: tuple[KVPages, Tensor] | None,
    norms: tuple[Norm, Norm] | None,
    *,
    interleaved: bool,
    late_norms: bool,
    value_scale: float,
    v_norm: Norm | None,
) -> tuple[tuple[Tensor, ...], tuple[float, float, float], dict[str, Any]]:
    """Tensors, epsilons and constants of both kernels; `q` in place of absent tensors."""
    num_heads, num_kv_heads, dim, _ = sizes
    stored, page, kv_format, layer_scale = (q,) * 5, 1, "", False
    if kept is not None:
        pages, slots = kept
        if not (pages.k.is_contiguous() and pages.v.is_contiguous()):
            raise ValueError("pages must be contiguous")
        k_scales = pages.k if pages.k_scales is None else pages.k_scales  # pages as placeholders for absent scales
        stored = pages.k, pages.v, k_scales, pages.v if pages.v_scales is None else pages.v_scales, slots
        page, kv_format = pages.k.shape[2], pages.format
        layer_scale = pages.k_scales is not None and pages.k_scales.dim() == 1
    turns = (q, q) if angles is None else (angles[0].contiguous(), angles[1].contiguous())
    weights = (q, q) if norms is None else (norms[0].weight, norms[1].weight)
    eps = (0.0, 0.0) if norms is None else (norms[0].eps, norms[1].eps)
    kinds = {
        "DIM": dim,
        "PADDED": power_of_2(dim),
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "PAGE": page,
        "HALF": 0 if angles is None else angles[0].shape[-1],
        "FORMAT": kv_format,
        "LAYER_SCALE": layer_scale,
        "INTERLEAVED": interleaved,
        "HAS_NORM": norms is not None,
        "LATE_NORM": late_norms,
        "VALUE_SCALE": value_scale,
        "V_NORM": v_norm is not None,
    }
    tensors = *turns, *weights, q if v_norm is None else v_norm.weight, q, *stored
    return tensors, (*eps, 0.0 if v_norm is None else v_norm.eps), kinds


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`reference.rope`; tokens of x may be strided, the result is contiguous."""
    return qk_norm_rope_kv(x.flatten(1), (x.shape[1], 0, x.shape[2], x.shape[2]), (cos, sin), None, None, interleaved)


def kv_write(k: Tensor, v: Tensor, pages: KVPages, slot_mapping: Tensor) -> None:
    """`reference.kv_write`; negative slots are skipped."""
    qk_norm_rope_kv(torch.cat([k, v], 1).flatten(1), (0, *k.shape[1:], v.shape[2]), None, (pages, slot_mapping))
