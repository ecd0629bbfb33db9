"""The ops of sparse attention's index, a launch each where PyTorch needs 90 in a decode step.

Scores: a tile of queries, all heads of each, against a tile of block keys per program. In plain PyTorch the products of
every head are written, read and summed: at 200,000 tokens with four heads 0.8 MB per query. Here they stay in
registers. A score's additions have the same order in every batch and for any number of blocks.

The choice: a program per query. The bits of scores are made to compare like the scores; three passes count them by 11,
11 and 10 bits and find the least score that is chosen, and a last one writes the blocks in their order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int32

from ..kv_pages import KVPages
from ..layer_weights import Norm
from .heads import _partner
from .launch import card_of, interpreting, launch, power_of_2, wait_for_previous

ROWS = 16  # rows of the product, at least: queries times heads
KEYS, SCORES = 64, 4096  # most keys of a tile; products of a tile, if it has more than 64 rows
STEP = 128  # elements of a head at once
CHOICE = 2048  # scores at once, with 8 warps: Triton 3.6 spills registers with 4,096 on compute capability 12.0


@triton.jit
def _kept(keys, slots, stored, token, slot, back, d, ok, WIDTH: tl.constexpr, KEY_STRIDE: tl.constexpr):
    """What is stored of the token that is `back` before `token` in `slot`; it may be in the same step."""
    row = tl.maximum(token - back, 0)
    is_new = (token >= back) & (tl.load(slots + row) == slot - back)
    new = tl.load(keys + row * KEY_STRIDE + d, mask=ok, other=0.0)
    old = tl.load(stored + (slot - back) * WIDTH + d, mask=ok, other=0.0)
    return tl.where(is_new, new.to(tl.float32).to(stored.dtype.element_ty), old).to(tl.float32)


@triton.jit
def _block_sum(
    keys, slots, stored, token, slot, d,
    DIM: tl.constexpr, RATIO: tl.constexpr, KEY_STRIDE: tl.constexpr,
):  # fmt: skip
    """The sum over the tokens of a block, whose last one is `token` in `slot`."""
    total = tl.zeros([d.shape[0]], tl.float32)
    for place in tl.static_range(RATIO):
        total += _kept(keys, slots, stored, token, slot, RATIO - 1 - place, d, d < DIM, DIM, KEY_STRIDE)
    return total


@triton.jit
def _write_keys(
    keys, slots, weight, cosines, sines, back, stored, blocks, eps,
    DIM: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, RATIO: tl.constexpr, KEY_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The index key of a token, and that of the block that it completes."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    slot = tl.load(slots + token)
    wait_for_previous(PDL)
    key = tl.load(keys + token * KEY_STRIDE + d, mask=d < DIM, other=0.0)
    # through float32: compute capability 7.5 has no conversion to bfloat16, and only from float32 one is emulated
    tl.store(stored + slot * DIM + d, key.to(tl.float32).to(stored.dtype.element_ty), mask=d < DIM)
    if slot % RATIO == RATIO - 1:
        other = _partner(d, HALF, False)
        mean = _block_sum(keys, slots, stored, token, slot, d, DIM, RATIO, KEY_STRIDE) * (1.0 / RATIO)
        turned = _block_sum(keys, slots, stored, token, slot, other, DIM, RATIO, KEY_STRIDE) * (1.0 / RATIO)
        scale = 1.0 / tl.sqrt_rn(tl.sum(mean * mean, 0) * (1.0 / DIM) + eps)
        mean *= scale * tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
        turned *= scale * tl.load(weight + other, mask=d < DIM, other=0.0).to(tl.float32)
        # the angles of the block's first token
        angle, rotates = tl.where(d < HALF, d, d - HALF), d < 2 * HALF
        c = tl.load(cosines + token * HALF + angle, mask=rotates, other=1.0)
        s = tl.load(sines + token * HALF + angle, mask=rotates, other=0.0)
        c_back = tl.load(back + angle, mask=rotates, other=1.0)
        s_back = tl.load(back + HALF + angle, mask=rotates, other=0.0)
        cosine, sine = c * c_back + s * s_back, s * c_back - c * s_back
        value = tl.where(rotates, mean * cosine + turned * tl.where(d < HALF, -sine, sine), mean)
        tl.store(blocks + slot // RATIO * DIM + d, value.to(blocks.dtype.element_ty), mask=d < DIM)


def index_write(
    keys: Tensor, norm: Norm, pages: KVPages, slot_mapping: Tensor, cos: Tensor, sin: Tensor, back: Tensor
) -> None:
    """`sparse.index_write` in one launch."""
    assert pages.index_keys is not None and pages.block_keys is not None
    dim, ratio = keys.shape[1], pages.index_keys.shape[1] // pages.block_keys.shape[1]
    tensors = keys, slot_mapping, norm.weight, cos.contiguous(), sin.contiguous(), back, pages.index_keys
    sizes = {"DIM": dim, "PADDED": power_of_2(dim), "HALF": cos.shape[1], "RATIO": ratio, "KEY_STRIDE": keys.stride(0)}
    launch(_write_keys, (keys.shape[0],), *tensors, pages.block_keys, norm.eps, num_warps=1, **sizes)


@triton.jit
def _pool_keys(
    keys, slots, places, stored, blocks,
    DIM: tl.constexpr, PADDED: tl.constexpr, RATIO: tl.constexpr, KEY_STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The index key of a token and the logits of its weights, and the key of the block that it completes."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    ok = d < DIM
    slot = tl.load(slots + token)
    wait_for_previous(PDL)
    for part in tl.static_range(2):
        own = tl.load(keys + token * KEY_STRIDE + part * DIM + d, mask=ok, other=0.0).to(tl.float32)
        tl.store(stored + slot * (2 * DIM) + part * DIM + d, own.to(stored.dtype.element_ty), mask=ok)
    if slot % RATIO == RATIO - 1:
        most = tl.full([PADDED], float("-inf"), tl.float32)
        for place in tl.static_range(RATIO):
            logits = _kept(keys, slots, stored, token, slot, RATIO - 1 - place, DIM + d, ok, 2 * DIM, KEY_STRIDE)
            logits += tl.load(places + place * DIM + d, mask=ok, other=0.0)
            most = tl.maximum(most, logits, propagate_nan=tl.PropagateNan.ALL)
        total, weights = tl.zeros([PADDED], tl.float32), tl.zeros([PADDED], tl.float32)
        for place in tl.static_range(RATIO):
            key = _kept(keys, slots, stored, token, slot, RATIO - 1 - place, d, ok, 2 * DIM, KEY_STRIDE)
            logits = _kept(keys, slots, stored, token, slot, RATIO - 1 - place, DIM + d, ok, 2 * DIM, KEY_STRIDE)
            logits += tl.load(places + place * DIM + d, mask=ok, other=0.0)
            share = tl.exp2((logits - most) * 1.4426950408889634)
            total += share * key
            weights += share
        tl.store(blocks + slot // RATIO * DIM + d, (total / weights).to(blocks.dtype.element_ty), mask=ok)


def index_pool(keys: Tensor, places: Tensor, pages: KVPages, slot_mapping: Tensor) -> None:
    """`sparse.index_pool` in one launch."""
    assert pages.index_keys is not None and pages.block_keys is not None
    ratio, dim = places.shape
    sizes = {"DIM": dim, "PADDED": power_of_2(dim), "RATIO": ratio, "KEY_STRIDE": keys.stride(0)}
    tensors = keys, slot_mapping, places.contiguous(), pages.index_keys, pages.block_keys
    launch(_pool_keys, (keys.shape[0],), *tensors, num_warps=1, **sizes)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "table_stride"])
def _score_keys(
    q, keys, block_table, shares, out, num_queries, num_keys, table_stride,
    HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PER_PAGE: tl.constexpr, KEY_STRIDE: tl.constexpr,
    SHARES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sum over HEADS of relu(q · k) of QUERIES queries and KEYS keys; heads are padded to PADDED.

    SHARES    each head of a query has a weight

    PER_PAGE  keys of a page of the query's block table; 0: all queries have the same keys
    """
    row = tl.arange(0, QUERIES * PADDED)
    query = tl.program_id(1).to(tl.int64) * QUERIES + row // PADDED
    ok = (query < num_queries) & (row % PADDED < HEADS)
    from_q = q + (query * HEADS + row % PADDED) * DIM
    key = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    seen, at = key < num_keys, key
    if PER_PAGE > 0:
        from_table = block_table + tl.program_id(1).to(tl.int64) * table_stride
        page = tl.load(from_table + key // PER_PAGE, mask=seen, other=-1).to(tl.int64)
        seen, at = page >= 0, page * PER_PAGE + key % PER_PAGE
    products = tl.zeros([QUERIES * PADDED, KEYS], tl.float32)
    for start in tl.static_range(0, DIM, STEP):
        d = start + tl.arange(0, STEP)
        left = tl.load(from_q[:, None] + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)
        right = tl.load(
            keys + at[None, :] * KEY_STRIDE + d[:, None], mask=seen[None, :] & (d < DIM)[:, None], other=0.0
        )
        if INTERPRET or left.dtype != right.dtype:
            left, right = left.to(tl.float32), right.to(tl.float32)
        products = tl.dot(left, right, products, input_precision="ieee")
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if SHARES:
        products *= tl.load(shares + query * HEADS + row % PADDED, mask=ok, other=0.0).to(tl.float32)[:, None]
    total = tl.sum(tl.reshape(products, [QUERIES, PADDED, KEYS]), 1)
    total = tl.where(total == total, total, 0.0)
    query = tl.program_id(1).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    ok = (query < num_queries)[:, None] & (key < num_keys)[None, :]
    tl.store(out + query[:, None] * num_keys + key[None, :], total, mask=ok)


def index_scores(q: Tensor, keys: Tensor, block_table: Tensor | None = None, shares: Tensor | None = None) -> Tensor:
    """`sparse.index_scores`; keys may be parts of longer rows, and shares may have 16 bits."""
    count, heads, dim = q.shape
    per_page = 0 if block_table is None else keys.shape[1]
    table = keys if block_table is None else block_table
    num_keys = keys.shape[0] if block_table is None else block_table.shape[1] * per_page
    out = empty((count, num_keys), dtype=float32, device=q.device)
    padded, step = power_of_2(heads), min(max(16, power_of_2(dim)), STEP)
    queries = max(1, ROWS // padded)
    if per_page:  # a product has rows of one query
        padded, queries = max(ROWS, padded), 1
    # without bfloat16 or float16 on both sides products are plain multiplications, with more registers
    fast = q.dtype == keys.dtype and card_of(q.device).capability >= 80
    tile = max(16, min(KEYS, (SCORES if fast else SCORES // 4) // (queries * padded)))
    sizes = {"HEADS": heads, "PADDED": padded, "DIM": dim, "STEP": step, "QUERIES": queries, "KEYS": tile}
    grid = -(-num_keys // tile), -(-count // queries)
    given = out if shares is None else shares.contiguous()
    stride = keys.stride(-2)
    if keys.stride(-1) != 1 or per_page and keys.stride(0) != per_page * stride:
        keys, stride = keys.contiguous(), dim
    tensors = q.contiguous(), keys, table, given, out, count, num_keys, table.stride(0)
    launch(
        _score_keys,
        grid,
        *tensors,
        num_warps=4 if fast else 8,
        **sizes,
        PER_PAGE=per_page,
        KEY_STRIDE=stride,
        SHARES=shares is not None,
        INTERPRET=interpreting(),
    )
    return out


@triton.jit
def _bits(scores, block, whole):
    """Integers that compare like the scores."""
    score = tl.load(scores + block, mask=block < whole, other=0.0)
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _next_digit(
    scores, whole, least, missing, SHIFT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Append the WIDTH bits above SHIFT to `least`, the first bits of the score of rank `missing` among those with the
    same first bits; its rank among those that agree in the new bits, too.
    """
    place = tl.arange(0, 2048)
    counts = tl.zeros([2048], tl.int32)
    for start in range(0, whole, TILE):
        block = start + tl.arange(0, TILE)
        bits, alike = _bits(scores, block, whole), block < whole
        if SHIFT + WIDTH < 32:
            alike &= (bits >> (SHIFT + WIDTH)) == least
            digit = (bits >> SHIFT) & ((1 << WIDTH) - 1)
        else:
            digit = (bits >> SHIFT) + (1 << (WIDTH - 1))
        counts += tl.histogram(digit, 2048, alike)
    at_least = tl.cumsum(counts, 0, reverse=True)
    last = tl.sum((at_least >= missing).to(tl.int32), 0) - 1
    missing -= tl.sum(tl.where(place == last + 1, at_least, 0), 0)
    if SHIFT + WIDTH < 32:
        least = (least << WIDTH) | last
    else:
        least = last - (1 << (WIDTH - 1))
    return least, missing


@triton.jit(do_not_specialize=["num_blocks", "table_stride"])
def _choose(
    scores, block_table, seq_lens, chosen, lens, num_blocks, table_stride,
    RATIO: tl.constexpr, TOP: tl.constexpr, PADDED: tl.constexpr, PER_PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The blocks that one query sees, once per KV head."""
    query = tl.program_id(0).to(tl.int64)
    scores += query * num_blocks
    block_table += query * table_stride
    chosen += query * KV_HEADS * (TOP + 1)
    length = tl.load(seq_lens + query)
    whole, rest = length // RATIO, length % RATIO
    # the least score that is chosen, and how many blocks with it
    least, missing = whole * 0 - 1 - 0x7FFFFFFF, whole * 0 + TOP
    if whole > TOP:
        least, missing = _next_digit(scores, whole, least, missing, 21, 11, TILE)
        least, missing = _next_digit(scores, whole, least, missing, 10, 11, TILE)
        least, missing = _next_digit(scores, whole, least, missing, 0, 10, TILE)
    taken, num_equal = whole * 0, whole * 0
    for start in range(0, whole, TILE):
        block = start + tl.arange(0, TILE)
        bits = _bits(scores, block, whole)
        equal = (bits == least) & (block < whole)
        rank = num_equal + tl.cumsum(equal.to(tl.int32), 0)
        take = (block < whole) & ((bits > least) | (equal & (rank <= missing)))
        place = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        page = tl.load(block_table + block // PER_PAGE, mask=take, other=0)
        for head in tl.static_range(KV_HEADS):
            value = (page * KV_HEADS + head) * PER_PAGE + block % PER_PAGE
            tl.store(chosen + head * (TOP + 1) + place, value, mask=take)
        num_equal += tl.sum(equal.to(tl.int32), 0)
        taken += tl.sum(take.to(tl.int32), 0)
    place = tl.arange(0, PADDED)
    page = tl.load(block_table + whole // PER_PAGE, mask=rest > 0, other=0)
    for head in tl.static_range(KV_HEADS):
        last = tl.where(rest > 0, (page * KV_HEADS + head) * PER_PAGE + whole % PER_PAGE, -1)
        value = tl.where(place == taken, last, -1)
        tl.store(chosen + head * (TOP + 1) + place, value, mask=(place >= taken) & (place <= TOP))
        tl.store(lens + query * KV_HEADS + head, taken * RATIO + rest)


def choose_blocks(
    scores: Tensor, block_table: Tensor, seq_lens: Tensor, ratio: int, top: int, per_page: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """`sparse.choose_blocks` in one launch; keeps the scores."""
    count, blocks = scores.shape
    chosen = empty((count * kv_heads, top + 1), dtype=int32, device=scores.device)
    lens = empty(count * kv_heads, dtype=int32, device=scores.device)
    sizes: dict[str, Any] = {"RATIO": ratio, "TOP": top, "PADDED": power_of_2(top + 1)}
    sizes |= {"PER_PAGE": per_page, "KV_HEADS": kv_heads, "TILE": CHOICE}
    tensors = scores, block_table, seq_lens, chosen, lens, blocks, block_table.stride(0)
    launch(_choose, (count,), *tensors, num_warps=8, **sizes)
    return chosen, lens
