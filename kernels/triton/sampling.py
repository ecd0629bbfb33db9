"""On-device sampling of one token per row of logits; `kernels/sampling.py` is the reference and defines the algorithm.

    prepare   mask, penalties, bias, temperature -> scaled logits; maximum and sum of exponentials per piece
    narrow    (with cuts) histograms of token counts and masses by distance from the maximum: 2 passes for top-k, 2 for
              top-p
    choose    best kept token of each piece
    finish    best token of the row, its log-probability, history update

A piece is 4,096 tokens: a row of 151,936 takes 38 programs per launch. Count and mass are integers packed into one
int64 and added atomically, so sums and results do not depend on the order. Rows without cuts return from `narrow`
immediately. No host synchronization; all buffer sizes follow from shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling import COLDEST, IN_PROMPT, LEVEL, MASS, MAX_BIAS, STEPS, Sampled, SamplingInputs
from .launch import launch, power_of_2, wait_for_previous

PIECE = 4096
STATS = 4  # per piece: maximum and sum of exponentials of the scaled logits, then of the raw ones
TABLES = 4  # histograms: two levels for top-k, two for top-p
_COLDEST = tl.constexpr(COLDEST)
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_LEVEL = tl.constexpr(LEVEL)
_LEVEL_BITS = tl.constexpr(LEVEL.bit_length() - 1)
_MASS = tl.constexpr(float(MASS))
_MASS_BITS = tl.constexpr(40)
_ONE = tl.constexpr(1 << 40)  # count of one token in packed sums; the low 40 bits hold the mass
_STEPS = tl.constexpr(float(STEPS))


@triton.jit
def _piece_stats(x):
    """(maximum, sum of exp(x - maximum)) of float32 x; NaN and inf make the sum NaN."""
    top = tl.max(x, 0)
    return top, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)


@triton.jit
def _row_stats(stats, row, num_pieces, PIECES: tl.constexpr):
    """Combine the pieces' statistics: (maximum, sum of exp(x - maximum)) of a row."""
    piece = tl.arange(0, PIECES)
    at = stats + (row * num_pieces + piece) * 4
    tops = tl.load(at, mask=piece < num_pieces, other=float("-inf"))
    sums = tl.load(at + 1, mask=piece < num_pieces, other=0.0)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(sums * tl.exp(tops - base), 0)


@triton.jit
def _prepare(
    logits, numbers, integers, bias_ids, bias_values, masks, history, scaled, stats, tables,
    vocab, logits_stride, num_words,
    PIECE: tl.constexpr, MAX_BIAS: tl.constexpr, TABLES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_pieces = tl.num_programs(0)
    wait_for_previous(PDL)
    token = piece * PIECE + tl.arange(0, PIECE)
    ok = token < vocab
    raw = tl.load(logits + row * logits_stride + token, mask=ok, other=float("-inf"))
    top, total = _piece_stats(raw)
    at = stats + (row * num_pieces + piece) * 4
    tl.store(at + 2, top)
    tl.store(at + 3, total)

    x = raw
    mask = tl.load(integers + row * 6 + 5)
    if mask >= 0:
        words = tl.load(masks + mask * num_words + token // 32, mask=ok, other=0)
        x = tl.where(((words >> (token % 32)) & 1) != 0, x, float("-inf"))
    slot = tl.load(integers + row * 6 + 3)
    if slot >= 0:
        seen = tl.load(history + slot * vocab + token, mask=ok, other=0)
        repetition = tl.load(numbers + row * 6 + 3)
        presence, frequency = tl.load(numbers + row * 6 + 4), tl.load(numbers + row * 6 + 5)
        x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
        times = seen & (_IN_PROMPT - 1)
        x = tl.where(times > 0, x - (presence + frequency * times.to(tl.float32)), x)
    for entry in range(tl.load(integers + row * 6 + 4).to(tl.int32)):
        biased = tl.load(bias_ids + row * MAX_BIAS + entry)
        value = tl.load(bias_values + row * MAX_BIAS + entry)
        x = tl.where(token == biased, x + value, x)
    temperature = tl.load(numbers + row * 6)
    x = x / tl.where(temperature < _COLDEST, 1.0, temperature)
    tl.store(scaled + row * vocab + token, x, mask=ok)
    top, total = _piece_stats(x)
    tl.store(at, top)
    tl.store(at + 1, total)
    for table in range(piece, TABLES, num_pieces):
        level = tl.arange(0, _LEVEL)
        tl.store(tables + (row * TABLES + table) * _LEVEL + level, tl.zeros([_LEVEL], tl.int64))


@triton.jit
def _measures(packed, BY_MASS: tl.constexpr):
    """Extract the mass or the token count from packed sums."""
    if BY_MASS:
        return packed & (_ONE - 1)
    return packed >> _MASS_BITS


@triton.jit
def _first_reaching(table, before, target, BY_MASS: tl.constexpr):
    """(first bin where the running sum reaches target, packed sum of the bins before it)."""
    bins = tl.arange(0, _LEVEL)
    sums = tl.cumsum(tl.load(table + bins), 0) + before
    short = _measures(sums, BY_MASS) < target
    at = tl.minimum(tl.sum(short.to(tl.int32), 0), _LEVEL - 1)
    return at, tl.maximum(tl.max(tl.where(bins < at, sums, 0), 0), before)


@triton.jit
def _top_k_cut(tables, row, top_k, TABLES: tl.constexpr):
    """The largest step (distance from the maximum) that top-k keeps."""
    first = tables + row * TABLES * _LEVEL
    high, below = _first_reaching(first, 0, top_k, False)
    low, _ = _first_reaching(first + _LEVEL, below, top_k, False)
    return high * _LEVEL + low


@triton.jit
def _top_p_target(tables, row, top_p, TABLES: tl.constexpr):
    """The mass that top-p must reach: top_p times the mass that top-k kept, or the whole mass."""
    first = tables + (row * TABLES + 2) * _LEVEL
    whole = tl.sum(tl.load(first + tl.arange(0, _LEVEL)), 0)
    return tl.maximum((top_p.to(tl.float64) * _measures(whole, True).to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _step_of(x, top):
    """Distance below the largest logit in steps, clamped to the last step (also for -inf)."""
    return (tl.minimum(top - x, 31.99) * _STEPS).to(tl.int32)


@triton.jit
def _narrow(
    scaled, stats, numbers, integers, tables, vocab,
    PIECE: tl.constexpr, PIECES: tl.constexpr, TABLES: tl.constexpr, PASS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fill table PASS: 0 and 1 are the two levels of top-k, 2 and 3 those of top-p over the tokens top-k keeps."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_previous(PDL)
    top_k = tl.load(integers + row * 6)
    top_p = tl.load(numbers + row * 6 + 1)
    has_k = (top_k > 0) & (top_k < vocab)
    greedy = tl.load(numbers + row * 6) < _COLDEST
    if PASS < 2:
        idle = greedy | (has_k == 0)
    else:
        idle = greedy | (top_p >= 1.0)
    if idle:
        return
    top, total = _row_stats(stats, row, tl.num_programs(0), PIECES)
    if top == float("-inf"):
        return
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(scaled + row * vocab + token, mask=token < vocab, other=float("-inf"))
    step = _step_of(x, top)
    share = tl.exp(x - top) / total
    packed = (share * _MASS).to(tl.int64) + _ONE
    counted = (x > float("-inf")) & (token < vocab)
    if PASS >= 2:
        if has_k:
            cut = _top_k_cut(tables, row, top_k, TABLES)
            counted = counted & (step <= cut)
    place = step >> _LEVEL_BITS
    if PASS == 1:
        high, _ = _first_reaching(tables + row * TABLES * _LEVEL, 0, top_k, False)
        counted = counted & (place == high)
        place = step & (_LEVEL - 1)
    if PASS == 3:
        table = tables + (row * TABLES + 2) * _LEVEL
        target = _top_p_target(tables, row, top_p, TABLES)
        high, _ = _first_reaching(table, 0, target, True)
        counted = counted & (place == high)
        place = step & (_LEVEL - 1)
    tl.atomic_add(tables + (row * TABLES + PASS) * _LEVEL + place, packed, mask=counted, sem="relaxed")


@triton.jit
def _choose(
    scaled, stats, numbers, integers, tables, best_score, best_token, vocab,
    PIECE: tl.constexpr, PIECES: tl.constexpr, TABLES: tl.constexpr, CUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_pieces = tl.num_programs(0)
    wait_for_previous(PDL)
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(scaled + row * vocab + token, mask=token < vocab, other=float("-inf"))
    greedy = tl.load(numbers + row * 6) < _COLDEST
    if greedy:
        score = x
    else:
        top, total = _row_stats(stats, row, num_pieces, PIECES)
        top = tl.where(top == float("-inf"), 0.0, top)
        keep = (tl.exp(x - top) >= tl.load(numbers + row * 6 + 2)) & (x > float("-inf"))
        if CUTS:
            step = _step_of(x, top)
            top_k = tl.load(integers + row * 6)
            has_k = (top_k > 0) & (top_k < vocab)
            if has_k:
                cut = _top_k_cut(tables, row, top_k, TABLES)
                keep = keep & (step <= cut)
            top_p = tl.load(numbers + row * 6 + 1)
            if top_p < 1.0:
                table = tables + (row * TABLES + 2) * _LEVEL
                target = _top_p_target(tables, row, top_p, TABLES)
                high, below = _first_reaching(table, 0, target, True)
                low, _ = _first_reaching(table + _LEVEL, below, target, True)
                keep = keep & (step <= high * _LEVEL + low)
        seed, position = tl.load(integers + row * 6 + 1), tl.load(integers + row * 6 + 2)
        zero = tl.zeros_like(token)
        low_word, high_word = position.to(tl.int32) + zero, (position >> 32).to(tl.int32) + zero
        bits, _, _, _ = tl.philox(seed, token, low_word, high_word, zero)
        u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
        e = tl.where(u < 0.015625, series, -tl.log(tl.maximum(1.0 - u, 2.9802322387695312e-08)))
        score = tl.where(keep, x - tl.log(e), float("-inf"))
    # comparisons with NaN are always false, so argmax over NaN differs between GPU and interpreter and may find no lane
    score = tl.where(score == score, score, float("-inf"))
    tl.store(best_score + row * num_pieces + piece, tl.max(score, 0))
    tl.store(best_token + row * num_pieces + piece, tl.minimum(piece * PIECE + tl.argmax(score, 0), vocab - 1))


@triton.jit
def _finish(
    logits, integers, stats, history, best_score, best_token, token_ids, logprobs, log_sums, status,
    vocab, logits_stride, num_pieces,
    PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    piece = tl.arange(0, PIECES)
    scores = tl.load(best_score + row * num_pieces + piece, mask=piece < num_pieces, other=float("-inf"))
    winner = tl.minimum(tl.argmax(scores, 0), num_pieces - 1)
    token = tl.load(best_token + row * num_pieces + winner).to(tl.int64)
    raw_top, raw_total = _row_stats(stats + 2, row, num_pieces, PIECES)
    top, total = _row_stats(stats, row, num_pieces, PIECES)
    log_sum = raw_top + tl.log(tl.where(raw_total > 0, raw_total, 1.0))
    log_sum = tl.where(raw_total == raw_total, log_sum, raw_total)
    value = tl.load(logits + row * logits_stride + token)
    tl.store(token_ids + row, token)
    tl.store(logprobs + row, value - log_sum)
    tl.store(log_sums + row, log_sum)
    broken = (raw_total != raw_total) | (total != total)
    empty = (top > float("-inf")) == 0  # the maximum is -inf, or NaN if all logits are NaN
    tl.store(status + row, broken.to(tl.int32) + empty.to(tl.int32) * 2)
    slot = tl.load(integers + row * 6 + 3)
    if slot >= 0:
        at = history + slot * vocab + token
        tl.store(at, tl.load(at) + 1)


def sample(logits: Tensor, inputs: SamplingInputs, cuts: bool = True) -> Sampled:
    """`sampling.sample` on the device: logits float32 [rows, vocab], rows may be strided; no synchronization."""
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        raise TypeError(f"logits must be float32 with contiguous rows, not {logits.dtype}, stride {logits.stride(1)}")
    rows, vocab = logits.shape
    pieces = -(-vocab // PIECE)
    if power_of_2(pieces) > PIECE:
        raise ValueError(f"vocabulary of {vocab} tokens; the sampler supports at most {PIECE * PIECE}")

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    scaled, stats = new(rows, vocab), new(rows, pieces, STATS)
    tables = new(rows, TABLES, LEVEL, dtype=torch.int64) if cuts else stats
    scores, tokens = new(rows, pieces), new(rows, pieces, dtype=torch.int32)
    out = Sampled(new(rows, dtype=torch.int64), new(rows), new(rows), new(rows, dtype=torch.int32))
    padded = power_of_2(pieces)
    grid = (pieces, rows)
    numbers, integers, bias_ids, bias_values, masks, history = inputs
    tensors = (logits, numbers, integers, bias_ids, bias_values, masks, history)
    sizes = (vocab, logits.stride(0), masks.shape[1])
    kept: dict[str, Any] = {"PIECE": PIECE, "TABLES": TABLES if cuts else 0}
    launch(_prepare, grid, *tensors, scaled, stats, tables, *sizes, MAX_BIAS=MAX_BIAS, num_warps=8, **kept)
    shared = (scaled, stats, numbers, integers, tables)
    for part in range(TABLES if cuts else 0):
        launch(_narrow, grid, *shared, vocab, PIECES=padded, PASS=part, num_warps=8, **kept)
    launch(_choose, grid, *shared, scores, tokens, vocab, PIECES=padded, CUTS=cuts, num_warps=8, **kept)
    last = (logits, integers, stats, history, scores, tokens, *out)
    launch(_finish, (rows,), *last, vocab, logits.stride(0), pieces, PIECES=padded, num_warps=4)
    return out
