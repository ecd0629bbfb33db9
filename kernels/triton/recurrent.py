"""Recurrent ops, one launch each: causal convolution in tiles of tokens; recurrences token by token or in chunks.

Each state is read and written once per step. Decode moves little else: a head of 128 x 128 reads 64 KB and writes
64 KB. It is held in registers by programs of a few rows each, with all loads in flight at once. The rows of a state are
independent, so programs need no synchronization, and token by token the result is bitwise independent of chunking.

Chunked prefill uses TF32 matrix products (formulas in `recurrent.delta_rule_chunked`). A chunk's triangular system is
inverted by doubling: if X holds the inverses of the diagonal blocks of size s, and B the entries below them within the
diagonal blocks of size 2 s, the inverses of the latter are X - X B X.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, power_of_2, wait_for_previous
from .sequences import sequence_of

TOKENS, CHANNELS = (
    16,
    128,
)  # tile of the convolution in prefill; in decode a program computes one token and twice the channels
TILE = 1024  # state elements held by a program (one warp) in token-by-token mode
CHUNK = 32  # tokens per chunk
CHUNK_ROWS = 32  # rows of a state per program in chunked mode
WIDE_CHUNK, WIDE_ROWS = 16, 64  # with a decay per key channel: more rows share a chunk's products, more tokens spill


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 88.0)))


@triton.jit(do_not_specialize=["num_seqs"])
def _convolve(
    x, weight, bias, state, slots, cu_query_lens, out, x_stride, slot_stride, num_seqs,
    NUM: tl.constexpr, WIDTH: tl.constexpr, PAST: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve TOKENS tokens of one sequence, BLOCK of NUM channels; its first tile also updates the state."""
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
        new = tl.load(at, mask=ok & (before >= 0)[:, None], other=0.0).to(tl.float32)
        old = tl.load(kept[None, :] + (before + (WIDTH - 1))[:, None], mask=ok & (before < 0)[:, None], other=0.0)
        tap = tl.load(weight + c * WIDTH + j, mask=there, other=0.0)
        acc += tl.where((before >= 0)[:, None], new, old) * tap[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + c, mask=there, other=0.0)[None, :]
    if SILU:
        acc *= _sigmoid(acc)
    at = out + t.to(tl.int64)[:, None] * NUM + c[None, :]
    tl.store(at, acc, mask=(t < end)[:, None] & there[None, :])
    if start == first:
        i = tl.arange(0, PAST)[None, :]
        back = end - first - (WIDTH - 1) + i
        inside = there[:, None] & (i < WIDTH - 1)
        last = x + (first + back).to(tl.int64) * x_stride + c[:, None]
        newest = tl.load(last, mask=inside & (back >= 0), other=0.0).to(tl.float32)
        oldest = tl.load(kept[:, None] + (back + (WIDTH - 1)), mask=inside & (back < 0), other=0.0)
        tl.debug_barrier()  # all threads have read the state before it is overwritten
        tl.store(kept[:, None] + i, tl.where(back >= 0, newest, oldest), mask=inside)


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
    (num_tokens, channels), num_seqs, width = x.shape, slots.shape[0], weight.shape[1]
    _require_whole(state)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_tokens, channels), dtype=torch.float32, device=x.device)
    single = num_tokens == num_seqs
    tokens, block = (1, 2 * CHANNELS) if single else (TOKENS, CHANNELS)
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
        num_warps=2 if single else 8,
        fuses=False,
    )
    return out


def _require_whole(state: Tensor) -> None:
    if not state[0].is_contiguous():
        raise ValueError("the state of each slot must be contiguous")


@triton.jit
def _key_head(head, V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, TILED: tl.constexpr):
    """The key head of value head `head`."""
    return head % K_HEADS if TILED else head // (V_HEADS // K_HEADS)


@triton.jit
def _unit(x):
    """L2-normalize rows."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 1) + 1e-6))[:, None]


@triton.jit
def _walk(
    v, k, q, decay, rate, state, slots, cu_query_lens, out, v_stride, k_stride, q_stride, slot_stride,
    V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILED: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Advance ROWS rows of a head's state through the tokens of one sequence, token by token."""
    wait_for_previous(PDL)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, COLUMNS)
    ok = (d < V_DIM)[:, None] & (n < K_DIM)[None, :]
    place = tl.load(slots + seq) * slot_stride + head * (V_DIM * K_DIM)
    place = state + place + d[:, None] * K_DIM + n[None, :]
    first = tl.load(cu_query_lens + seq).to(tl.int64)
    count = tl.load(cu_query_lens + seq + 1) - first
    if count == 0:
        return
    kept = tl.load(place, mask=ok, other=0.0)
    key = _key_head(head, V_HEADS, K_HEADS, TILED) * K_DIM + n[None, :]
    inside = (n < K_DIM)[None, :]
    for token in range(count):
        t = first + token
        k_row = tl.load(k + t * k_stride + key, mask=inside, other=0.0).to(tl.float32)
        q_row = tl.load(q + t * q_stride + key, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(v + t * v_stride + head * V_DIM + d, mask=d < V_DIM, other=0.0).to(tl.float32)
        share = tl.load(rate + t * V_HEADS + head)
        if DELTA:
            k_row = _unit(k_row)
            q_row = _unit(q_row) * (K_DIM**-0.5)
            if WIDE:
                row = decay + (t * V_HEADS + head) * K_DIM + n[None, :]
                kept *= tl.exp(tl.load(row, mask=inside, other=0.0))
            else:
                kept *= tl.exp(tl.load(decay + t * V_HEADS + head))
            given -= tl.sum(kept * k_row, 1)
        else:
            kept *= tl.exp(share * tl.load(decay + head))
        kept += (given * share)[:, None] * k_row
        tl.store(out + (t * V_HEADS + head) * V_DIM + d, tl.sum(kept * q_row, 1), mask=d < V_DIM)
    tl.store(place, kept, mask=ok)


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
    v, k, q, decay, rate, state, slots, cu_query_lens, out, v_stride, k_stride, q_stride, slot_stride,
    V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILED: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
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
    rate += first * V_HEADS + head
    decay += (first * V_HEADS + head) * (K_DIM if WIDE else 1) if DELTA else head
    for chunk in range((count + CHUNK - 1) // CHUNK):
        there = chunk * CHUNK + i < count
        t = chunk * CHUNK + i  # 32-bit offsets: a step has fewer than 2^31 elements
        inside = there[:, None] & (n < K_DIM)[None, :]
        real = there[:, None] & (d < V_DIM)[None, :]
        keys = tl.load(k + t[:, None] * k_stride + key, mask=inside, other=0.0).to(tl.float32)
        queries = tl.load(q + t[:, None] * q_stride + key, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(v + t[:, None] * v_stride + d[None, :], mask=real, other=0.0).to(tl.float32)
        share = tl.load(rate + t * V_HEADS, mask=there, other=0.0)
        if DELTA:
            keys = _unit(keys)
            queries = _unit(queries) * (K_DIM**-0.5)
            if WIDE:
                logs = tl.load(decay + t[:, None] * (V_HEADS * K_DIM) + n[None, :], mask=inside, other=0.0)
            else:
                logs = tl.load(decay + t * V_HEADS, mask=there, other=0.0)
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


def _run(
    given: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    rate: Tensor,
    kept: tuple[Tensor, Tensor, Tensor],
    delta: bool,
    by_token: bool,
    tiled: bool = False,
) -> Tensor:
    """Launch a recurrence. given: values, keys, queries [num_tokens, heads, dim]; kept: state, slots, cu_query_lens."""
    _require_whole(kept[0])
    v, k, q = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in given)
    (num_tokens, heads, dim), (key_heads, width) = v.shape, k.shape[1:]
    out = torch.empty((num_tokens, heads, dim), dtype=torch.float32, device=v.device)
    columns, padded = power_of_2(width), power_of_2(dim)
    wide = delta and decay.ndim == 3
    rows, how = min(max(1, TILE // columns), padded), dict[str, Any](num_warps=1, registers=168)
    if not by_token and num_tokens != kept[1].shape[0]:
        chunk, most = (WIDE_CHUNK, WIDE_ROWS) if wide else (CHUNK, CHUNK_ROWS)
        columns, rows = max(columns, 16), min(max(padded, 16), most)
        how = {"num_warps": 8, "num_stages": 1, "CHUNK": chunk}
    launch(
        _chunks if "CHUNK" in how else _walk,
        (-(-dim // rows), heads, kept[1].shape[0]),
        *(v, k, q, decay.contiguous(), rate.contiguous(), *kept, out),
        *(x.stride(0) for x in (v, k, q, kept[0])),
        V_HEADS=heads,
        K_HEADS=key_heads,
        V_DIM=dim,
        K_DIM=width,
        ROWS=rows,
        COLUMNS=columns,
        TILED=tiled,
        DELTA=delta,
        WIDE=wide,
        **how,
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
    return _run((v, k, q), decay, beta, (state, slots, cu_query_lens), True, by_token, tiled)


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
    return _run((x, b, c), decay, steps, (state, slots, cu_query_lens), False, by_token)
