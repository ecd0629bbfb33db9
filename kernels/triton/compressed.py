"""Compressed attention (DeepSeek V4): `compressed.compressed_attention` without reading anything back from the device.

A program of the attention kernel computes splits of what one token sees, for a block of query heads, which are the rows
of its products: first the last tokens, then entries. Keys are values, so one tile serves both products. Splits depend
only on the number of keys, and the merge kernel of `attention_decode` adds them in order. Prompts use the same kernel,
one token per row; their keys come from the L2 cache.

Of 8-bit pages, which hold the last tokens alone, another kernel first makes a copy with 16 bits: together with tiles of
entries their codes spill registers, 100 to 1,400 bytes per thread.

The index scores all entries of a sequence for each of its tokens. With its 64 heads a product has enough rows, so the
tokens of a prompt do not share tiles of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_pages import SCALED_FORMATS, CompressedPages, KVPages
from ..layer_weights import FUSED_COMPRESSED, CompressedWeights, Linear, Norm, View, has_only
from ..token_index import SCORE_BYTES
from .attention import MERGED, PART_BYTES
from .attention_decode import _split_tokens, merge_splits
from .attention_tiles import Splits, side_by_side, splits_of
from .hadamard import rotate_rows, run_length
from .heads import TILE, _store_vectors
from .latent import _heads_of, _widened
from .launch import card_of, interpreting, launch, power_of_2, wait_for_previous
from .product import Extras, Pairs, expert_product
from .product_tiles import SMALL_TOKENS
from .segments import FUSED, of_normed, onto
from .sequences import query_of
from .token_index import choose_blocks, index_scores

ROWS, KEYS = 32, 32  # most query heads per program; keys per tile: 32 KB of 16-bit values
WIDENED = 8  # tokens that a program decodes
MADE = 1024  # elements of a token's row that are copied at once
MOST_ROWS = 65_535


@triton.jit
def _turned_pairs(even, odd, cosines, sines, pair, DIM: tl.constexpr, HALF: tl.constexpr, sign):
    """RoPE of the last HALF pairs of vectors, given as float32 pairs."""
    angle = pair - (DIM // 2 - HALF)
    turns = (angle >= 0) & (angle < HALF)
    c = tl.load(cosines + angle, mask=turns, other=1.0)
    s = tl.load(sines + angle, mask=turns, other=0.0) * sign
    return even * c - odd * s, odd * c + even * s


@triton.jit
def _vectors(rows, gain, eps, DIM: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, real):
    """Load vectors from `rows` [count, 1], normed with NORM: their even and odd elements, float32 [count, PAIRS]."""
    d = tl.arange(0, 2 * PAIRS)[None, :]
    x = tl.load(rows + d, mask=real & (d < DIM), other=0.0).to(tl.float32)
    if NORM:
        x *= 1.0 / tl.sqrt_rn(tl.sum(x * x, 1, keep_dims=True) * (1.0 / DIM) + eps)
        x *= tl.load(gain + d, mask=d < DIM, other=0.0)
    return tl.split(tl.reshape(x, (x.shape[0], PAIRS, 2)))


@triton.jit
def _whole(even, odd):
    """The vectors of which `even` and `odd` are the elements: [count, 2 PAIRS]."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def turn_heads(
    queries, gain, cosines, sines, out, values, value_gain, k_pages, k_scales, slots, first_made, second_made, stored,
    query_stride, value_stride, eps, value_eps, sign,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    NORM: tl.constexpr, WRITES: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, MADE: tl.constexpr,
    PAGE: tl.constexpr, RUN: tl.constexpr, FORMAT: tl.constexpr, LAYER_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RoPE of the last elements of TILE query heads, by `sign` times the angle, after the norm with NORM.

    WRITES  program 0 of a token stores its value, normed and rotated; program 1 what entries are made of: FIRST and
            SECOND elements of two products
    """
    wait_for_previous(PDL)
    token, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIRS)[None, :]
    if WRITES:
        slot = tl.load(slots + token)
        if place == 0:
            only = tl.zeros([1, 1], tl.int32)
            even, odd = _vectors(
                values + token * value_stride + only, value_gain, value_eps, DIM, PAIRS, True, only == 0
            )
            angles = token * HALF
            even, odd = _turned_pairs(even, odd, cosines + angles, sines + angles, pair, DIM, HALF, 1.0)
            value, d = _whole(even, odd), tl.arange(0, 2 * PAIRS)[None, :]
            if FORMAT == "int8":
                value = rotate_rows(value, RUN)
            at = slot + tl.zeros([1, 1], tl.int64)
            ok, at = (at >= 0) & (d < DIM), tl.maximum(at, 0)
            _store_vectors(value, k_pages, k_scales, at, only, d, ok, DIM, 1, PAGE, FORMAT, LAYER_SCALE)
            return
        if place == 1:
            if slot >= 0:
                to = stored + slot * (FIRST + SECOND)
                for start in tl.static_range(0, FIRST, MADE):
                    d = start + tl.arange(0, MADE)
                    made = tl.load(first_made + token * FIRST + d, mask=d < FIRST, other=0.0).to(tl.float32)
                    tl.store(to + d, made.to(stored.dtype.element_ty), mask=d < FIRST)
                for start in tl.static_range(0, SECOND, MADE):
                    d = start + tl.arange(0, MADE)
                    made = tl.load(second_made + token * SECOND + d, mask=d < SECOND, other=0.0).to(tl.float32)
                    tl.store(to + FIRST + d, made.to(stored.dtype.element_ty), mask=d < SECOND)
            return
        place -= 2
    head = place * TILE + tl.arange(0, TILE)[:, None]
    row = queries + token * query_stride + head * DIM
    even, odd = _vectors(row, gain, eps, DIM, PAIRS, NORM, head < HEADS)
    even, odd = _turned_pairs(even, odd, cosines + token * HALF, sines + token * HALF, pair, DIM, HALF, sign)
    d = tl.arange(0, 2 * PAIRS)[None, :]
    at = out + (token * HEADS + head) * DIM + d
    tl.store(at, _whole(even, odd).to(out.dtype.element_ty), mask=(head < HEADS) & (d < DIM))


@triton.jit
def _token_row(stored, table, token, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """Where the row of a token of a sequence is stored, by its block table; that of token 0 before the text."""
    page = tl.load(table + tl.maximum(token, 0) // PAGE).to(tl.int64)
    return stored + (page * PAGE + tl.maximum(token, 0) % PAGE) * WIDTH


@triton.jit(do_not_specialize=["table_width", "num_seqs"])
def complete_entries(
    stored, places, gain, cosines, sines, back, slots, block_table, cu_query_lens, seq_lens, entries, table_width,
    num_seqs, eps,
    START: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, STORED: tl.constexpr, AT: tl.constexpr,
    ENTRY: tl.constexpr, HALF: tl.constexpr, RATIO: tl.constexpr, SETS: tl.constexpr, PAGE: tl.constexpr,
    UNIT: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the entry that a token completes, if it does: WIDTH elements from column AT of its row on.

    Per channel, the mean of the tokens' values, weighted by the softmax of their logits and biases; normed, and rotated
    to the position of its first token. Values begin in column START of what is stored of a token. With two SETS an
    entry begins RATIO tokens earlier, and those tokens have values and logits of their own.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0)
    _, seq, length = query_of(row, cu_query_lens, seq_lens, num_seqs, 0, True, STEPS)
    slot = tl.load(slots + row)
    if (length % RATIO == 0) & (slot >= 0):
        table = block_table + seq.to(tl.int64) * table_width
        d = tl.arange(0, 2 * PAIRS)
        ok = d < WIDTH
        first = length - SETS * RATIO
        most = tl.full([2 * PAIRS], float("-inf"), tl.float32)
        for place in tl.range(0, SETS * RATIO):
            own = (place // RATIO) * WIDTH + d
            at = _token_row(stored, table, first + place, PAGE, STORED) + START
            logits = tl.load(at + SETS * WIDTH + own, mask=ok, other=0.0).to(tl.float32)
            logits += tl.load(places + (place % RATIO) * (SETS * WIDTH) + own, mask=ok, other=0.0)
            logits = tl.where(first + place >= 0, logits, float("-inf"))
            most = tl.maximum(most, logits, propagate_nan=tl.PropagateNan.ALL)
        total, weights = tl.zeros([2 * PAIRS], tl.float32), tl.zeros([2 * PAIRS], tl.float32)
        for place in tl.range(0, SETS * RATIO):
            own = (place // RATIO) * WIDTH + d
            at = _token_row(stored, table, first + place, PAGE, STORED) + START
            logits = tl.load(at + SETS * WIDTH + own, mask=ok, other=0.0).to(tl.float32)
            logits += tl.load(places + (place % RATIO) * (SETS * WIDTH) + own, mask=ok, other=0.0)
            share = tl.where(first + place >= 0, tl.exp2((logits - most) * 1.4426950408889634), 0.0)
            total += share * tl.load(at + own, mask=ok, other=0.0).to(tl.float32)
            weights += share
        mean = tl.where(ok, total / weights, 0.0)
        mean *= 1.0 / tl.sqrt_rn(tl.sum(mean * mean, 0) * (1.0 / WIDTH) + eps)
        mean *= tl.load(gain + d, mask=ok, other=0.0)
        even, odd = tl.split(tl.reshape(mean, (1, PAIRS, 2)))
        # the angles of the entry's first token, from those of its last one
        angle = tl.arange(0, PAIRS)[None, :] - (WIDTH // 2 - HALF)
        turns = (angle >= 0) & (angle < HALF)
        c = tl.load(cosines + row.to(tl.int64) * HALF + angle, mask=turns, other=1.0)
        s = tl.load(sines + row.to(tl.int64) * HALF + angle, mask=turns, other=0.0)
        c_back = tl.load(back + angle, mask=turns, other=1.0)
        s_back = tl.load(back + HALF + angle, mask=turns, other=0.0)
        cosine, sine = c * c_back + s * s_back, s * c_back - c * s_back
        entry = tl.reshape(_whole(even * cosine - odd * sine, odd * cosine + even * sine), (2 * PAIRS,))
        tl.store(entries + slot // UNIT * ENTRY + AT + d, entry.to(entries.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["table_width", "num_seqs", "first_token"])
def widen_window(
    keys, k_scales, block_table, cu_query_lens, seq_lens, out, table_width, num_seqs, first_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, TILED: tl.constexpr, PAGE: tl.constexpr,
    FORMAT: tl.constexpr, LAYER_SCALE: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Decode ROWS of the WINDOW last tokens up to one token, its own last, into its TILED rows of `out`."""
    wait_for_previous(PDL)
    row = tl.program_id(1)
    _, seq, length = query_of(row, cu_query_lens, seq_lens, num_seqs, first_token, True, STEPS)
    table = block_table + seq.to(tl.int64) * table_width
    place, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = tl.maximum(length - TILED + place, 0)
    there = (place >= TILED - tl.minimum(length, WINDOW)) & (place < TILED)
    slot = tl.load(table + token // PAGE, mask=there, other=0).to(tl.int64) * PAGE + token % PAGE
    inside = there[:, None] & (d < DIM)[None, :]
    wide = _widened(tl.load(keys + slot[:, None] * DIM + d[None, :], mask=inside, other=0), tl.float32, FORMAT)
    if FORMAT == "fp8":
        wide *= 256.0
    if LAYER_SCALE:
        wide *= tl.load(k_scales)
    else:
        wide *= tl.load(k_scales + slot, mask=there, other=0.0)[:, None]
    if FORMAT == "int8":
        wide = rotate_rows(wide, RUN)
    at = out + (row.to(tl.int64) * TILED + place)[:, None] * DIM + d[None, :]
    tl.store(at, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _seen(q, tile, there, scale, acc, top, norm, operand: tl.constexpr):
    """Add a tile of keys, which are their values, to the running softmax of a block of heads."""
    scores = tl.dot(q, tl.trans(tile), input_precision="ieee") * scale
    scores = tl.where(there[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = tl.dot(weights.to(operand), tile, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, norm * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["table_width", "entry_width", "num_seqs", "first_token", "num_places"])
def split_entries(
    q, keys, entries, chosen, counts, block_table, entry_table, cu_query_lens, seq_lens, part_sum, part_norm,
    totals, scale, table_width, entry_width, num_seqs, first_token, num_places,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    TILED: tl.constexpr, PAGE: tl.constexpr, OWN: tl.constexpr, HALF: tl.constexpr, RATIO: tl.constexpr,
    UNIT: tl.constexpr, ENTRY: tl.constexpr, TOP: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr,
    SPLITS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Attention of one token over every num_programs(0)-th split of what it sees, for ROWS query heads.

    Its keys are numbered: the WINDOW last tokens, in TILED places, its own last, then the entries. Writes partial
    results in the layout of `attention_decode.decode_split`, and the number of keys. Row 0 of q is token first_token.

    OWN     `keys` are the rows of `widen_window`, not pages
    HALF    products of float16, not of bfloat16
    RATIO   tokens of an entry; 0: there are none
    TOP     most entries of `chosen`, which holds rows of `entries`; 0: a token sees all entries before it
    """
    row = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _, seq, length = query_of(row, cu_query_lens, seq_lens, num_seqs, first_token, True, STEPS)
    seen = length * 0
    if TOP > 0:
        seen = tl.load(counts + row)
    elif RATIO > 0:
        seen = length // RATIO
    total = TILED + seen
    size = _split_tokens(total, FIRST, SPLITS)
    table = block_table + seq.to(tl.int64) * table_width
    of_entries = entry_table + seq.to(tl.int64) * entry_width
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d, n = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    operand: tl.constexpr = tl.float32 if INTERPRET else tl.float16 if HALF else tl.bfloat16
    real, inside = (head < HEADS)[:, None], (d < DIM)[None, :]
    q_row = q + (row.to(tl.int64) * HEADS + head)[:, None] * DIM
    queries = tl.load(q_row + d[None, :], mask=real & inside, other=0.0).to(operand)
    oldest = TILED - tl.minimum(length, WINDOW)  # place of the first token it sees
    if OWN:
        keys += row.to(tl.int64) * (TILED * DIM)
    for place in tl.range(tl.program_id(0), (total + size - 1) // size, tl.num_programs(0), num_stages=1):
        begin = place * size
        end = tl.minimum(begin + size, total)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        norm = tl.zeros([ROWS], tl.float32)
        for start in tl.range(
            tl.maximum(begin, oldest // KEYS * KEYS), tl.minimum(end, TILED), KEYS, num_stages=STAGES
        ):
            there = start + n >= oldest
            if OWN:
                slot = start + n
            else:
                token = tl.maximum(length - TILED + start + n, 0)
                slot = tl.load(table + token // PAGE, mask=there, other=0).to(tl.int64) * PAGE + token % PAGE
            tile = tl.load(keys + slot[:, None] * DIM + d[None, :], mask=there[:, None] & inside, other=0.0)
            wide = tile.to(tl.float32).to(operand)
            acc, top, norm = _seen(queries, wide, there, scale, acc, top, norm, operand)
        for start in tl.range(tl.maximum(begin, TILED), end, KEYS, num_stages=STAGES):
            number = start - TILED + n
            there = number < seen
            if TOP > 0:
                at = tl.load(chosen + row.to(tl.int64) * (TOP + 1) + number, mask=there, other=0).to(tl.int64)
            else:
                last = (number + 1) * RATIO - 1
                at = tl.load(of_entries + last // PAGE, mask=there, other=0).to(tl.int64) * (PAGE // UNIT)
                at += last % PAGE // UNIT
            tile = tl.load(entries + at[:, None] * ENTRY + d[None, :], mask=there[:, None] & inside, other=0.0)
            wide = tile.to(tl.float32).to(operand)
            acc, top, norm = _seen(queries, wide, there, scale, acc, top, norm, operand)
        part = (row.to(tl.int64) * HEADS + head) * num_places + place
        tl.store(part_norm + part * 2, top, mask=head < HEADS)
        tl.store(part_norm + part * 2 + 1, norm, mask=head < HEADS)
        tl.store(part_sum + part[:, None] * DIM + d[None, :], acc, mask=real & inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(totals + row, total)


def compressed_attention(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: CompressedWeights,
    pages: CompressedPages | KVPages,
    view: View,
    of_entries: View | None,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    by_token: bool = False,
) -> Tensor:
    """`compressed.compressed_attention`: some twenty launches for one token.

    by_token   split prompts like single tokens: bitwise independent of chunking and batching
    """
    window, entries = pages if isinstance(pages, CompressedPages) else (pages, None)
    if not _supports(x, weights, window, entries):
        return composed(x, weights, pages, view, of_entries, cu_query_lens, seq_lens)
    cos, sin, block_table, slots = view
    angles = cos.contiguous(), sin.contiguous()
    index, count, heads = weights.index, x.shape[0], weights.num_heads
    asks = index is not None and of_entries is not None and _capacity(of_entries, window, weights) > index.top
    made = [pool.rows for pool in weights.pools]
    shared = [index.shares] if asks and index is not None else []
    rows, *others = of_normed(x, weights.norm, weights.inputs, *made, *shared)
    size = weights.q_norm.weight.shape[0]
    latents = rows[:, :size].contiguous()
    queries, *asked = of_normed(
        latents, weights.q_norm, weights.q_up, *([index.q_up] if asks and index is not None else [])
    )
    turn = partial(turned, angles=angles)
    kept = rows[:, size:], weights.kv_norm, window, slots, others[: len(made)]
    q = turn(queries.view(count, heads, -1), norm=weights.head_norm, kept=kept)
    where = cu_query_lens, seq_lens
    chosen = None
    if weights.pools:
        assert entries is not None and of_entries is not None
        completed(weights, window, entries, angles, block_table, of_entries[3], where)
        if asks and index is not None:
            score = turn(asked[0].view(count, index.num_heads, -1)), others[-1]
            chosen = choose_entries(score, index.top, weights, entries, of_entries[2], where)
    tables = block_table, block_table if of_entries is None else of_entries[2]
    seen = turn(attended(q, weights, window, entries, tables, chosen, where, by_token), sign=-1.0)
    low = _narrowed(seen, weights)
    return onto(x, weights.out, low) if weights.hyper is None else weights.out(low)


def _supports(x: Tensor, weights: CompressedWeights, window: KVPages, entries: KVPages | None) -> bool:
    """Whether the kernels support all features of this layer."""
    if not (weights.interleaved and has_only(weights, FUSED_COMPRESSED) and x.is_contiguous()):
        return False
    if weights.index is not None and (entries is None or _unit(window, entries) != weights.ratio):
        return False
    widths = (weights.head_dim, *(pool.norm.weight.shape[0] for pool in weights.pools))
    return window.k.is_contiguous() and not any(width % 2 for width in widths)


def _unit(window: KVPages, entries: KVPages) -> int:
    """Tokens that share a place in the pages of entries."""
    assert entries.block_keys is not None
    return window.k.shape[2] // entries.block_keys.shape[1]


def _capacity(of_entries: View, window: KVPages, weights: CompressedWeights) -> int:
    """Most entries that the sequences of a step may have."""
    return of_entries[2].shape[1] * window.k.shape[2] // weights.ratio


def turned(
    vectors: Tensor,
    angles: tuple[Tensor, Tensor],
    norm: Norm | None = None,
    kept: tuple[Tensor, Norm, KVPages, Tensor, list[Tensor]] | None = None,
    sign: float = 1.0,
) -> Tensor:
    """Rotate the last elements of vectors [num_tokens, heads, dim], after the norm.

    kept   the step's values with their norm, pages and slots, and what their entries are made of: all are stored
    """
    (count, heads, dim), half = vectors.shape, angles[0].shape[1]
    out = torch.empty_like(vectors)
    pairs = max(8, power_of_2(dim // 2))
    tile = max(1, TILE // (2 * pairs))
    values, value_gain, value_eps, stored, extra = vectors, angles[0], 0.0, (vectors,) * 4, (vectors,) * 2
    sizes: dict[str, Any] = {"FIRST": 0, "SECOND": 0, "PAGE": 1, "FORMAT": "", "LAYER_SCALE": False}
    if kept is not None:
        values, own, pages, slots, made = kept
        value_gain, value_eps = own.weight, own.eps
        scales = pages.k if pages.k_scales is None else pages.k_scales
        rows = pages.k if pages.index_keys is None else pages.index_keys
        stored, extra = (pages.k, scales, slots, rows), (*made, *(rows,) * (2 - len(made)))
        sizes = dict(zip(("FIRST", "SECOND"), (*(one.shape[1] for one in made), 0, 0), strict=False))
        sizes |= {"PAGE": pages.k.shape[2], "FORMAT": pages.format}
        sizes["LAYER_SCALE"] = pages.k_scales is not None and pages.k_scales.dim() == 1
    launch(
        turn_heads,
        (count, 2 * (kept is not None) + -(-heads // tile)),
        *(vectors, angles[0] if norm is None else norm.weight, *angles, out),
        *(values, value_gain, *stored[:3], *extra, stored[3]),
        *(vectors.stride(0), values.stride(0), 0.0 if norm is None else norm.eps, value_eps, sign),
        HEADS=heads,
        DIM=dim,
        PAIRS=pairs,
        HALF=half,
        TILE=tile,
        NORM=norm is not None,
        WRITES=kept is not None,
        MADE=MADE,
        RUN=run_length(dim),
        **sizes,
    )
    return out


def completed(
    weights: CompressedWeights,
    window: KVPages,
    entries: KVPages,
    angles: tuple[Tensor, Tensor],
    block_table: Tensor,
    slots: Tensor,
    where: tuple[Tensor, Tensor],
) -> None:
    """Write the entries that the step completes, one launch per pool."""
    assert window.index_keys is not None and entries.block_keys is not None and weights.back is not None
    cu_query_lens, seq_lens = where
    sets, stored, entry = 1 + weights.overlaps, window.index_keys, entries.block_keys
    num_seqs, first, at = block_table.shape[0], 0, 0
    for pool in weights.pools:
        width = pool.norm.weight.shape[0]
        launch(
            complete_entries,
            (slots.shape[0],),
            *(stored, pool.places, pool.norm.weight, *angles, weights.back, slots, block_table, cu_query_lens),
            *(seq_lens, entry, block_table.shape[1], num_seqs, pool.norm.eps),
            START=first,
            WIDTH=width,
            PAIRS=max(8, power_of_2(width // 2)),
            STORED=stored.shape[2],
            AT=at,
            ENTRY=entry.shape[2],
            HALF=angles[0].shape[1],
            RATIO=weights.ratio,
            SETS=sets,
            PAGE=window.k.shape[2],
            UNIT=_unit(window, entries),
            STEPS=_steps(num_seqs),
        )
        first, at = first + 2 * sets * width, at + width


def choose_entries(
    asked: tuple[Tensor, Tensor],
    top: int,
    weights: CompressedWeights,
    entries: KVPages,
    entry_table: Tensor,
    where: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Rows of the entries that each token sees, int32 [num_tokens, top + 1], and how many: int32 [num_tokens]."""
    assert entries.block_keys is not None
    (queries, shares), (cu_query_lens, seq_lens), per_page = asked, where, entries.block_keys.shape[1]
    keys, count = entries.block_keys[..., weights.head_dim :], queries.shape[0]
    seen, sequence = seq_lens, None
    if count != entry_table.shape[0]:
        rows = torch.arange(count, device=queries.device)
        sequence = torch.searchsorted(cu_query_lens[1:], rows, right=True)
        seen = (seq_lens[sequence] - cu_query_lens[1:][sequence] + rows + 1).int()
    seen = seen // weights.ratio
    # per token: its block table, scores and the choice
    at_once = max(1, SCORE_BYTES // (4 * entry_table.shape[1] * (1 + per_page)))
    found = []
    for first in range(0, count, at_once):
        some = slice(first, first + at_once)
        table = entry_table[some] if sequence is None else entry_table[sequence[some]]
        scores = index_scores(queries[some], keys, table, shares[some])
        found.append(choose_blocks(scores, table, seen[some], 1, top, per_page, 1))
    tables, counts = zip(*found, strict=True)
    return found[0] if len(found) == 1 else (torch.cat(tables), torch.cat(counts))


def attended(
    q: Tensor,
    weights: CompressedWeights,
    window: KVPages,
    entries: KVPages | None,
    tables: tuple[Tensor, Tensor],
    chosen: tuple[Tensor, Tensor] | None,
    where: tuple[Tensor, Tensor],
    by_token: bool,
) -> Tensor:
    """What the queries see, in the dtype of q: [num_tokens, heads, dim].

    tables   block tables of the last tokens and of the entries
    """
    (count, heads, dim), num_seqs, card, ratio = q.shape, tables[0].shape[0], card_of(q.device), weights.ratio
    page, rows = window.k.shape[2], min(ROWS, max(16, power_of_2(heads)))
    blocks, tiled = -(-heads // rows), -(-weights.window // KEYS) * KEYS
    splits = splits_of(blocks, card.num_sms)
    if not by_token and count != num_seqs:
        splits = Splits(splits.first, 1)
    most = 0 if entries is None else tables[1].shape[1] * page // ratio
    top = 0 if chosen is None or weights.index is None else weights.index.top
    places = splits.places(tiled + (min(most, top) if top else most), None)
    copies, half = window.format in SCALED_FORMATS, window.format == "fp16"
    each = heads * places * (dim + 2) * 4 + copies * tiled * dim * 2  # bytes
    at_once = max(1, min(PART_BYTES // each, MOST_ROWS, count))
    sums = torch.empty((at_once, heads, places, dim), dtype=torch.float32, device=q.device)
    norms = torch.empty((at_once, heads, places, 2), dtype=torch.float32, device=q.device)
    totals = torch.empty(at_once, dtype=torch.int32, device=q.device)
    out, keys = torch.empty_like(q), window.k
    if copies:
        keys = torch.empty((at_once, tiled, dim), dtype=torch.bfloat16, device=q.device)
    stored = window.k if entries is None or entries.block_keys is None else entries.block_keys
    split: dict[str, Any] = {"FIRST": splits.first, "SPLITS": splits.most, "STEPS": _steps(num_seqs)}
    for first in range(0, count, at_once):
        some = min(at_once, count - first)
        part = slice(first, first + some)
        if copies:
            _widen(window, keys[:some], (tables[0], *where), weights.window, first)
        picked = (stored, stored) if chosen is None else (chosen[0][part], chosen[1][part])
        launch(
            split_entries,
            (side_by_side(places, some, blocks, card.num_sms), blocks, some),
            *(q[part], keys, stored, *picked, *tables, *where),
            *(sums, norms, totals, weights.scale * 1.4426950408889634, tables[0].shape[1], tables[1].shape[1]),
            *(num_seqs, first, places),
            HEADS=heads,
            ROWS=rows,
            DIM=dim,
            WIDTH=max(16, power_of_2(dim)),
            WINDOW=weights.window,
            TILED=tiled,
            PAGE=page,
            OWN=copies,
            HALF=half,
            RATIO=0 if entries is None else ratio,
            UNIT=1 if entries is None else _unit(window, entries),
            ENTRY=stored.shape[2],
            TOP=top,
            KEYS=KEYS,
            STAGES=2,
            INTERPRET=interpreting(),
            num_warps=8,
            **split,
        )
        launch(
            merge_splits,
            (heads, some),
            *(sums, norms, weights.sinks, norms, out[part], _numbers(q.device), totals, 0, places, some, 0),
            DIM=dim,
            PADDED=power_of_2(dim),
            HEADS=heads,
            PLACES=2 * power_of_2(splits.most),
            AT_ONCE=MERGED // power_of_2(dim),
            FORMAT="",
            SCALES="none",
            BY_TOKEN=False,
            HAS_WINDOW=False,
            CHUNKED=False,
            HAS_SINKS=True,
            COUNTED=True,
            **split,
        )
    return out


def _widen(pages: KVPages, out: Tensor, where: tuple[Tensor, Tensor, Tensor], window: int, first: int) -> None:
    """Decode what each token from `first` on sees of 8-bit pages into `out`, bfloat16 [num_tokens, tiled, dim].

    where   block table, cu_query_lens and seq_lens
    """
    count, tiled, dim = out.shape
    table, num_seqs, scales = where[0], where[0].shape[0], pages.k_scales
    assert scales is not None
    launch(
        widen_window,
        (-(-tiled // WIDENED), count),
        *(pages.k, scales, *where, out, table.shape[1], num_seqs, first),
        DIM=dim,
        WIDTH=max(16, power_of_2(dim)),
        WINDOW=window,
        TILED=tiled,
        PAGE=pages.k.shape[2],
        FORMAT=pages.format,
        LAYER_SCALE=scales.dim() == 1,
        RUN=run_length(dim),
        ROWS=WIDENED,
        STEPS=_steps(num_seqs),
    )


def _narrowed(seen: Tensor, weights: CompressedWeights) -> Tensor:
    """The products of each group of heads: [num_tokens, groups · out_rank]. Those of few rows run as those of experts:
    group g is expert g of its rows.
    """
    count, groups, stacked = seen.shape[0], len(weights.narrow), weights.stacked
    parts = seen.view(count, groups, -1)
    plain = all(one.additions is None for one in weights.narrow)
    if stacked is not None and stacked.impl.name in FUSED and plain and count <= SMALL_TOKENS:
        pairs = Pairs(_heads_of(groups, count, seen.device), groups, None)
        return expert_product(parts.flatten(0, 1), stacked.prepared, Extras(), pairs).view(count, -1)
    one_by_one: list[tuple[Linear, Tensor]] = list(zip(weights.narrow, parts.unbind(1), strict=True))
    return torch.cat([linear(part.contiguous()) for linear, part in one_by_one], -1)


def _steps(num_seqs: int) -> int:
    return 8 if num_seqs < 256 else 20


@cache
def _numbers(device: torch.device) -> Tensor:
    """The start of each row if every row is a sequence of one token."""
    return torch.arange(MOST_ROWS + 1, dtype=torch.int32, device=device)
