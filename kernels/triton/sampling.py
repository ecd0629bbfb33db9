"""On-device sampling of one token per row of logits; `kernels/sampling.py` is the reference and defines the algorithm.

    prepare   mask, penalties, bias, temperature -> scaled logits; maximum and sum of exponentials per piece
    narrow    (with cuts) histograms of token counts and masses by distance from the maximum, in three passes: all
              buckets, the steps of the bucket in which top-k ends, and those of the bucket in which top-p ends
    choose    best kept token of each piece, and of the row; its log-probability, history update

A piece is 4,096 tokens: a row of 151,936 takes 38 programs per launch, the last of which finds where a cut ends, or the
row's best token. Count and mass are integers packed into one int64 and added atomically, so sums and results do not
depend on the order. Rows without cuts return from `narrow` immediately, and so do, from its last pass, rows whose top-p
ends in the same bucket as top-k. No host synchronization; all buffer sizes follow from shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling import COLDEST, IN_PROMPT, LEVEL, MASS, MAX_BIAS, STEPS, Sampled, SamplingInputs
from .launch import counters, is_last, launch, power_of_2, wait_for_previous
from .product import COUNTERS

PIECE = 4096
STATS = 4  # per piece: maximum and sum of exponentials of the scaled logits, then of the raw ones
TABLES = 3  # histograms: buckets, steps of top-k's bucket, steps of top-p's bucket
# int64 per row that the last program of a pass leaves: bucket of top-k, sums before it, last step of top-k; mass that
# top-p must reach, its bucket (-1: the same as top-k's), sums before it, last step of top-p
CUTS = 7
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
    """(first bin where the running sum reaches target, packed sums before it and including it)."""
    bins = tl.arange(0, _LEVEL)
    sums = tl.cumsum(tl.load(table + bins, cache_modifier=".cg"), 0) + before
    short = _measures(sums, BY_MASS) < target
    at = tl.minimum(tl.sum(short.to(tl.int32), 0), _LEVEL - 1)
    below = tl.maximum(tl.max(tl.where(bins < at, sums, 0), 0), before)
    return at, below, tl.max(tl.where(bins <= at, sums, 0), 0)


@triton.jit
def _target(top_p, kept):
    """The mass that top-p must reach: top_p times the mass of packed sums, at least 1."""
    return tl.maximum((top_p.to(tl.float64) * _measures(kept, True).to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _step_of(x, top):
    """Distance below the largest logit in steps, clamped to the last step (also for -inf)."""
    return (tl.minimum(top - x, 31.99) * _STEPS).to(tl.int32)


@triton.jit
def _narrow(
    scaled, stats, numbers, integers, tables, cuts, counter, vocab,
    PIECE: tl.constexpr, PIECES: tl.constexpr, TABLES: tl.constexpr, CUTS: tl.constexpr, PASS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Fill table PASS and, in the row's last program, find where cuts end: see `CUTS`."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_previous(PDL)
    top_k = tl.load(integers + row * 6)
    top_p = tl.load(numbers + row * 6 + 1)
    has_k, has_p = (top_k > 0) & (top_k < vocab), top_p < 1.0
    cuts += row * CUTS
    idle = tl.load(numbers + row * 6) < _COLDEST  # greedy
    bucket = 0
    if PASS == 0:
        idle |= (has_k | has_p) == 0
    elif PASS == 1:
        idle |= has_k == 0
        bucket = tl.load(cuts).to(tl.int32)
    else:
        bucket = tl.load(cuts + 4).to(tl.int32)
        idle |= (has_p == 0) | (bucket < 0)
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
    place = step >> _LEVEL_BITS
    if PASS > 0:
        counted = counted & (place == bucket)
        place = step & (_LEVEL - 1)
    first = tables + row * TABLES * _LEVEL
    table = first + PASS * _LEVEL
    tl.atomic_add(table + place, packed, mask=counted, sem="relaxed")
    if is_last(counter + row, tl.num_programs(0)):
        if PASS == 0:
            if has_k:
                at, below, _ = _first_reaching(table, 0, top_k, False)
                tl.store(cuts, at.to(tl.int64))
                tl.store(cuts + 1, below)
            else:
                whole = tl.sum(tl.load(table + tl.arange(0, _LEVEL), cache_modifier=".cg"), 0)
                target = _target(top_p, whole)
                at, below, _ = _first_reaching(table, 0, target, True)
                tl.store(cuts + 3, target)
                tl.store(cuts + 4, at.to(tl.int64))
                tl.store(cuts + 5, below)
        elif PASS == 1:
            before = tl.load(cuts + 1)
            low, _, kept = _first_reaching(table, before, top_k, False)
            tl.store(cuts + 2, (bucket * _LEVEL + low).to(tl.int64))
            if has_p:
                target = _target(top_p, kept)
                if target > _measures(before, True):  # top-p ends in the bucket where top-k does
                    at, _, _ = _first_reaching(table, before, target, True)
                    tl.store(cuts + 4, tl.full((), -1, tl.int64))
                    tl.store(cuts + 6, (bucket * _LEVEL + at).to(tl.int64))
                else:
                    at, below, _ = _first_reaching(first, 0, target, True)
                    tl.store(cuts + 3, target)
                    tl.store(cuts + 4, at.to(tl.int64))
                    tl.store(cuts + 5, below)
        else:
            at, _, _ = _first_reaching(table, tl.load(cuts + 5), tl.load(cuts + 3), True)
            tl.store(cuts + 6, (bucket * _LEVEL + at).to(tl.int64))


@triton.jit
def _choose(
    scaled, stats, numbers, integers, tables, cuts, counter, vocab, best_score, best_token, logits, history,
    token_ids, logprobs, log_sums, status, logits_stride,
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
        if TABLES > 0:
            step = _step_of(x, top)
            top_k = tl.load(integers + row * 6)
            if (top_k > 0) & (top_k < vocab):
                keep = keep & (step <= tl.load(cuts + row * CUTS + 2))
            if tl.load(numbers + row * 6 + 1) < 1.0:
                keep = keep & (step <= tl.load(cuts + row * CUTS + 6))
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
    if is_last(counter + row, num_pieces):
        _finish(
            logits, integers, stats, history, best_score, best_token, token_ids, logprobs, log_sums, status, row,
            vocab, logits_stride, num_pieces, PIECES,
        )  # fmt: skip


@triton.jit
def _finish(
    logits, integers, stats, history, best_score, best_token, token_ids, logprobs, log_sums, status, row,
    vocab, logits_stride, num_pieces, PIECES: tl.constexpr,
):  # fmt: skip
    """Store the best token of a row's pieces, its log-probability and the row's status, and add it to the history."""
    piece = tl.arange(0, PIECES)
    scores = best_score + row * num_pieces + piece
    scores = tl.load(scores, mask=piece < num_pieces, other=float("-inf"), cache_modifier=".cg")
    winner = tl.minimum(tl.argmax(scores, 0), num_pieces - 1)
    token = tl.load(best_token + row * num_pieces + winner, cache_modifier=".cg").to(tl.int64)
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
    if rows > COUNTERS:
        raise ValueError(f"{rows} rows; the sampler supports at most {COUNTERS}")
    if power_of_2(pieces) > PIECE:
        raise ValueError(f"vocabulary of {vocab} tokens; the sampler supports at most {PIECE * PIECE}")

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    scaled, stats, counter = new(rows, vocab), new(rows, pieces, STATS), counters(logits.device, COUNTERS)
    tables = new(rows, TABLES, LEVEL, dtype=torch.int64) if cuts else stats
    ends = new(rows, CUTS, dtype=torch.int64) if cuts else stats
    scores, tokens = new(rows, pieces), new(rows, pieces, dtype=torch.int32)
    # in one storage, so that one copy brings them to the host; each aligned to 16 bytes, for which kernels are compiled
    part = -(-rows // 4) * 4
    made = new(3 * part, dtype=torch.int64)
    logprobs, log_sums, status, _ = made[part:].view(torch.float32).view(4, part)[:, :rows]
    out = Sampled(made[:rows], logprobs, log_sums, status.view(torch.int32))
    padded = power_of_2(pieces)
    grid = (pieces, rows)
    numbers, integers, bias_ids, bias_values, masks, history = inputs
    tensors = (logits, numbers, integers, bias_ids, bias_values, masks, history)
    sizes = (vocab, logits.stride(0), masks.shape[1])
    kept: dict[str, Any] = {"PIECE": PIECE, "TABLES": TABLES if cuts else 0, "num_warps": 8}
    launch(_prepare, grid, *tensors, scaled, stats, tables, *sizes, MAX_BIAS=MAX_BIAS, **kept)
    shared = (scaled, stats, numbers, integers, tables, ends, counter, vocab)
    kept |= {"PIECES": padded, "CUTS": CUTS}
    for part in range(TABLES if cuts else 0):
        launch(_narrow, grid, *shared, PASS=part, **kept)
    launch(_choose, grid, *shared, scores, tokens, logits, history, *out, logits.stride(0), **kept)
    return out
