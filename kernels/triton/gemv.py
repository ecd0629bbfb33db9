"""GEMV for decode: y = x Wᵀ for one row of x and every weight form; up to four rows of x share the loaded codes.

A program computes ROWS rows of W over all of K, CHUNKS 16-byte chunks of each row at a time, loading the next chunks
before it uses the current ones. It accumulates in float32 in an order fixed by the constants. RMSNorm is free: each
program reads all of x, so it sums the squares along the way and multiplies by 1/rms at the end. A gated product takes
rows r and r + N of the stacked gate and up weights and returns act(gate) * up. Weight loads are issued before the
kernel waits for its predecessor (PDL). 4-bit codes can be multiplied in integers instead (FIXED; see `fixed.py`), with
x converted once by a preceding kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import gated
from .codes import add_part, end_factor, group_min, group_scale
from .fixed import fixed_part


@triton.jit
def _load_words(
    low_ptr, high_ptr, row_ok, rows, first, C: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Load the words of chunks first.., int32 [ROWS, CHUNKS, 4], and their high bits, int32 of the same shape (or 0).

    Loaded in two dimensions: for a 3-d load Triton 3.6 assigns neighbouring lanes to different rows, and every operand
    combined with the words then goes through shared memory (int4: 234 registers instead of 121).
    """
    word = first * 4 + tl.arange(0, 4 * CHUNKS)
    place = (rows.to(tl.int64) * (4 * C))[:, None] + word[None, :]
    ok = row_ok[:, None] & (word < 4 * C)[None, :]
    w = tl.reshape(tl.load(low_ptr + place, mask=ok, other=0), (ROWS, CHUNKS, 4))
    if HIGH > 0:
        high = tl.reshape(tl.load(high_ptr + place, mask=ok, other=0).to(tl.int32), (ROWS, CHUNKS, 4))
    else:
        high = 0
    return w, high


@triton.jit
def load_run(
    ptr, chunk, first: tl.constexpr, K: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, RUN: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """float32 [CHUNKS, RUN]: elements [first, first + RUN) of each chunk, read with cache modifier CACHE."""
    k = chunk[:, None] * CHUNK + first + tl.arange(0, RUN)[None, :]
    if K % CHUNK == 0:
        ok = (chunk < C)[:, None]
    else:
        ok = k < K
    return tl.load(ptr + k, mask=ok, other=0.0, cache_modifier=CACHE).to(tl.float32)


@triton.jit
def load_plane(
    ptr, chunk, PLANE: tl.constexpr, K: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, RUN: tl.constexpr,
    CHUNKS: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """float32 [CHUNKS, 8]: the elements multiplied by plane PLANE of a chunk's halves, all eight in one thread."""
    STEP: tl.constexpr = CHUNK * RUN // 8  # elements of a run of halves
    at: tl.constexpr = PLANE * RUN
    x = load_run(ptr, chunk, at, K, C, CHUNK, RUN, CACHE)
    if RUN == 4:
        y = load_run(ptr, chunk, at + STEP, K, C, CHUNK, RUN, CACHE)
        x = tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (CHUNKS, 8))
    elif RUN == 2:
        y = load_run(ptr, chunk, at + STEP, K, C, CHUNK, RUN, CACHE)
        low = tl.join(x, y)
        x = load_run(ptr, chunk, at + 2 * STEP, K, C, CHUNK, RUN, CACHE)
        y = load_run(ptr, chunk, at + 3 * STEP, K, C, CHUNK, RUN, CACHE)
        x = tl.reshape(tl.permute(tl.join(low, tl.join(x, y)), (0, 3, 2, 1)), (CHUNKS, 8))
    return x


@triton.jit
def _activations(
    x_ptr, norm_ptr, chunk, PLANE: tl.constexpr, K: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr,
    RUN: tl.constexpr, CHUNKS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """`load_plane` of x times the norm's weight, and the sum of squares of the unweighted x, float32 [CHUNKS]."""
    x = load_plane(x_ptr, chunk, PLANE, K, C, CHUNK, RUN, CHUNKS, "")
    squares = tl.zeros((CHUNKS,), tl.float32)
    if NORM:
        squares = tl.sum(x * x, 1)
        x *= load_plane(norm_ptr, chunk, PLANE, K, C, CHUNK, RUN, CHUNKS, "")
    return x, squares


@triton.jit
def _add_chunks(
    acc, squares, w, high, x_row, norm_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, rows, row_ok, c0,
    K: tl.constexpr, C: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr,
    MIN: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SCALE_ROWS: tl.constexpr,
    NORM: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Add chunks c0.. times a row of x to acc, float32 [ROWS, CHUNKS, RUNS], and with a norm x² to squares."""
    PLANES: tl.constexpr = 16 // LOW
    CHUNK: tl.constexpr = 8 * PLANES
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    SUPERS: tl.constexpr = K // 256
    RUNS: tl.constexpr = 8 // RUN
    chunk = c0 + tl.arange(0, CHUNKS)
    if FIXED != "":
        part, xs = fixed_part(w, x_row, c0, C, ROWS, CHUNKS, RUNS, CODE, ZERO, FIXED == "assembly")
    else:
        p = tl.zeros((ROWS, CHUNKS, 4), tl.float32)
        xs = tl.zeros((CHUNKS, RUNS), tl.float32)
        for i in tl.static_range(PLANES):
            x, plane_squares = _activations(x_row, norm_ptr, chunk, i, K, C, CHUNK, RUN, CHUNKS, NORM)
            squares += plane_squares
            if MIN != "none" or ZERO != 0:
                xs += tl.sum(tl.reshape(x, (CHUNKS, RUNS, RUN)), 2)
            even, odd = tl.split(tl.reshape(x, (CHUNKS, 4, 2)))
            p = add_part(p, w, high, even[None, :, :], i, 0, CODE, LOW, HIGH)
            p = add_part(p, w, high, odd[None, :, :], i, 1, CODE, LOW, HIGH)
        part = tl.sum(tl.reshape(p, (ROWS, CHUNKS, RUNS, 4 // RUNS)), 3) * end_factor(CODE)
    if SCALE != "none":
        ok = row_ok[:, None, None] & (chunk < C)[None, :, None]
        if RUNS == 1:
            group = (chunk * CHUNK // GROUP)[:, None]
        else:
            group = chunk[:, None] * RUNS + tl.arange(0, RUNS)[None, :]
        index = ((rows // SCALE_ROWS).to(tl.int64) * GROUPS)[:, None, None] + group[None]
        above = (rows.to(tl.int64) * SUPERS)[:, None, None] + (chunk * CHUNK // 256)[None, :, None]
        scale = group_scale(scale_ptr, super_ptr, index, above, ok, SCALE)
        part = scale * part
        if MIN != "none":
            part += group_min(min_ptr, scale_ptr, super_min_ptr, index, above, ok, scale, MIN) * xs[None]
        elif ZERO != 0 and FIXED == "":
            part -= scale * (ZERO * xs)[None]
    elif ZERO != 0 and FIXED == "":
        part -= (ZERO * xs)[None]
    return acc + part, squares


@triton.jit
def _finish(
    acc, squares, token, rows, row_ok, eps, row_scale_ptr, bias_ptr, residual_ptr, out_ptr, n,
    K: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    GATE: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Reduce acc, float32 [ROWS, CHUNKS, RUNS], apply the epilogue and store the results for one row of x."""
    y = tl.sum(tl.sum(acc, 2), 1)
    if NORM:
        y *= 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / K + eps)
    if ROW_SCALE:
        y *= tl.load(row_scale_ptr + rows, mask=row_ok, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=row_ok, other=0.0).to(tl.float32)
    if GATE != "":
        g, up = tl.split(tl.trans(tl.reshape(y, (2, ROWS // 2))))
        y = gated(g, up, GATE, LIMIT)
        outputs = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    else:
        outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = token.to(tl.int64) * n + outputs
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=outputs < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=outputs < n)


@triton.jit
def gemv_kernel(
    x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
    residual_ptr, expert_ptr, out_ptr, n, eps,
    K: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, MIN: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    LIMIT: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr,
    FIXED: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs (ROWS / 2 if gated) for TOKENS rows of x starting at row `program_id(1)` * TOKENS.

    FIXED   "": float32; "assembly" or "plain": integers, and x_ptr is the output of `digits`, norm included
    LATE    let the next kernel start (PDL) after the loop instead of at the beginning
    SHARE   0, or number of outputs that share a row of x: W then holds the rows of all experts, and expert_ptr has the
            expert of output `program_id(1)`
    """
    PLANES: tl.constexpr = 16 // LOW
    CHUNK: tl.constexpr = 8 * PLANES
    C: tl.constexpr = (K + CHUNK - 1) // CHUNK
    RUNS: tl.constexpr = 8 // RUN

    token = tl.program_id(1) * TOKENS
    t = tl.arange(0, ROWS)
    if GATE != "":
        first = tl.program_id(0) * (ROWS // 2) + t % (ROWS // 2)
        row_ok = first < n
        rows = first + (t // (ROWS // 2)) * n
    else:
        rows = tl.program_id(0) * ROWS + t
        row_ok = rows < n
    source = token // SHARE if SHARE > 0 else token
    X: tl.constexpr = C * (17 + RUNS) if FIXED != "" else K  # stride of rows of x
    x_row = x_ptr + source.to(tl.int64) * X

    if PDL and not LATE:  # let the next kernel start loading its weights
        tl.extra.cuda.gdc_launch_dependents()
    if SHARE > 0:
        if PDL:  # the expert is known only after the previous kernel
            tl.extra.cuda.gdc_wait()
        rows += tl.load(expert_ptr + token) * (2 * n if GATE != "" else n)
    w_next, high_next = _load_words(low_ptr, high_ptr, row_ok, rows, 0, C, HIGH, ROWS, CHUNKS)
    if PDL and SHARE == 0:
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros((ROWS, CHUNKS, RUNS), tl.float32)
    squares = tl.zeros((CHUNKS,), tl.float32)
    if TOKENS > 1:
        acc1 = acc
    if TOKENS > 2:
        acc2 = acc
    if TOKENS > 3:
        acc3 = acc
    for c0 in range(0, C, CHUNKS):
        w, high = w_next, high_next
        if c0 + CHUNKS < C and FIXED == "":
            w_next, high_next = _load_words(low_ptr, high_ptr, row_ok, rows, c0 + CHUNKS, C, HIGH, ROWS, CHUNKS)
        acc, squares = _add_chunks(
            acc, squares, w, high, x_row, norm_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, rows,
            row_ok, c0, K, C, CODE, LOW, HIGH, SCALE, MIN, ZERO, GROUP, RUN, SCALE_ROWS, NORM, ROWS, CHUNKS, FIXED,
        )  # fmt: skip
        if TOKENS > 1:
            acc1, _ = _add_chunks(
                acc1, squares, w, high, x_row + X, norm_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, rows,
                row_ok, c0, K, C, CODE, LOW, HIGH, SCALE, MIN, ZERO, GROUP, RUN, SCALE_ROWS, NORM, ROWS, CHUNKS, FIXED,
            )  # fmt: skip
        if TOKENS > 2:
            acc2, _ = _add_chunks(
                acc2, squares, w, high, x_row + 2 * X, norm_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, rows,
                row_ok, c0, K, C, CODE, LOW, HIGH, SCALE, MIN, ZERO, GROUP, RUN, SCALE_ROWS, NORM, ROWS, CHUNKS, FIXED,
            )  # fmt: skip
        if TOKENS > 3:
            acc3, _ = _add_chunks(
                acc3, squares, w, high, x_row + 3 * X, norm_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, rows,
                row_ok, c0, K, C, CODE, LOW, HIGH, SCALE, MIN, ZERO, GROUP, RUN, SCALE_ROWS, NORM, ROWS, CHUNKS, FIXED,
            )  # fmt: skip
        if c0 + CHUNKS < C and FIXED != "":  # after the sums to save registers; loading the next x hides the latency
            w_next, high_next = _load_words(low_ptr, high_ptr, row_ok, rows, c0 + CHUNKS, C, HIGH, ROWS, CHUNKS)

    if PDL and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    _finish(
        acc, squares, token, rows, row_ok, eps, row_scale_ptr, bias_ptr, residual_ptr, out_ptr, n,
        K, ROW_SCALE, BIAS, NORM, RESIDUAL, GATE, LIMIT, ROWS,
    )  # fmt: skip
    if TOKENS > 1:
        _finish(
            acc1, squares, token + 1, rows, row_ok, eps, row_scale_ptr, bias_ptr, residual_ptr, out_ptr, n,
            K, ROW_SCALE, BIAS, NORM, RESIDUAL, GATE, LIMIT, ROWS,
        )  # fmt: skip
    if TOKENS > 2:
        _finish(
            acc2, squares, token + 2, rows, row_ok, eps, row_scale_ptr, bias_ptr, residual_ptr, out_ptr, n,
            K, ROW_SCALE, BIAS, NORM, RESIDUAL, GATE, LIMIT, ROWS,
        )  # fmt: skip
    if TOKENS > 3:
        _finish(
            acc3, squares, token + 3, rows, row_ok, eps, row_scale_ptr, bias_ptr, residual_ptr, out_ptr, n,
            K, ROW_SCALE, BIAS, NORM, RESIDUAL, GATE, LIMIT, ROWS,
        )  # fmt: skip
