"""Latent attention (MLA): split-KV attention of each query token over its sequence's cached latents, then a merge.

A token's key is its latent plus the RoPE part, its value is the latent, so one tile serves both products: a program
reads 1,152 bytes per key for a block of query heads, which are the rows of its products. Splits depend only on the
length of the sequence, and the merge kernel of `attention_decode` adds them in order. Prompts use the same kernel, one
token per row; their keys come from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_codes import hadamard
from ..kv_pages import SCALED_FORMATS, KVPages
from ..layer_weights import LatentWeights, View
from .attention import MERGED, PART_BYTES
from .attention_decode import _split_tokens, merge_splits
from .attention_tiles import Splits, side_by_side, splits_of
from .launch import card_of, interpreting, launch, power_of_2
from .sequences import query_of

ROTATING = 6  # extra float32 latents of memory per query head that the Hadamard rotation for int8 needs
ROWS, NARROW_ROWS = 32, 16  # most query heads per program; NARROW: with 8-bit pages, whose widened codes take registers
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
    q, latents, pieces, latent_scales, piece_scales, block_table, cu_query_lens, seq_lens, part_sum, part_norm,
    scale, table_width, num_seqs, first_token, num_places,
    HEADS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr,
    TURNED_WIDTH: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, KEYS: tl.constexpr,
    FIRST: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
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
    q_row = q + (row.to(tl.int64) * HEADS + head)[:, None] * (RANK + TURNED)
    q_still = tl.load(q_row + d[None, :], mask=real & (d < RANK)[None, :], other=0.0).to(operand)
    q_turned = tl.load(q_row + RANK + e[None, :], mask=real & (e < TURNED)[None, :], other=0.0).to(operand)
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
            piece = tl.load(pieces + at * TURNED + e[None, :], mask=seen[:, None] & (e < TURNED)[None, :], other=0)
            tile = _widened(tile, operand, FORMAT)
            piece = _widened(piece, operand, FORMAT)
            scores = tl.dot(q_still, tl.trans(tile), input_precision="ieee")
            if SCALES == "none":
                scores = tl.dot(q_turned, tl.trans(piece), scores, input_precision="ieee") * scale
            else:
                at_scale = slot if SCALES == "token" else slot * 0
                grown = tl.load(latent_scales + at_scale, mask=seen, other=1.0)
                turned = tl.load(piece_scales + at_scale, mask=seen, other=0.0)
                if FORMAT == "fp8":
                    grown *= 256.0
                    turned *= 256.0
                scores *= (grown * scale)[None, :]
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
    rank, rotates, dtype = pages.k.shape[3], pages.format == "int8", q.dtype
    (num_tokens, heads, width), num_seqs, card = q.shape, block_table.shape[0], card_of(q.device)
    q = q.contiguous()
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
    tensors = (*pages[:2], *(norms if one is None else one for one in pages[2:]))
    split: dict[str, Any] = {"FIRST": splits.first, "SPLITS": splits.most, "STEPS": 8 if num_seqs < 256 else 20}
    for first in range(0, num_tokens, at_once):
        count = min(at_once, num_tokens - first)
        part = slice(first, first + count)
        queries = q[part]
        if rotates:
            queries = torch.cat([hadamard(queries[..., :rank]), queries[..., rank:].float()], -1)
        launch(
            split_latents,
            (side_by_side(places, count, blocks, card.num_sms), blocks, count),
            *(queries, *tensors, block_table, cu_query_lens, seq_lens, sums, norms),
            *(scale * 1.4426950408889634, block_table.shape[1], num_seqs, first, places),
            HEADS=heads,
            ROWS=rows,
            RANK=rank,
            TURNED=width - rank,
            WIDTH=max(16, power_of_2(rank)),
            TURNED_WIDTH=max(16, power_of_2(width - rank)),
            PAGE=pages.k.shape[2],
            FORMAT=pages.format,
            SCALES="none" if pages.k_scales is None else "layer" if pages.k_scales.dim() == 1 else "token",
            KEYS=NARROW_KEYS if is_narrow else KEYS,
            STAGES=1 if is_narrow else 2,
            INTERPRET=interpreting(),
            num_warps=8,
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
    """The composed segment with `attend` as its attention."""
    run = partial(attend, by_token=by_token)
    return composed(x, weights, pages, view, cu_query_lens, seq_lens, attend=run)
