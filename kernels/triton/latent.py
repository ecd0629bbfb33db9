"""Latent attention (MLA): split-KV attention of each query token over its sequence's cached latents, then a merge.

A token's key is its latent plus the RoPE part, its value is the latent, so one tile serves both products: a program
reads 1,152 bytes per key for a block of query heads, which are the rows of its products. Splits depend only on the
length of the sequence, and the merge kernel of `attention_decode` adds them in order. Prompts use the same kernel, one
token per row; their keys come from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_codes import hadamard
from ..kv_pages import SCALED_FORMATS, KVPages
from ..layer_weights import FUSED_LATENT, LatentWeights, View, has_only
from .attention import MERGED, PART_BYTES
from .attention_decode import _split_tokens, merge_splits
from .attention_tiles import Splits, side_by_side, splits_of
from .hadamard import rotate_rows, run_length
from .heads import TILE, _partner, _store_vectors, _turned
from .launch import card_of, interpreting, launch, power_of_2, wait_for_previous
from .product import Extras, Pairs, expert_product
from .product_tiles import SMALL_TOKENS
from .recurrent import _sigmoid
from .segments import FUSED, of_normed, onto
from .sequences import query_of

ROTATING = 6  # extra float32 latents of memory per query head that the Hadamard rotation for int8 needs
ROWS, NARROW_ROWS = 32, 16  # most query heads per program; NARROW: with 8-bit pages, whose widened codes take registers
_STEP_FIELDS = FUSED_LATENT - {"post_norm", "temperature"} | {"stacked"}
REGISTERS = 168  # per thread, with 8-bit pages and no rotated part: the compiler's 128 spill on compute capability 10.0
KEYS, NARROW_KEYS = 32, 16  # keys per tile: 36 KB of 16-bit values; with 8-bit pages


@triton.jit
def _widened(codes, operand: tl.constexpr, FORMAT: tl.constexpr):
    """Convert a tile of codes to the operand type; E4M3 values come out divided by 256, as in `e4m3.widen_e4m3`."""
    if FORMAT == "fp8":
        wide = codes.to(tl.int32)
        return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True).to(operand)
    else:
        return codes.to(operand)


@triton.jit(do_not_specialize=["table_width", "num_seqs", "first_token", "num_places"])
def split_latents(
    q, turned_q, latents, pieces, latent_scales, piece_scales, block_table, cu_query_lens, seq_lens, part_sum,
    part_norm, scale, table_width, num_seqs, first_token, num_places,
    HEADS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, TURNED: tl.constexpr, Q_STRIDE: tl.constexpr,
    TURNED_STRIDE: tl.constexpr, WIDTH: tl.constexpr, TURNED_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    FORMAT: tl.constexpr, SCALES: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, SPLITS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Attention of one token over every num_programs(0)-th split of its keys, for ROWS query heads.

    Writes partial results in the layout of `attention_decode.decode_split`. Row 0 of q is token first_token.
    """
    row = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, seq, length = query_of(row, cu_query_lens, seq_lens, num_seqs, first_token, True, STEPS)
    size = _split_tokens(length, FIRST, SPLITS)
    count = (length + size - 1) // size
    table = block_table + seq.to(tl.int64) * table_width
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    e = tl.arange(0, TURNED_WIDTH)
    n = tl.arange(0, KEYS)
    SIXTEEN: tl.constexpr = tl.bfloat16 if FORMAT == "bf16" else tl.float16
    operand: tl.constexpr = tl.float32 if INTERPRET or FORMAT == "f32" else SIXTEEN
    real = (head < HEADS)[:, None]
    q_row = q + (row.to(tl.int64) * HEADS + head)[:, None] * Q_STRIDE
    q_still = tl.load(q_row + d[None, :], mask=real & (d < RANK)[None, :], other=0.0).to(operand)
    if TURNED > 0:
        q_row = turned_q + (row.to(tl.int64) * HEADS + head)[:, None] * TURNED_STRIDE
        q_turned = tl.load(q_row + e[None, :], mask=real & (e < TURNED)[None, :], other=0.0).to(operand)
    for place in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
        begin = place * size
        end = tl.minimum(begin + size, length)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        norm = tl.zeros([ROWS], tl.float32)
        for start in tl.range(begin, end, KEYS, num_stages=STAGES):
            key = start + n
            seen = key < end
            slot = tl.load(table + key // PAGE, mask=seen, other=0).to(tl.int64) * PAGE + key % PAGE
            at = slot[:, None]
            tile = tl.load(latents + at * RANK + d[None, :], mask=seen[:, None] & (d < RANK)[None, :], other=0)
            tile = _widened(tile, operand, FORMAT)
            if TURNED > 0:
                piece = tl.load(pieces + at * TURNED + e[None, :], mask=seen[:, None] & (e < TURNED)[None, :], other=0)
                piece = _widened(piece, operand, FORMAT)
            scores = tl.dot(q_still, tl.trans(tile), input_precision="ieee")
            if SCALES == "none":
                if TURNED > 0:
                    scores = tl.dot(q_turned, tl.trans(piece), scores, input_precision="ieee")
                scores *= scale
            else:
                at_scale = slot if SCALES == "token" else slot * 0
                grown = tl.load(latent_scales + at_scale, mask=seen, other=1.0)
                if FORMAT == "fp8":
                    grown *= 256.0
                scores *= (grown * scale)[None, :]
                if TURNED > 0:
                    turned = tl.load(piece_scales + at_scale, mask=seen, other=0.0)
                    if FORMAT == "fp8":
                        turned *= 256.0
                    scores += tl.dot(q_turned, tl.trans(piece), input_precision="ieee") * (turned * scale)[None, :]
                # fold the latent's scale into its softmax weight, so that it stays in float16 range
                spread = tl.log2(tl.where(grown < 1e-30, 1e-30, grown))
                scores += spread[None, :]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            top = new_top
            if SCALES == "none":
                norm = norm * shrink + tl.sum(weights, 1)
            else:
                norm = norm * shrink + tl.sum(weights * tl.exp2(-spread)[None, :], 1)
            acc = tl.dot(weights.to(operand), tile, acc * shrink[:, None], input_precision="ieee")
        part = (row.to(tl.int64) * HEADS + head) * num_places + place
        tl.store(part_norm + part * 2, top, mask=head < HEADS)
        tl.store(part_norm + part * 2 + 1, norm, mask=head < HEADS)
        tl.store(part_sum + part[:, None] * RANK + d[None, :], acc, mask=real & (d < RANK)[None, :])


def attend(
    q: Tensor,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    by_token: bool = False,
) -> Tensor:
    """`reference.latent_attention`, without reading anything back from the device.

    by_token   split prompts like single tokens: bitwise independent of chunking and batching
    """
    q, rank = q.contiguous(), pages.k.shape[3]
    return _attend(q[..., :rank], q[..., rank:], pages, block_table, cu_query_lens, seq_lens, scale, by_token)


def _attend(
    q: Tensor,
    turned: Tensor,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    by_token: bool = False,
) -> Tensor:
    """`attend` with queries in two parts, [num_tokens, num_heads, rank] and [..., turned]; heads may be strided."""
    rank, rotates, dtype = pages.k.shape[3], pages.format == "int8", q.dtype
    (num_tokens, heads, _), num_seqs, card = q.shape, block_table.shape[0], card_of(q.device)
    is_narrow = pages.format in SCALED_FORMATS
    rows = min(NARROW_ROWS if is_narrow else ROWS, max(16, power_of_2(heads)))
    blocks = -(-heads // rows)
    splits = splits_of(blocks, card.num_sms)
    if not by_token and num_tokens != num_seqs:
        splits = Splits(splits.first, 1)
    places = splits.places(block_table.shape[1] * pages.k.shape[2], None)
    each = heads * (places + ROTATING * rotates) * (rank + 2) * 4  # bytes
    at_once = max(1, min(PART_BYTES // each, 65_535, num_tokens))
    sums = torch.empty((at_once, heads, places, rank), dtype=torch.float32, device=q.device)
    norms = torch.empty((at_once, heads, places, 2), dtype=torch.float32, device=q.device)
    out = torch.empty((num_tokens, heads, rank), dtype=torch.float32 if rotates else dtype, device=q.device)
    mixed = out.view(dtype)[..., :rank]  # shares memory with `out`
    tensors = (*pages[:2], *(norms if one is None else one for one in pages[2:4]))
    split: dict[str, Any] = {"FIRST": splits.first, "SPLITS": splits.most, "STEPS": 8 if num_seqs < 256 else 20}
    for first in range(0, num_tokens, at_once):
        count = min(at_once, num_tokens - first)
        part = slice(first, first + count)
        queries = q[part]
        if rotates:
            queries = hadamard(queries)
        launch(
            split_latents,
            (side_by_side(places, count, blocks, card.num_sms), blocks, count),
            *(queries, turned[part], *tensors, block_table, cu_query_lens, seq_lens, sums, norms),
            *(scale * 1.4426950408889634, block_table.shape[1], num_seqs, first, places),
            HEADS=heads,
            ROWS=rows,
            RANK=rank,
            TURNED=turned.shape[2],
            Q_STRIDE=queries.stride(1),
            TURNED_STRIDE=turned.stride(1),
            WIDTH=max(16, power_of_2(rank)),
            TURNED_WIDTH=max(16, power_of_2(turned.shape[2])),
            PAGE=pages.k.shape[2],
            FORMAT=pages.format,
            SCALES="none" if pages.k_scales is None else "layer" if pages.k_scales.dim() == 1 else "token",
            KEYS=NARROW_KEYS if is_narrow else KEYS,
            STAGES=1 if is_narrow else 2,
            INTERPRET=interpreting(),
            num_warps=8,
            registers=REGISTERS if is_narrow and not turned.shape[2] else 0,
            **split,
        )
        launch(
            merge_splits,
            (heads, count),
            *(sums, norms, norms, norms, out, cu_query_lens, seq_lens, 0, places, num_seqs, first),
            DIM=rank,
            PADDED=power_of_2(rank),
            HEADS=heads,
            PLACES=2 * power_of_2(splits.most),
            AT_ONCE=MERGED // power_of_2(rank),
            FORMAT="",
            SCALES="none",
            BY_TOKEN=True,
            HAS_WINDOW=False,
            CHUNKED=False,
            HAS_SINKS=False,
            COUNTED=False,
            **split,
        )
        if rotates:
            mixed[part] = hadamard(out[part])
    return mixed


def latent_attention(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: LatentWeights,
    pages: KVPages,
    view: View,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    by_token: bool = False,
) -> Tensor:
    """`mixers.latent_attention`: few rows in some nine launches, others composed with `attend` as their attention."""
    if not by_token and x.shape[0] <= SMALL_TOKENS and _is_for_steps(x, weights, pages):
        return latent_step(x, weights, pages, view, cu_query_lens, seq_lens)
    run = partial(attend, by_token=by_token)
    return composed(x, weights, pages, view, cu_query_lens, seq_lens, attend=run)


def _is_for_steps(x: Tensor, weights: LatentWeights, pages: KVPages) -> bool:
    """Whether `latent_step` supports all features of this layer."""
    if weights.stacked is None or any(part.impl.name not in FUSED for part in weights.stacked):
        return False  # another implementation, for example because the kernel of `triton` failed its self-test
    whole = pages.k.is_contiguous() and pages.v.is_contiguous() and x.is_contiguous()
    plain = all(one.additions is None for one in (*weights.k_up, *weights.v_up))
    return whole and plain and has_only(weights, _STEP_FIELDS)


def latent_step(
    x: Tensor, weights: LatentWeights, pages: KVPages, view: View, cu_query_lens: Tensor, seq_lens: Tensor
) -> Tensor:
    """`latent_attention` for few rows. The heads' products run as those of experts: head h is expert h of its rows."""
    assert weights.stacked is not None
    cos, sin, block_table, slots = view
    (count, _), heads, rank, turned = x.shape, len(weights.k_up), weights.rank, weights.turned
    (rows,) = of_normed(x, weights.norm, weights.qkv)
    asked = rows.shape[1] - rank - turned - heads * weights.gated
    queries = rows[:, :asked]
    if weights.q_up is not None:
        (queries,) = of_normed(queries.contiguous(), weights.q_norm, weights.q_up)
    still, turned_q = _spread(rows, queries, asked, weights, (cos, sin), pages, slots)
    pairs = Pairs(_heads_of(heads, count, x.device), heads, None)
    first, second = (part.prepared for part in weights.stacked)
    latents = expert_product(still, first, Extras(), pairs).view(count, heads, rank)
    mixed = _attend(latents, turned_q, pages, block_table, cu_query_lens, seq_lens, weights.scale)
    values = expert_product(mixed.reshape(count * heads, rank), second, Extras(), pairs).view(count, -1)
    values = _gated(values, rows[:, -heads:]) if weights.gated else values
    return onto(x, weights.out, values) if weights.hyper is None else weights.out(values)


@cache
def _heads_of(heads: int, count: int, device: torch.device) -> Tensor:
    """The number of its head for every row of [count, heads]: int32."""
    return torch.arange(heads, dtype=torch.int32, device=device).repeat(count, 1)


@triton.jit
def _spread_kernel(
    rows, queries, gain, cosines, sines, still_out, turned_out, latents, pieces, latent_scales, piece_scales, slots,
    row_stride, query_stride, latent_at, eps,
    HEADS: tl.constexpr, STILL: tl.constexpr, STILL_WIDTH: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    TURNED: tl.constexpr, TURNED_WIDTH: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    RUN: tl.constexpr, FORMAT: tl.constexpr, LAYER_SCALE: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 of a token stores its latent and the RoPE part of its key; each other one splits TILE query heads."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, TURNED_WIDTH)[None, :]
    other = _partner(e, HALF, INTERLEAVED)
    if tl.program_id(1) == 0:
        row = rows + token * row_stride + latent_at
        slot = tl.load(slots + token) + tl.zeros([1, 1], tl.int64)
        real = slot >= 0
        slot = tl.maximum(slot, 0)
        d = tl.arange(0, WIDTH)[None, :]
        latent = tl.load(row + d, mask=d < RANK, other=0.0).to(tl.float32)
        latent *= 1.0 / tl.sqrt_rn(tl.sum(latent * latent, 1, keep_dims=True) * (1.0 / RANK) + eps)
        latent *= tl.load(gain + d, mask=d < RANK, other=0.0)
        if FORMAT == "int8":
            latent = rotate_rows(latent, RUN)
        only = tl.zeros([1, 1], tl.int32)
        _store_vectors(
            latent, latents, latent_scales, slot, only, d, real & (d < RANK), RANK, 1, PAGE, FORMAT, LAYER_SCALE
        )
        piece = tl.load(row + RANK + e, mask=e < TURNED, other=0.0).to(tl.float32)
        its_partner = tl.load(row + RANK + other, mask=e < TURNED, other=0.0).to(tl.float32)
        piece = _turned(piece, its_partner, cosines + token * HALF, sines + token * HALF, e, HALF, INTERLEAVED)
        _store_vectors(
            piece, pieces, piece_scales, slot, only, e, real & (e < TURNED), TURNED, 1, PAGE, FORMAT, LAYER_SCALE
        )
    else:
        head = (tl.program_id(1) - 1) * TILE + tl.arange(0, TILE)[:, None]
        query = queries + token * query_stride + head * (STILL + TURNED)
        s = tl.arange(0, STILL_WIDTH)[None, :]
        ok = (head < HEADS) & (s < STILL)
        tl.store(still_out + (token * HEADS + head) * STILL + s, tl.load(query + s, mask=ok, other=0.0), mask=ok)
        ok = (head < HEADS) & (e < TURNED)
        own = tl.load(query + STILL + e, mask=ok, other=0.0).to(tl.float32)
        partner = tl.load(query + STILL + other, mask=ok, other=0.0).to(tl.float32)
        own = _turned(own, partner, cosines + token * HALF, sines + token * HALF, e, HALF, INTERLEAVED)
        at = turned_out + (token * HEADS + head) * TURNED + e
        tl.store(at, own.to(turned_out.dtype.element_ty), mask=ok)


def _spread(
    rows: Tensor,
    queries: Tensor,
    latent_at: int,
    weights: LatentWeights,
    angles: tuple[Tensor, Tensor],
    pages: KVPages,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """Store latents and RoPE parts of keys; return queries without RoPE, and their RoPE parts after it.

    rows        [num_tokens, ...], with the latent and the RoPE part of the key from column `latent_at` on
    queries     [num_tokens, num_heads · (still + turned)]; tokens may be strided
    returns     [num_tokens · num_heads, still], [num_tokens, num_heads, turned]
    """
    count, heads, turned = rows.shape[0], len(weights.k_up), weights.turned
    still = queries.shape[1] // heads - turned
    still_out = torch.empty((count * heads, still), dtype=rows.dtype, device=rows.device)
    turned_out = torch.empty((count, heads, turned), dtype=rows.dtype, device=rows.device)
    widths = [max(16, power_of_2(size)) for size in (still, weights.rank, turned)]
    tile = max(1, TILE // widths[0])
    scales = (
        pages.k if pages.k_scales is None else pages.k_scales,
        pages.v if pages.v_scales is None else pages.v_scales,
    )
    launch(
        _spread_kernel,
        (count, 1 + -(-heads // tile)),
        *(rows, queries, weights.kv_norm.weight, *(part.contiguous() for part in angles), still_out, turned_out),
        *(*pages[:2], *scales, slots, rows.stride(0), queries.stride(0), latent_at, weights.kv_norm.eps),
        HEADS=heads,
        STILL=still,
        STILL_WIDTH=widths[0],
        RANK=weights.rank,
        WIDTH=widths[1],
        TURNED=turned,
        TURNED_WIDTH=widths[2],
        HALF=angles[0].shape[-1],
        TILE=tile,
        PAGE=pages.k.shape[2],
        RUN=run_length(weights.rank),
        FORMAT=pages.format,
        LAYER_SCALE=pages.k_scales is not None and pages.k_scales.dim() == 1,
        INTERLEAVED=weights.interleaved,
    )
    return still_out, turned_out


@triton.jit
def _gate_heads(
    values, gates, out, gate_stride, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, WIDTH)
    gate = tl.load(gates + token * gate_stride + head).to(tl.float32)
    at = (token * HEADS + head) * DIM + d
    wide = tl.load(values + at, mask=d < DIM, other=0.0).to(tl.float32)
    wide *= _sigmoid(gate)
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=d < DIM)


def _gated(values: Tensor, gates: Tensor) -> Tensor:
    """values [num_tokens, num_heads · dim] times sigmoid(gates), [num_tokens, num_heads] with strided tokens."""
    (count, heads), out = gates.shape, torch.empty_like(values)
    dim = values.shape[1] // heads
    sizes = {"HEADS": heads, "DIM": dim, "WIDTH": power_of_2(dim)}
    launch(_gate_heads, (count, heads), values, gates, out, gates.stride(0), num_warps=2, **sizes)
    return out
