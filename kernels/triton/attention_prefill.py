"""Paged attention for prefill: many queries of a sequence attend to all cached keys, including their own.

A program computes a tile of queries of one sequence. Its rows are (token, head) for all query heads of one KV head, and
it iterates from the first key that any row attends to, to the last. Fully visible key tiles run without masks; tiles at
the diagonal, and all tiles with a window, are masked. Rows are independent and key tiles start at multiples of their
size, so a token's result does not depend on how its prompt was chunked.

8-bit pages are widened once per tile; below sm_90 each warp widens K itself, hidden behind products of half the speed.
With many queries per step, `widen` instead converts E4M3 keys and values once for all of them, a few KV heads at a
time. Without it, 2,048 tokens after 2,048 cached ones of an 8B model took 622 us with E4M3 pages on an H100, and 280 us
with bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_decode import exponents, oldest_key, score_scale
from .e4m3 import widen_e4m3, widen_pairs
from .hadamard import rotate_halves
from .launch import wait_for_previous
from .sequences import sequence_of


@triton.jit
def _load(pages, slot, d, inside, WIDTH: tl.constexpr, FULL: tl.constexpr, MASKED: tl.constexpr):
    """Load dimensions d of the slots, [slot, d] or [d, slot] depending on their shapes; zeros outside."""
    at = pages + slot * WIDTH + d
    if MASKED:
        return tl.load(at, mask=inside & (d < WIDTH), other=0)
    if FULL:
        return tl.load(at)
    return tl.load(at, mask=d < WIDTH, other=0)


@triton.jit
def _attend(
    q_even, q_odd, acc, acc_odd, top, norm, k, v, k_scales, v_scales, table, head, heads, position, scale, softcap,
    window, begin, end, oldest, length,
    DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    SCALES: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Accumulate keys [begin, end) (online softmax). Keys outside [oldest, length) are masked for the whole tile."""
    EIGHT: tl.constexpr = (FORMAT == "int8") | (FORMAT == "fp8")
    WIDTH: tl.constexpr = DIM // 2 if EIGHT else DIM
    LATE: tl.constexpr = (SCALES != "token") & (not HAS_SOFTCAP)
    operand: tl.constexpr = q_even.dtype
    n = tl.arange(0, KEYS)
    d = tl.arange(0, HALF)
    page = tl.load(table + (begin + n) // PAGE, mask=begin + n < end, other=0)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = start + n
        slot = (page.to(tl.int64) * heads + head) * PAGE + key % PAGE
        inside = (key >= oldest) & (key < length)
        if EIGHT:  # loaded transposed: the transposition goes through shared memory, so codes are widened only once
            k_tile = _load(k, slot[:, None], d[None, :], inside[:, None], WIDTH, HALF == WIDTH, MASKED)
            v_tile = _load(v, slot[None, :], d[:, None], inside[None, :], WIDTH, HALF == WIDTH, MASKED)
        else:
            k_tile = _load(k, slot[None, :], d[:, None], inside[None, :], WIDTH, HALF == WIDTH, MASKED)
            v_tile = _load(v, slot[:, None], d[None, :], inside[:, None], WIDTH, HALF == WIDTH, MASKED)
        if SCALES == "token":
            k_scale = tl.load(k_scales + slot, mask=inside, other=0.0)
            if EIGHT:
                v_scale = tl.load(v_scales + slot, mask=inside, other=1.0)
        page = tl.load(table + (key + KEYS) // PAGE, mask=key + KEYS < end, other=0)

        if EIGHT:
            k_even, k_odd = widen_pairs(k_tile, FORMAT, operand, PTX)
            scores = tl.dot(q_even, tl.trans(k_even))
            scores = tl.dot(q_odd, tl.trans(k_odd), scores)
        else:
            scores = tl.dot(q_even, k_tile.to(operand), input_precision="ieee")
        if SCALES == "token":
            scores = exponents(scores * (k_scale * scale)[None, :], softcap, HAS_SOFTCAP)
        elif HAS_SOFTCAP:
            scores = exponents(scores * scale, softcap, HAS_SOFTCAP)
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen &= key[None, :] >= oldest_key(position + 1, window, CHUNKED)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        if LATE:  # scale inside the exponent, one FMA per element; the scale is positive, so the maximum is the same
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores * scale - base[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        top = new_top
        norm = norm * shrink + tl.sum(weights, 1)
        weights = weights.to(operand)
        if EIGHT:
            v_even, v_odd = widen_pairs(v_tile, FORMAT, operand, PTX)
            if SCALES == "token":  # apply the scale in float16, the type of the widened codes
                if FORMAT == "int8":
                    v_even, v_odd = v_even * 0.0078125, v_odd * 0.0078125
                v_scale = (v_scale * (128.0 if FORMAT == "int8" else 256.0)).to(operand)
                v_even, v_odd = v_even * v_scale[None, :], v_odd * v_scale[None, :]
            acc = tl.dot(weights, tl.trans(v_even), acc * shrink[:, None])
            acc_odd = tl.dot(weights, tl.trans(v_odd), acc_odd * shrink[:, None])
        else:
            acc = tl.dot(weights, v_tile.to(operand), acc * shrink[:, None], input_precision="ieee")
    return acc, acc_odd, top, norm


@triton.jit(do_not_specialize=["first_head"])
def widen(
    k, v, k_scales, v_scales, block_table, k_out, v_out, scales_out, first_head,
    DIM: tl.constexpr, HALF: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, SCALES: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convert E4M3 pages in a block table to float16 [places, heads, PAGE, DIM], for heads from first_head on.

    Keys are not scaled, their scales are copied to scales_out; values are multiplied by per-token scales.
    """
    place, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    page = tl.load(block_table + place).to(tl.int64)
    wait_for_previous(PDL)
    if page < 0:
        return
    row = tl.arange(0, PAGE)
    d = tl.arange(0, HALF)[None, :]
    slot = (page * KV_HEADS + first_head + head) * PAGE + row
    target = (place * heads + head) * PAGE + row
    source = slot[:, None] * (DIM // 2) + d
    inside = d < DIM // 2
    k_even, k_odd = widen_e4m3(tl.load(k + source, mask=inside, other=0), tl.float16, PTX)
    v_even, v_odd = widen_e4m3(tl.load(v + source, mask=inside, other=0), tl.float16, PTX)
    wide = tl.join(v_even, v_odd)
    if SCALES == "token":
        tl.store(scales_out + target, tl.load(k_scales + slot))
        wide *= (tl.load(v_scales + slot) * 256.0).to(tl.float16)[:, None, None]
    else:
        wide *= 256.0
    both = tl.arange(0, 2 * HALF)[None, :]
    at = target[:, None] * DIM + both
    tl.store(k_out + at, tl.reshape(tl.join(k_even, k_odd) * 256.0, (PAGE, 2 * HALF)), mask=both < DIM)
    tl.store(v_out + at, tl.reshape(wide, (PAGE, 2 * HALF)), mask=both < DIM)


@triton.jit(do_not_specialize=["window", "table_width", "num_seqs", "first_head", "heads"])
def prefill(
    q, k, v, k_scales, v_scales, sinks, block_table, cu_query_lens, seq_lens, out,
    scale, softcap, window, table_width, num_seqs, first_head, heads,
    DIM: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
    FORMAT: tl.constexpr, SCALES: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STEPS: tl.constexpr, SINGLES: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr, PTX: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries of one sequence for one KV head; the pages hold `heads` heads from first_head on.

    SINGLES  also process sequences with a single query
    STRIDE   elements from one query head to the next
    """
    EIGHT: tl.constexpr = (FORMAT == "int8") | (FORMAT == "fp8")
    STEP: tl.constexpr = 2 if EIGHT else 1
    WIDTH: tl.constexpr = DIM // STEP
    SIXTEEN: tl.constexpr = tl.bfloat16 if FORMAT == "bf16" else tl.float16
    operand: tl.constexpr = tl.float32 if INTERPRET or FORMAT == "f32" else SIXTEEN
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0)
    q_head = first_head + head
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the last tiles of a prompt have the most keys: start with them
    wait_for_previous(PDL)
    seq = sequence_of(tile, cu_query_lens, num_seqs, TOKENS, STEPS)
    first = tl.load(cu_query_lens + seq)
    num_queries = tl.load(cu_query_lens + seq + 1) - first
    lead = (tile - (first // TOKENS + seq)) * TOKENS
    if lead >= num_queries:
        return
    if not SINGLES:
        if num_queries == 1:
            return
    length = tl.load(seq_lens + seq)
    start = length - num_queries + lead
    row = tl.arange(0, ROWS)
    token = row // GROUP
    real = (token < TOKENS) & (lead + token < num_queries)
    position = start + tl.minimum(token, TOKENS - 1)
    end = tl.minimum(start + TOKENS, length)
    d = tl.arange(0, HALF)
    at = ((first + lead + token).to(tl.int64) * KV_HEADS + q_head) * GROUP + row % GROUP
    q_at = at[:, None] * STRIDE + d[None, :] * STEP
    at = at[:, None] * DIM + d[None, :] * STEP
    ok = real[:, None] & (d[None, :] < WIDTH)
    q_even = tl.load(q + q_at, mask=ok, other=0.0).to(tl.float32)
    q_odd = q_even
    acc = tl.zeros([ROWS, HALF], tl.float32)
    acc_odd = acc
    if EIGHT:
        q_odd = tl.load(q + q_at + 1, mask=ok, other=0.0).to(tl.float32)
        if FORMAT == "int8":
            q_even, q_odd = rotate_halves(q_even, q_odd, RUN, 1)
    q_even, q_odd = q_even.to(operand), q_odd.to(operand)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    scale = score_scale(scale, k_scales, SCALES, FORMAT, HAS_SOFTCAP)
    table = block_table + seq.to(tl.int64) * table_width
    oldest = 0
    if HAS_WINDOW:
        oldest = oldest_key(start + 1, window, CHUNKED)
        plain_end = oldest // KEYS * KEYS
    else:
        plain_end = (start + 1) // KEYS * KEYS
        acc, acc_odd, top, norm = _attend(
            q_even, q_odd, acc, acc_odd, top, norm, k, v, k_scales, v_scales, table, head, heads, position, scale,
            softcap, window, 0, plain_end, oldest, length, DIM, HALF, PAGE, FORMAT, SCALES, KEYS, HAS_WINDOW,
            CHUNKED, HAS_SOFTCAP, False, STAGES, PTX,
        )  # fmt: skip
    acc, acc_odd, top, norm = _attend(
        q_even, q_odd, acc, acc_odd, top, norm, k, v, k_scales, v_scales, table, head, heads, position, scale,
        softcap, window, plain_end, end, oldest, end, DIM, HALF, PAGE, FORMAT, SCALES, KEYS, HAS_WINDOW,
        CHUNKED, HAS_SOFTCAP, True, STAGES, PTX,
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + q_head * GROUP + row % GROUP).to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        norm = norm * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        acc *= tl.exp2(top - new_top)[:, None]
        if EIGHT:
            acc_odd *= tl.exp2(top - new_top)[:, None]
    factor = 1.0 / norm
    if SCALES == "layer":
        factor *= tl.load(v_scales)
        if FORMAT == "fp8":
            factor *= 256.0
    tl.store(out + at, (acc * factor[:, None]).to(out.dtype.element_ty), mask=ok)
    if EIGHT:
        tl.store(out + at + 1, (acc_odd * factor[:, None]).to(out.dtype.element_ty), mask=ok)
