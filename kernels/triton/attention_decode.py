"""Paged attention for decode: split-KV attention of single queries (flash decoding).

The splits of a sequence run in parallel; the last program of a KV head to finish merges them, or a separate kernel.
A program computes the splits of one sequence and KV head: just one, if all programs fit on the GPU. Keys are the rows
of its matrix products, the query heads of the KV head the 8 or 16 columns: S = K Qᵀ and O = Vᵀ P. So no rows of the
matrix instructions are wasted, the warps share the keys, and the accumulator is [head_dim, heads]. Tiles of 64 keys are
loaded with asynchronous copies, two in flight; the block table is read one tile ahead. 8-bit pages are read as pairs of
codes (`e4m3.py`).

Splits depend only on the sequence's own length (`_split_tokens`), tiles start at multiples of their size, and splits
are merged in order, so a token's result does not depend on its batch, and with `by_token` not on chunking either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .e4m3 import widen_e4m3_natively, widen_pairs
from .hadamard import rotate_halves
from .launch import wait_for_previous
from .sequences import query_of


@triton.jit
def score_scale(scale, k_scales, SCALES: tl.constexpr, FORMAT: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """The factor of q · k with k as widened (`e4m3.py`), except scales per token; without a soft-cap with log2(e)."""
    if SCALES == "layer":
        scale *= tl.load(k_scales)
    if FORMAT == "fp8":
        scale *= 256.0
    if not HAS_SOFTCAP:
        scale *= 1.4426950408889634
    return scale


@triton.jit
def exponents(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores -> base-2 exponents for the softmax; without a soft-cap the scale already includes log2(e)."""
    if HAS_SOFTCAP:
        power = tl.minimum(scores * (2.885390081777927 / softcap), 126.0)
        scores = (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(power) + 1.0))
    return scores


@triton.jit
def oldest_key(length, window, CHUNKED: tl.constexpr):
    """The first of `length` keys (up to its own) that a query attends to with a window."""
    if CHUNKED:
        oldest = tl.maximum(length - 1, 0) // window * window
    else:
        oldest = tl.maximum(length - window, 0)
    return oldest


@triton.jit
def _split_tokens(seen, FIRST: tl.constexpr, SPLITS: tl.constexpr):
    """Keys per split for `seen` keys: FIRST as long as SPLITS splits suffice, then a multiple of it."""
    return FIRST * tl.maximum((seen + FIRST * SPLITS - 1) // (FIRST * SPLITS), 1)


@triton.jit(do_not_specialize=["window", "table_width", "num_seqs", "first_token", "num_places"])
def decode_split(
    q, k, v, k_scales, v_scales, block_table, cu_query_lens, seq_lens, part_sum, part_norm, sinks, counter, out,
    scale, softcap, window, table_width, num_seqs, first_token, num_places,
    DIM: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, RUN: tl.constexpr, KEYS: tl.constexpr,
    FIRST: tl.constexpr, SPLITS: tl.constexpr, BY_TOKEN: tl.constexpr, STEPS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr, PTX: tl.constexpr, HAS_SINKS: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr,
    PLACES: tl.constexpr, AT_ONCE: tl.constexpr, MERGES: tl.constexpr, LATE: tl.constexpr, STRIDE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute every num_programs(0)-th split of one query's keys for one KV head.

    Writes the unnormalized weighted sum of values and (maximum, norm) per split; the grid does not affect the results.

    MERGES  the last program of a (query, KV head) to finish merges its splits; `counter` is 0 before and after
    LATE    let the next kernel start (PDL) after the splits instead of at the beginning
    STRIDE  elements from one query head to the next
    NATIVE  widen E4M3 codes with `widen_e4m3_natively`, without a factor of 256
    """
    head = tl.program_id(1)
    row = tl.program_id(2)
    if PDL and not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    if (
        PDL and PAGE < 16
    ):  # the op before wrote cu_query_lens of blocks as pages, and no trigger says that it is visible
        tl.extra.cuda.gdc_wait()
    token, seq, length = query_of(row, cu_query_lens, seq_lens, num_seqs, first_token, BY_TOKEN, STEPS)
    oldest = 0
    if HAS_WINDOW:
        oldest = oldest_key(length, window, CHUNKED)
    size = _split_tokens(length - oldest, FIRST, SPLITS)
    count = (length + size - 1) // size - oldest // size
    n = tl.arange(0, KEYS)
    table = block_table + seq.to(tl.int64) * table_width
    begin = (oldest // size + tl.program_id(0)) * size
    if HAS_WINDOW:
        begin = tl.maximum(begin, oldest // KEYS * KEYS)
    page = tl.load(table + (begin + n) // PAGE, mask=begin + n < length, other=0)
    if PDL:  # even without splits to compute: the next kernel relies on this one having waited for its predecessor
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, COLUMNS)
    d = tl.arange(0, HALF)
    EIGHT: tl.constexpr = (FORMAT == "int8") | (FORMAT == "fp8")
    STEP: tl.constexpr = 2 if EIGHT else 1
    WIDTH: tl.constexpr = DIM // STEP
    SIXTEEN: tl.constexpr = tl.bfloat16 if FORMAT == "bf16" else tl.float16
    operand: tl.constexpr = tl.float32 if INTERPRET or FORMAT == "f32" else SIXTEEN
    q_row = q + (token.to(tl.int64) * KV_HEADS + head) * (GROUP * STRIDE)
    q_at = q_row + column[None, :] * STRIDE + d[:, None] * STEP
    q_ok = (column[None, :] < GROUP) & (d[:, None] < WIDTH)
    q_even = tl.load(q_at, mask=q_ok, other=0.0).to(tl.float32)
    if EIGHT:
        q_odd = tl.load(q_at + 1, mask=q_ok, other=0.0).to(tl.float32)
        if FORMAT == "int8":
            q_even, q_odd = rotate_halves(q_even, q_odd, RUN, 0)
        q_odd = q_odd.to(operand)
    q_even = q_even.to(operand)
    WIDENED: tl.constexpr = "f16" if NATIVE else FORMAT
    scale = score_scale(scale, k_scales, SCALES, WIDENED, HAS_SOFTCAP)
    for place in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
        begin = (oldest // size + place) * size
        end = tl.minimum(begin + size, length)
        if HAS_WINDOW:
            begin = tl.maximum(begin, oldest // KEYS * KEYS)
        acc = tl.zeros([HALF, COLUMNS], tl.float32)
        if EIGHT:
            acc_odd = tl.zeros([HALF, COLUMNS], tl.float32)
        top = tl.full([COLUMNS], float("-inf"), tl.float32)
        norm = tl.zeros([KEYS, COLUMNS], tl.float32)
        for start in tl.range(begin, end, KEYS, num_stages=STAGES):
            key = start + n
            seen = key < end
            if HAS_WINDOW:
                seen &= key >= oldest
            slot = (page.to(tl.int64) * KV_HEADS + head) * PAGE + key % PAGE
            at = slot * WIDTH
            if WIDTH == HALF:
                k_tile = tl.load(k + at[:, None] + d[None, :], mask=seen[:, None], other=0)
                v_tile = tl.load(v + at[None, :] + d[:, None], mask=seen[None, :], other=0)
            else:
                k_tile = tl.load(k + at[:, None] + d[None, :], mask=seen[:, None] & (d[None, :] < WIDTH), other=0)
                v_tile = tl.load(v + at[None, :] + d[:, None], mask=seen[None, :] & (d[:, None] < WIDTH), other=0)
            if SCALES == "token":
                k_scale = tl.load(k_scales + slot, mask=seen, other=0.0)
                v_scale = tl.load(v_scales + slot, mask=seen, other=1.0)
            page = tl.load(table + (key + KEYS) // PAGE, mask=key + KEYS < end, other=0)

            if EIGHT:
                if NATIVE:
                    k_even, k_odd = widen_e4m3_natively(k_tile)
                else:
                    k_even, k_odd = widen_pairs(k_tile, FORMAT, operand, PTX)
                scores = tl.dot(k_even, q_even)
                scores = tl.dot(k_odd, q_odd, scores)
            else:
                scores = tl.dot(k_tile.to(operand), q_even, input_precision="ieee")
            if SCALES == "token":
                scores *= (k_scale * scale)[:, None]
            else:
                scores *= scale
            scores = exponents(scores, softcap, HAS_SOFTCAP)
            if SCALES == "token":  # fold the value's scale into its softmax weight, so that it stays in float16 range
                v_scale = tl.where(v_scale < 1e-30, 1e-30, v_scale)
                spread = tl.log2(v_scale)
                scores += spread[:, None]
            scores = tl.where(seen[:, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 0))
            weights = tl.exp2(scores - new_top[None, :])
            shrink = tl.exp2(top - new_top)[None, :]
            top = new_top
            if SCALES == "token":
                norm = norm * shrink + weights * tl.exp2(-spread)[:, None]
            else:
                norm = norm * shrink + weights
            weights = weights.to(operand)
            if EIGHT:
                if NATIVE:
                    v_even, v_odd = widen_e4m3_natively(v_tile)
                else:
                    v_even, v_odd = widen_pairs(v_tile, FORMAT, operand, PTX)
                acc = tl.dot(v_even, weights, acc * shrink)
                acc_odd = tl.dot(v_odd, weights, acc_odd * shrink)
            else:
                acc = tl.dot(v_tile.to(operand), weights, acc * shrink, input_precision="ieee")

        total = tl.sum(norm, 0)
        part = (row.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + column) * num_places + place
        ok = column < GROUP
        tl.store(part_norm + part * 2, top, mask=ok)
        tl.store(part_norm + part * 2 + 1, total, mask=ok)
        if NATIVE:  # `_merge` multiplies by 256
            acc *= 0.00390625
            acc_odd *= 0.00390625
        sums = part_sum + part[None, :] * DIM + d[:, None] * STEP
        ok = ok[None, :] & (d[:, None] < WIDTH)
        tl.store(sums, acc, mask=ok)
        if EIGHT:
            tl.store(sums + 1, acc_odd, mask=ok)
        begin = (oldest // size + place + tl.num_programs(0)) * size
        page = tl.load(table + (begin + n) // PAGE, mask=begin + n < length, other=0)

    if PDL and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    if MERGES:
        single = True
        if not BY_TOKEN:
            single = tl.load(cu_query_lens + seq + 1) - token == 1
        if single:
            tl.debug_barrier()
            spot = counter + row * KV_HEADS + head
            if tl.atomic_add(spot, 1, sem="acq_rel") == tl.num_programs(0) - 1:
                tl.store(spot, 0)
                first = row.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP
                _merge(
                    part_sum, part_norm, first, count, num_places, sinks + head * GROUP, v_scales,
                    out + (token.to(tl.int64) * KV_HEADS + head) * (GROUP * DIM),
                    DIM, PADDED, GROUP, HEADS, PLACES, AT_ONCE, FORMAT, SCALES, HAS_SINKS,
                )  # fmt: skip


@triton.jit
def _merge(
    part_sum, part_norm, first, count, num_places, sinks, v_scales, out,
    DIM: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, PLACES: tl.constexpr,
    AT_ONCE: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge `count` splits of GROUP query heads from `first` on, in order, and store the results."""
    head = tl.arange(0, HEADS)
    real = (head < GROUP)[:, None]
    place = tl.arange(0, PLACES)
    part = (first + head)[:, None] * num_places + place[None, :]
    there = real & (place < count)[None, :]
    # .cg bypasses L1, which does not see writes of other programs
    tops = tl.load(part_norm + part * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    norms = tl.load(part_norm + part * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 1)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=head < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    norm = tl.sum(norms * tl.exp2(tops - top[:, None]), 1)
    if HAS_SINKS:
        norm += tl.exp2(sink - top)
    d = tl.arange(0, PADDED)
    acc = tl.zeros([HEADS, PADDED], tl.float32)
    for start in range(0, count, AT_ONCE):
        some = start + tl.arange(0, AT_ONCE)
        given = (first + head)[:, None] * num_places + some[None, :]
        inside = real & (some < count)[None, :]
        weights = tl.load(part_norm + given * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
        weights = tl.exp2(weights - top[:, None])
        at = part_sum + given[:, :, None] * DIM + d[None, None, :]
        tile = tl.load(at, mask=inside[:, :, None] & (d < DIM)[None, None, :], other=0.0, cache_modifier=".cg")
        acc += tl.sum(tile * weights[:, :, None], 1)
    factor = 1.0 / tl.where(norm == 0.0, 1.0, norm)
    if FORMAT == "fp8":
        factor *= 256.0
    if SCALES == "layer":
        factor *= tl.load(v_scales)
    result = (acc * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + head[:, None] * DIM + d[None, :], result, mask=real & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["window", "num_places", "num_seqs", "first_token"])
def merge_splits(
    part_sum, part_norm, sinks, v_scales, out, cu_query_lens, seq_lens, window, num_places, num_seqs, first_token,
    DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, PLACES: tl.constexpr, AT_ONCE: tl.constexpr,
    FORMAT: tl.constexpr, SCALES: tl.constexpr, FIRST: tl.constexpr, SPLITS: tl.constexpr, BY_TOKEN: tl.constexpr,
    STEPS: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query head in order; a query without keys gets zeros.

    COUNTED  `cu_query_lens` or `seq_lens` come from this kernel's predecessors and must not be read before they end
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    if COUNTED:
        wait_for_previous(PDL)
    token, seq, length = query_of(row, cu_query_lens, seq_lens, num_seqs, first_token, BY_TOKEN, STEPS)
    if not BY_TOKEN:
        if tl.load(cu_query_lens + seq + 1) - token != 1:
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
    oldest = 0
    if HAS_WINDOW:
        oldest = oldest_key(length, window, CHUNKED)
    size = _split_tokens(length - oldest, FIRST, SPLITS)
    count = tl.maximum((length + size - 1) // size - oldest // size, 0)
    if not COUNTED:
        wait_for_previous(PDL)
    _merge(
        part_sum, part_norm, row.to(tl.int64) * HEADS + head, count, num_places, sinks + head, v_scales,
        out + (token.to(tl.int64) * HEADS + head) * DIM,
        DIM, PADDED, 1, 1, PLACES, AT_ONCE, FORMAT, SCALES, HAS_SINKS,
    )  # fmt: skip
