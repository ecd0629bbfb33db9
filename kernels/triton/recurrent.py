"""Recurrent ops, one launch each: causal convolution in tiles of tokens; recurrences token by token or in chunks.

Each state is read and written once per step. Decode moves little else: a head of 128 x 128 reads 64 KB and writes
64 KB. It is held in registers by programs of a few rows each, with all loads in flight at once. The rows of a state are
independent, so programs need no synchronization, and token by token the result is bitwise independent of chunking.

Chunked prefill uses TF32 matrix products (formulas in `recurrent.delta_rule_chunked`). A chunk's triangular system is
inverted by doubling: if X holds the inverses of the diagonal blocks of size s, and B the entries below them within the
diagonal blocks of size 2 s, the inverses of the latter are X - X B X.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layer_weights import LinearPart, Norm
from .gemv import gemv_kernel
from .launch import counters, is_last, launch, power_of_2, wait_for_previous
from .product import COUNTERS, After, Extras, product
from .sequences import sequence_of

TOKENS, CHANNELS = (
    16,
    128,
)  # tile of the convolution in prefill; in decode a program computes one token and twice the channels
GATE_TILE = 512  # elements of heads that a program norms and gates
WIDEST_GROUP = 1024  # elements that a program of one warp norms and gates in registers
TILE = 1024  # state elements held by a program (one warp) in token-by-token mode
CHUNK = 32  # tokens per chunk
CHUNK_ROWS = 32  # rows of a state per program in chunked mode
WIDE_CHUNK, WIDE_ROWS = 16, 64  # with a decay per key channel: more rows share a chunk's products, more tokens spill


@triton.jit
def _sigmoid(x):
    """NaN propagates; on a GPU the minimum of NaN and a number is the number."""
    return 1.0 / (1.0 + tl.exp(tl.where(x < -88.0, 88.0, -x)))


@triton.jit
def _conv_input(at, ok, NUM: tl.constexpr, GATED: tl.constexpr):
    """Inputs of the convolution in float32. GATED: gates, times the values 2 NUM elements further, rounded."""
    x = tl.load(at, mask=ok, other=0.0)
    if GATED:
        x = (x.to(tl.float32) * tl.load(at + 2 * NUM, mask=ok, other=0.0).to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=["num_seqs"])
def _convolve(
    x, weight, bias, state, slots, cu_query_lens, out, x_stride, slot_stride, num_seqs,
    NUM: tl.constexpr, WIDTH: tl.constexpr, PAST: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve TOKENS tokens of one sequence, BLOCK of NUM channels; its first tile also updates the state.

    GATED   a row has NUM gates of the inputs, NUM gates of the results, and NUM values
    """
    wait_for_previous(PDL)
    tile = tl.program_id(1)
    seq = tile if TOKENS == 1 else sequence_of(tile, cu_query_lens, num_seqs, TOKENS, STEPS)
    first = tl.load(cu_query_lens + seq)
    end = tl.load(cu_query_lens + seq + 1)
    start = first if TOKENS == 1 else first + (tile - (first // TOKENS + seq)) * TOKENS
    if start >= end:
        return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = c < NUM
    kept = state + tl.load(slots + seq) * slot_stride + c.to(tl.int64) * (WIDTH - 1)
    t = start + tl.arange(0, TOKENS)
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    for j in tl.static_range(WIDTH):
        before = t - first + (j - WIDTH + 1)  # offset from this step's first token; negative: from the slot's state
        ok = (t < end)[:, None] & there[None, :]
        at = x + (first + before).to(tl.int64)[:, None] * x_stride + c[None, :]
        new = _conv_input(at, ok & (before >= 0)[:, None], NUM, GATED)
        old = tl.load(kept[None, :] + (before + (WIDTH - 1))[:, None], mask=ok & (before < 0)[:, None], other=0.0)
        tap = tl.load(weight + c * WIDTH + j, mask=there, other=0.0)
        acc += tl.where((before >= 0)[:, None], new, old) * tap[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + c, mask=there, other=0.0)[None, :]
    if SILU:
        acc *= _sigmoid(acc)
    ok = (t < end)[:, None] & there[None, :]
    if GATED:
        acc *= tl.load(x + t.to(tl.int64)[:, None] * x_stride + NUM + c[None, :], mask=ok, other=0.0).to(tl.float32)
    at = out + t.to(tl.int64)[:, None] * NUM + c[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=ok)
    if start == first:
        i = tl.arange(0, PAST)[None, :]
        back = end - first - (WIDTH - 1) + i
        inside = there[:, None] & (i < WIDTH - 1)
        last = x + (first + back).to(tl.int64) * x_stride + c[:, None]
        newest = _conv_input(last, inside & (back >= 0), NUM, GATED)
        oldest = tl.load(kept[:, None] + (back + (WIDTH - 1)), mask=inside & (back < 0), other=0.0)
        tl.debug_barrier()  # all threads have read the state before it is overwritten
        tl.store(kept[:, None] + i, tl.where(back >= 0, newest, oldest), mask=inside)


@triton.jit(do_not_specialize=["first"])
def _gemv_conv_kernel(
    x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
    residual_ptr, expert_ptr, out_ptr, n, eps,
    taps, offsets, state, slots, cu_query_lens, mixed_ptr, first, slot_stride,
    K: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, MIN: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, FIXED: tl.constexpr,
    LATE: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, PAST: tl.constexpr, OFFSETS: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`gemv_kernel`; each program also convolves its outputs from `first` on, NUM channels, and updates their state."""
    gemv_kernel(
        x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
        residual_ptr, expert_ptr, out_ptr, n, eps,
        K, CODE, LOW, HIGH, SCALE, MIN, ZERO, GROUP, RUN, SCALE_ROWS, ROW_SCALE, BIAS, NORM, RESIDUAL, GATE, LIMIT,
        SHARE, ROWS, CHUNKS, TOKENS, FIXED, LATE, PDL,
    )  # fmt: skip
    tl.debug_barrier()  # outputs of other threads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = row - first
    length = tl.load(cu_query_lens + 1) - tl.load(cu_query_lens) + tl.zeros([ROWS], tl.int32)
    there = (c >= 0) & (c < NUM) & (row < n) & (length > 0)
    newest = tl.load(out_ptr + row, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    kept = state + tl.load(slots) * slot_stride + c * (WIDTH - 1)
    acc = newest * tl.load(taps + c * WIDTH + (WIDTH - 1), mask=there, other=0.0)
    for j in tl.static_range(WIDTH - 1):
        tap = tl.load(taps + c * WIDTH + j, mask=there, other=0.0)
        acc += tl.load(kept + j, mask=there, other=0.0) * tap
    if OFFSETS:
        acc += tl.load(offsets + c, mask=there, other=0.0)
    if SILU:
        acc *= _sigmoid(acc)
    tl.store(mixed_ptr + c, acc, mask=there)
    i = tl.arange(0, PAST)[None, :]
    inside = there[:, None] & (i < WIDTH - 1)
    older = tl.load(kept[:, None] + i + 1, mask=inside & (i < WIDTH - 2), other=0.0)
    tl.debug_barrier()  # all threads have read the state before it is overwritten
    tl.store(kept[:, None] + i, tl.where(i == WIDTH - 2, newest[:, None], older), mask=inside)


def projected_conv(
    x: Tensor,
    norm: Norm | None,
    parts: Sequence[LinearPart],
    conv: tuple[Tensor, Tensor | None],
    kept: tuple[Tensor, Tensor, Tensor],
    first: int,
) -> tuple[Tensor, Tensor]:
    """Products of norm(x), [1, hidden], and `causal_conv` with SiLU of the outputs from `first` on, float32.

    parts   `fusable`; their outputs are concatenated
    conv    weight and bias
    kept    state, slots, cu_query_lens
    """
    weight, bias = conv[0].contiguous(), None if conv[1] is None else conv[1].contiguous()
    (channels, width), device = weight.shape, x.device
    _require_whole(kept[0])
    rows = torch.empty((1, sum(part.shape[0] for part in parts)), dtype=x.dtype, device=device)
    mixed = torch.empty((1, channels), dtype=torch.float32, device=device)
    kinds: dict[str, Any] = {"NUM": channels, "WIDTH": width, "PAST": power_of_2(max(width - 1, 1)), "SILU": True}
    kinds["OFFSETS"] = bias is not None
    begin = 0
    for part in parts:
        arguments = weight, weight if bias is None else bias, *kept, mixed, first - begin, kept[0].stride(0)
        after = After(_gemv_conv_kernel, 0, arguments, kinds)
        out = rows[:, begin : begin + part.shape[0]]
        product(x, part.prepared, Extras(part.bias, norm), out=out, after=after)
        begin += part.shape[0]
    return rows, mixed


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cu_query_lens: Tensor,
    silu: bool = False,
) -> Tensor:
    """`recurrent.causal_conv`; tokens of x may be strided, each slot's state must be contiguous."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return _convolved(x, out, (weight, bias, state, slots, cu_query_lens), silu=silu)


def gated_conv(
    rows: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor, cu_query_lens: Tensor
) -> Tensor:
    """c · conv(b · h) of `mixers.short_conv`, with b, c, h side by side: [num_tokens, channels], dtype of rows.

    rows   [num_tokens, 3 channels], contiguous; the others as in `causal_conv`
    """
    out = torch.empty((rows.shape[0], weight.shape[0]), dtype=rows.dtype, device=rows.device)
    return _convolved(rows.contiguous(), out, (weight, bias, state, slots, cu_query_lens), gated=True)


def _convolved(
    x: Tensor,
    out: Tensor,
    given: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor],
    *,
    silu: bool = False,
    gated: bool = False,
) -> Tensor:
    weight, bias, state, slots, cu_query_lens = given
    (num_tokens, channels), num_seqs, width = out.shape, slots.shape[0], weight.shape[1]
    _require_whole(state)
    single = num_tokens == num_seqs
    # no tile but a sequence's first may reach back to the state, which that one replaces
    tokens, block = (1, 2 * CHANNELS) if single else (max(TOKENS, power_of_2(width - 1)), CHANNELS)
    tiles = num_seqs if single else num_tokens // tokens + num_seqs
    bias = None if bias is None else bias.contiguous()
    tensors = (x, weight.contiguous(), weight if bias is None else bias, state, slots, cu_query_lens, out)
    launch(
        _convolve,
        (-(-channels // block), tiles),
        *tensors,
        *(x.stride(0), state.stride(0), num_seqs),
        NUM=channels,
        WIDTH=width,
        PAST=power_of_2(max(width - 1, 1)),
        TOKENS=tokens,
        BLOCK=block,
        STEPS=0 if single else 8 if num_seqs < 256 else 20,
        HAS_BIAS=bias is not None,
        SILU=silu,
        GATED=gated,
        num_warps=2 if single else 8,
        fuses=False,
    )
    return out


def _require_whole(state: Tensor) -> None:
    if not state[0].is_contiguous():
        raise ValueError("the state of each slot must be contiguous")


@triton.jit
def _softplus(x):
    return tl.log(1.0 + tl.exp(-tl.abs(x))) + tl.maximum(x, 0.0)


@triton.jit
def _step(x, bias, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Mamba-2's time step; MOST 0: no limits. NaN propagates."""
    found = _softplus(x + bias)
    if MOST > 0.0:
        found = tl.where(found < LEAST, LEAST, tl.where(found > MOST, MOST, found))
    return found


@triton.jit
def _log_decay(a, bias, speed, FLOOR: tl.constexpr):
    """`mixers.log_decay` of float32 values; FLOOR 0: none."""
    if FLOOR < 0.0:
        return FLOOR * _sigmoid(-speed * (a + bias))
    return speed * _softplus(a + bias)


@triton.jit
def _key_head(head, V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, TILED: tl.constexpr):
    """The key head of value head `head`."""
    return head % K_HEADS if TILED else head // (V_HEADS // K_HEADS)


@triton.jit
def _unit(x):
    """L2-normalize rows."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 1) + 1e-6))[:, None]


@triton.jit
def _gate_rows(
    y, z, weight, out, row, there, eps, z_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, SIGMOID: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Norm and gate heads `row`, [ROWS]. CACHE: cache modifier of loads of y."""
    d = tl.arange(0, PADDED)[None, :]
    ok = there[:, None] & (d < DIM)
    gain = tl.load(weight + d, mask=d < DIM, other=0.0)
    wide = tl.load(y + row[:, None] * DIM + d, mask=ok, other=0.0, cache_modifier=CACHE)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) * (1.0 / DIM) + eps)
    at = (row // HEADS * z_stride + row % HEADS * DIM)[:, None] + d
    gates = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
    factor = _sigmoid(gates)
    if not SIGMOID:
        factor *= gates
    result = wide * scale[:, None] * gain * factor
    tl.store(out + row[:, None] * DIM + d, result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _gate_group_rows(
    y, x, z, skip, norm, gain, out, row, there, eps, x_stride, z_stride,
    GROUPS: tl.constexpr, DIM: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Add the skip, gate and norm groups `row`, [ROWS]. CACHE: cache modifier of loads of y."""
    d = tl.arange(0, PADDED)[None, :]
    ok = there[:, None] & (d < DIM)
    channel = (row % GROUPS)[:, None] * DIM + d
    token = (row // GROUPS)[:, None]
    if NORM:
        gains = tl.load(norm + d, mask=d < DIM, other=0.0) * tl.load(gain + channel, mask=ok, other=0.0)
    skips = tl.load(skip + channel // HEAD, mask=ok, other=0.0)
    wide = tl.load(y + token * (GROUPS * DIM) + channel, mask=ok, other=0.0, cache_modifier=CACHE)
    wide += tl.load(x + token * x_stride + channel, mask=ok, other=0.0).to(tl.float32) * skips
    gates = tl.load(z + token * z_stride + channel, mask=ok, other=0.0).to(tl.float32)
    wide *= gates * _sigmoid(gates)
    if NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) * (1.0 / DIM) + eps)
        wide = wide * scale[:, None] * gains
    tl.store(out + token * (GROUPS * DIM) + channel, wide.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _advance(
    v, k, q, decay, rate, bias, speed, state, slots, out, first, count,
    v_stride, k_stride, q_stride, decay_stride, rate_stride, slot_stride,
    V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILED: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr, RAW: tl.constexpr,
    FLOOR: tl.constexpr, BETA: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Advance ROWS rows of a head's state through `count` tokens of one sequence, token by token.

    RAW   `decay` and `rate` are what a product gave, as in `Raw`
    """
    head = tl.program_id(1)
    d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, COLUMNS)
    ok = (d < V_DIM)[:, None] & (n < K_DIM)[None, :]
    place = tl.load(slots + tl.program_id(2)) * slot_stride + head * (V_DIM * K_DIM)
    place = state + place + d[:, None] * K_DIM + n[None, :]
    kept = tl.load(place, mask=ok, other=0.0)
    key = _key_head(head, V_HEADS, K_HEADS, TILED) * K_DIM + n[None, :]
    inside = (n < K_DIM)[None, :]
    if RAW:
        own_speed = tl.load(speed + head)
        if WIDE:
            own_bias = tl.load(bias + head * K_DIM + n[None, :], mask=inside, other=0.0)
        else:
            own_bias = tl.load(bias + head)
    for token in range(count):
        t = first + token
        k_row = tl.load(k + t * k_stride + key, mask=inside, other=0.0).to(tl.float32)
        q_row = tl.load(q + t * q_stride + key, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(v + t * v_stride + head * V_DIM + d, mask=d < V_DIM, other=0.0).to(tl.float32)
        share = tl.load(rate + t * rate_stride + head).to(tl.float32)
        if RAW:
            share = _sigmoid(share) * BETA if DELTA else _step(share, own_bias, LEAST, MOST)
        if DELTA:
            k_row = _unit(k_row)
            q_row = _unit(q_row) * (K_DIM**-0.5)
            if WIDE:
                row = decay + t * decay_stride + head * K_DIM + n[None, :]
                log = tl.load(row, mask=inside, other=0.0).to(tl.float32)
            else:
                log = tl.load(decay + t * decay_stride + head).to(tl.float32)
            kept *= tl.exp(_log_decay(log, own_bias, own_speed, FLOOR) if RAW else log)
            given -= tl.sum(kept * k_row, 1)
        else:
            kept *= tl.exp(share * tl.load(decay + head))
        kept += (given * share)[:, None] * k_row
        tl.store(out + (t * V_HEADS + head) * V_DIM + d, tl.sum(kept * q_row, 1), mask=d < V_DIM)
    tl.store(place, kept, mask=ok)


@triton.jit
def _walk(
    v, k, q, decay, rate, bias, speed, state, slots, cu_query_lens, out,
    v_stride, k_stride, q_stride, decay_stride, rate_stride, slot_stride,
    V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILED: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr, RAW: tl.constexpr,
    FLOOR: tl.constexpr, BETA: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_advance` of one sequence."""
    wait_for_previous(PDL)
    first = tl.load(cu_query_lens + tl.program_id(2)).to(tl.int64)
    count = tl.load(cu_query_lens + tl.program_id(2) + 1) - first
    if count == 0:
        return
    _advance(
        v, k, q, decay, rate, bias, speed, state, slots, out, first, count,
        v_stride, k_stride, q_stride, decay_stride, rate_stride, slot_stride,
        V_HEADS, K_HEADS, V_DIM, K_DIM, ROWS, COLUMNS, TILED, DELTA, WIDE, RAW, FLOOR, BETA, LEAST, MOST,
    )  # fmt: skip


@triton.jit
def _walk_and_gate(
    v, k, q, decay, rate, bias, speed, state, slots, cu_query_lens, out,
    v_stride, k_stride, q_stride, decay_stride, rate_stride, slot_stride,
    z, weight, gated, counter, eps, z_stride,
    V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILED: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr, RAW: tl.constexpr,
    FLOOR: tl.constexpr, BETA: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    PADDED: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_walk` with the gated delta rule; the last program of a head also norms and gates it."""
    wait_for_previous(PDL)
    first = tl.load(cu_query_lens + tl.program_id(2)).to(tl.int64)
    count = tl.load(cu_query_lens + tl.program_id(2) + 1) - first
    if count == 0:
        return
    _advance(
        v, k, q, decay, rate, bias, speed, state, slots, out, first, count,
        v_stride, k_stride, q_stride, decay_stride, rate_stride, slot_stride,
        V_HEADS, K_HEADS, V_DIM, K_DIM, ROWS, COLUMNS, TILED, DELTA, WIDE, RAW, FLOOR, BETA, LEAST, MOST,
    )  # fmt: skip
    if is_last(counter + tl.program_id(2) * V_HEADS + tl.program_id(1), tl.num_programs(0)):
        for token in range(count):
            row = (first + token) * V_HEADS + tl.program_id(1) + tl.zeros([1], tl.int64)
            _gate_rows(out, z, weight, gated, row, row >= 0, eps, z_stride, V_HEADS, V_DIM, PADDED, SIGMOID, ".cg")


@triton.jit
def _walk_and_gate_groups(
    v, k, q, decay, rate, bias, speed, state, slots, cu_query_lens, out,
    v_stride, k_stride, q_stride, decay_stride, rate_stride, slot_stride,
    x, z, skip, weight, gain, gated, counter, eps, x_stride, z_stride,
    V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILED: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr, RAW: tl.constexpr,
    FLOOR: tl.constexpr, BETA: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    GROUPS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_walk` with Mamba-2; the last program of a group of heads also norms and gates it."""
    wait_for_previous(PDL)
    first = tl.load(cu_query_lens + tl.program_id(2)).to(tl.int64)
    count = tl.load(cu_query_lens + tl.program_id(2) + 1) - first
    if count == 0:
        return
    _advance(
        v, k, q, decay, rate, bias, speed, state, slots, out, first, count,
        v_stride, k_stride, q_stride, decay_stride, rate_stride, slot_stride,
        V_HEADS, K_HEADS, V_DIM, K_DIM, ROWS, COLUMNS, TILED, DELTA, WIDE, RAW, FLOOR, BETA, LEAST, MOST,
    )  # fmt: skip
    MEMBERS: tl.constexpr = V_HEADS // GROUPS
    group = tl.program_id(1) // MEMBERS
    if is_last(counter + tl.program_id(2) * GROUPS + group, MEMBERS * tl.num_programs(0)):
        for token in range(count):
            row = (first + token) * GROUPS + group + tl.zeros([1], tl.int64)
            _gate_group_rows(
                out, x, z, skip, weight, gain, gated, row, row >= 0, eps, x_stride, z_stride,
                GROUPS, DIM, V_DIM, PADDED, NORM, ".cg",
            )  # fmt: skip


@triton.jit
def _inverse(below, CHUNK: tl.constexpr):
    """(I + below)⁻¹ for a strictly lower triangular matrix [CHUNK, CHUNK]."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    found = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -below, 0.0))
    for level in tl.static_range(1, 5):
        if (1 << level) < CHUNK:
            between = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), below, 0.0)
            found -= tl.dot(found, tl.dot(between, found))
    return found


@triton.jit
def _decayed_products(queries, keys, grown, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """`recurrent._decayed_products` of a chunk. All [CHUNK, COLUMNS]; grown: decays, summed from the chunk's start.

    Two tokens meet at the last token of the earlier one's block: each is multiplied by its decay from or to there.
    """
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    shares = tl.where(i == j, tl.sum(queries * keys, 1)[:, None], 0.0)
    for level in tl.static_range(5):
        if (1 << level) < CHUNK:
            pairs = tl.reshape(grown, [CHUNK >> (level + 1), 2 << level, COLUMNS])
            last = tl.arange(0, 2 << level)[None, :, None] == (1 << level) - 1
            away = tl.abs(pairs - tl.sum(tl.where(last, pairs, 0.0), 1)[:, None, :])
            factor = tl.exp(-tl.reshape(away, [CHUNK, COLUMNS]))
            meet = (i >> level == (j >> level) + 1) & ((i >> level) % 2 == 1)
            right = tl.trans(keys * factor)
            system = tl.where(meet, tl.dot(keys * factor, right), system)
            shares = tl.where(meet, tl.dot(queries * factor, right), shares)
    return system, shares


@triton.jit
def _chunks(
    v, k, q, decay, rate, bias, speed, state, slots, cu_query_lens, out,
    v_stride, k_stride, q_stride, decay_stride, rate_stride, slot_stride,
    V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILED: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr, RAW: tl.constexpr,
    FLOOR: tl.constexpr, BETA: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Advance ROWS rows of a head's state through the chunks of one sequence; padding after its end has no effect."""
    wait_for_previous(PDL)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, COLUMNS)
    ok = (d < V_DIM)[:, None] & (n < K_DIM)[None, :]
    place = tl.load(slots + seq) * slot_stride + head * (V_DIM * K_DIM)
    place = state + place + d[:, None] * K_DIM + n[None, :]
    first = tl.load(cu_query_lens + seq).to(tl.int64)
    count = (tl.load(cu_query_lens + seq + 1) - first).to(tl.int32)
    if count == 0:
        return
    kept = tl.load(place, mask=ok, other=0.0)
    key = _key_head(head, V_HEADS, K_HEADS, TILED) * K_DIM + n[None, :]
    i = tl.arange(0, CHUNK)
    v += first * v_stride + head * V_DIM
    k += first * k_stride
    q += first * q_stride
    out += (first * V_HEADS + head) * V_DIM
    rate += first * rate_stride + head
    decay += first * decay_stride + head * (K_DIM if WIDE else 1)
    if RAW:
        own_speed = tl.load(speed + head)
        if WIDE:
            own_bias = tl.load(bias + head * K_DIM + n, mask=n < K_DIM, other=0.0)[None, :]
        else:
            own_bias = tl.load(bias + head)
    for chunk in range((count + CHUNK - 1) // CHUNK):
        there = chunk * CHUNK + i < count
        t = chunk * CHUNK + i  # 32-bit offsets: a step has fewer than 2^31 elements
        inside = there[:, None] & (n < K_DIM)[None, :]
        real = there[:, None] & (d < V_DIM)[None, :]
        keys = tl.load(k + t[:, None] * k_stride + key, mask=inside, other=0.0).to(tl.float32)
        queries = tl.load(q + t[:, None] * q_stride + key, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(v + t[:, None] * v_stride + d[None, :], mask=real, other=0.0).to(tl.float32)
        share = tl.load(rate + t * rate_stride, mask=there, other=0.0).to(tl.float32)
        if RAW:
            share = tl.where(there, _sigmoid(share) * BETA if DELTA else _step(share, own_bias, LEAST, MOST), 0.0)
        if DELTA:
            keys = _unit(keys)
            queries = _unit(queries) * (K_DIM**-0.5)
            if WIDE:
                logs = tl.load(decay + t[:, None] * decay_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
            else:
                logs = tl.load(decay + t * decay_stride, mask=there, other=0.0).to(tl.float32)
            if RAW:
                logs = _log_decay(logs, own_bias, own_speed, FLOOR)
                logs = tl.where(inside if WIDE else there, logs, 0.0)
        else:
            logs = share * tl.load(decay)
        grown = tl.cumsum(logs, 0)
        total = tl.sum(logs, 0)
        if WIDE:
            system, shares = _decayed_products(queries, keys, grown, CHUNK, COLUMNS)
            given = given - tl.dot(keys * tl.exp(grown), tl.trans(kept))
            given = tl.dot(_inverse(system * share[:, None], CHUNK), given * share[:, None])
            y = tl.dot(queries * tl.exp(grown), tl.trans(kept)) + tl.dot(shares, given)
        else:
            lower = tl.exp(tl.minimum(grown[:, None] - grown[None, :], 0.0))
            lower = tl.where(i[:, None] >= i[None, :], lower, 0.0)
            before = tl.exp(grown)[:, None]
            if DELTA:
                given = given - before * tl.dot(keys, tl.trans(kept))
                below = tl.where(i[:, None] > i[None, :], tl.dot(keys, tl.trans(keys)) * lower * share[:, None], 0.0)
                given = tl.dot(_inverse(below, CHUNK), given * share[:, None])
            else:
                given *= share[:, None]
            y = before * tl.dot(queries, tl.trans(kept)) + tl.dot(tl.dot(queries, tl.trans(keys)) * lower, given)
        tl.store(out + t[:, None] * (V_HEADS * V_DIM) + d[None, :], y, mask=real)
        if WIDE:
            keys *= tl.exp(total[None, :] - grown)
            kept = kept * tl.exp(total)[None, :] + tl.dot(tl.trans(given), keys)
        else:
            rest = tl.exp(total - grown)[:, None]
            kept = kept * tl.exp(total) + tl.dot(tl.trans(given * rest), keys)
    tl.store(place, kept, mask=ok)


class Raw(NamedTuple):
    """How a recurrence computes rates itself, from rows of any float type with contiguous heads.

    bias    float32, added to the rows: per head, or per head and key channel
    speed   float32 [num_heads], below 0: log decay = speed · softplus(a + bias)
    floor   below 0: log decay = floor · sigmoid(-speed · (a + bias)); 0: none
    steps   limits of Mamba-2's time steps softplus(rate + bias); the highest is 0 if there are none
    scale   beta = scale · sigmoid(rate)
    """

    bias: Tensor
    speed: Tensor
    floor: float = 0.0
    steps: tuple[float, float] = (0.0, 0.0)
    scale: float = 1.0


def run(
    given: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    rate: Tensor,
    kept: tuple[Tensor, Tensor, Tensor],
    delta: bool,
    by_token: bool,
    tiled: bool = False,
    raw: Raw | None = None,
    after: After | None = None,
) -> Tensor:
    """Launch a recurrence. given: values, keys, queries [num_tokens, heads, dim]; kept: state, slots, cu_query_lens.

    raw   with a delta rule, `decay` holds a [num_tokens, heads (, k_dim)], and `rate` what beta comes from; with
          Mamba-2, `rate` holds the time steps before their bias
    after  runs instead of `_walk`, for as many tokens as sequences
    """
    _require_whole(kept[0])
    v, k, q = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in given)
    (num_tokens, heads, dim), (key_heads, width) = v.shape, k.shape[1:]
    out = torch.empty((num_tokens, heads, dim), dtype=torch.float32, device=v.device)
    columns, padded = power_of_2(width), power_of_2(dim)
    wide = delta and decay.ndim == 3
    if raw is None:
        decay, rate = decay.contiguous(), rate.contiguous()
    rows, how = min(max(1, TILE // columns), padded), dict[str, Any](num_warps=1, registers=168)
    if not by_token and num_tokens != kept[1].shape[0]:
        chunk, most = (WIDE_CHUNK, WIDE_ROWS) if wide else (CHUNK, CHUNK_ROWS)
        columns, rows = max(columns, 16), min(max(padded, 16), most)
        how = {"num_warps": 8, "num_stages": 1, "CHUNK": chunk}
    kernel, _, more, constants, *_ = after or After(_chunks if "CHUNK" in how else _walk)
    launch(
        kernel,
        (-(-dim // rows), heads, kept[1].shape[0]),
        *(v, k, q, decay, rate, *((rate, rate) if raw is None else raw[:2]), *kept, out),
        *(v.stride(0), k.stride(0), q.stride(0), decay.stride(0) if delta else 0, rate.stride(0), kept[0].stride(0)),
        *more,
        V_HEADS=heads,
        K_HEADS=key_heads,
        V_DIM=dim,
        K_DIM=width,
        ROWS=rows,
        COLUMNS=columns,
        TILED=tiled,
        DELTA=delta,
        WIDE=wide,
        RAW=raw is not None,
        FLOOR=0.0 if raw is None else raw.floor,
        BETA=1.0 if raw is None else raw.scale,
        LEAST=0.0 if raw is None else raw.steps[0],
        MOST=0.0 if raw is None else raw.steps[1],
        **how,
        **constants,
    )
    return out


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_query_lens: Tensor,
    tiled: bool = False,
    *,
    by_token: bool = False,
) -> Tensor:
    """`recurrent.delta_rule`; tokens may be strided, each slot's state must be contiguous.

    by_token   process prompts token by token as well: results are bitwise independent of chunking
    """
    return run((v, k, q), decay, beta, (state, slots, cu_query_lens), True, by_token, tiled)


def state_space(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    steps: Tensor,
    decay: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_query_lens: Tensor,
    *,
    by_token: bool = False,
) -> Tensor:
    """`recurrent.state_space`; strides and `by_token` as in `delta_rule`."""
    return run((x, b, c), decay, steps, (state, slots, cu_query_lens), False, by_token)


@triton.jit(do_not_specialize=["num_rows"])
def _gate(
    y, z, weight, out, eps, num_rows, z_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _gate_rows(y, z, weight, out, row, row < num_rows, eps, z_stride, HEADS, DIM, PADDED, SIGMOID, "")


def gated_norm(y: Tensor, z: Tensor, norm: Norm, is_sigmoid: bool) -> Tensor:
    """norm(y) · silu(z), or · sigmoid(z): [num_tokens, heads · dim] in the dtype of z, whose tokens may be strided.

    y   float32 [num_tokens, heads, dim], contiguous; each head is normed by itself
    """
    (num_tokens, heads, dim), padded = y.shape, power_of_2(y.shape[2])
    out = torch.empty((num_tokens, heads * dim), dtype=z.dtype, device=y.device)
    rows = max(1, GATE_TILE // padded)
    arguments = (y, z, norm.weight, out, norm.eps, num_tokens * heads, z.stride(0))
    sizes = {"HEADS": heads, "DIM": dim, "PADDED": padded, "ROWS": rows, "SIGMOID": is_sigmoid}
    launch(_gate, (-(-num_tokens * heads // rows),), *arguments, num_warps=2, **sizes)
    return out


def gated_delta_rule(
    given: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    rate: Tensor,
    kept: tuple[Tensor, Tensor, Tensor],
    by_token: bool,
    tiled: bool,
    raw: Raw,
    ending: tuple[Tensor, Norm, bool],
    *,
    apart: bool = False,
) -> Tensor:
    """`gated_norm` of the gated delta rule's result: in one launch for as many tokens as sequences (decode).

    ending   z, norm and is_sigmoid of `gated_norm`; the others as in `run`
    apart    always in two
    """
    (tokens, heads, dim), (z, norm, is_sigmoid) = given[0].shape, ending
    if apart or by_token or tokens != kept[1].shape[0] or tokens * heads > COUNTERS:
        return gated_norm(run(given, decay, rate, kept, True, by_token, tiled, raw), *ending)
    out = torch.empty((tokens, heads * dim), dtype=z.dtype, device=z.device)
    arguments = z, norm.weight, out, counters(z.device, COUNTERS), norm.eps, z.stride(0)
    after = After(_walk_and_gate, 0, arguments, {"PADDED": power_of_2(dim), "SIGMOID": is_sigmoid})
    run(given, decay, rate, kept, True, by_token, tiled, raw, after)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gate_groups(
    y, x, z, skip, norm, gain, out, eps, num_rows, x_stride, z_stride,
    GROUPS: tl.constexpr, DIM: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _gate_group_rows(
        y, x, z, skip, norm, gain, out, row, row < num_rows, eps, x_stride, z_stride,
        GROUPS, DIM, HEAD, PADDED, NORM, "",
    )  # fmt: skip


def gated_groups(
    y: Tensor, values: Tensor, z: Tensor, skip: Tensor, norms: tuple[Norm, Tensor] | None, groups: int
) -> Tensor:
    """norm((y + skip · values) · silu(z)) · gain, each group normed by itself: [num_tokens, inner], dtype of z.

    y        float32 [num_tokens, num_heads, head_dim], contiguous
    values   float [num_tokens, num_heads, head_dim], what the state space was given; tokens may be strided
    z        [num_tokens, inner]; tokens may be strided
    skip     float32 [num_heads]
    norms    norm and gain, float32 [inner]; None: neither
    """
    num_tokens, inner = y.shape[0], y.shape[1] * y.shape[2]
    out = torch.empty((num_tokens, inner), dtype=z.dtype, device=y.device)
    arguments, eps, sizes = _group_arguments(values, z, skip, norms, groups, out)
    padded, count = sizes["PADDED"], num_tokens * sizes["GROUPS"]
    rows, warps = max(1, GATE_TILE // padded), min(max(padded // 256, 2), 16)
    numbers = eps, count, values.stride(0), z.stride(0)
    how: dict[str, Any] = {"ROWS": rows, "HEAD": y.shape[2], "num_warps": warps}
    launch(_gate_groups, (-(-count // rows),), y, *arguments, *numbers, **how, **sizes)
    return out


def _group_arguments(
    values: Tensor, z: Tensor, skip: Tensor, norms: tuple[Norm, Tensor] | None, groups: int, out: Tensor
) -> tuple[tuple[Tensor, ...], float, dict[str, Any]]:
    """Tensors, epsilon and constants of `_gate_group_rows`."""
    groups = groups if norms is not None else values.shape[1]
    dim = out.shape[1] // groups
    weight, gain, eps = (skip, skip, 0.0) if norms is None else (norms[0].weight, norms[1], norms[0].eps)
    sizes = {"GROUPS": groups, "DIM": dim, "PADDED": power_of_2(dim), "NORM": norms is not None}
    return (values, z, skip, weight, gain, out), eps, sizes


def gated_state_space(
    given: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    rate: Tensor,
    kept: tuple[Tensor, Tensor, Tensor],
    by_token: bool,
    raw: Raw,
    ending: tuple[Tensor, Tensor, tuple[Norm, Tensor] | None, int],
    *,
    apart: bool = False,
) -> Tensor:
    """`gated_groups` of a state space's result: in one launch for as many tokens as sequences (decode).

    ending   z, skip, norms and groups of `gated_groups`; the others as in `run`
    apart    always in two
    """
    (z, _, norms, groups), (tokens, heads, dim) = ending, given[0].shape
    groups = groups if norms is not None else heads
    many = tokens * groups > COUNTERS or power_of_2(heads * dim // groups) > WIDEST_GROUP
    if apart or by_token or tokens != kept[1].shape[0] or many:
        y = run(given, decay, rate, kept, False, by_token, raw=raw)
        return gated_groups(y, given[0], *ending)
    out = torch.empty((tokens, heads * dim), dtype=z.dtype, device=z.device)
    tensors, eps, sizes = _group_arguments(given[0], *ending, out)
    arguments = *tensors, counters(z.device, COUNTERS), eps, given[0].stride(0), z.stride(0)
    run(given, decay, rate, kept, False, by_token, raw=raw, after=After(_walk_and_gate_groups, 0, arguments, sizes))
    return out
