"""GEMM on tensor cores, y = x Wᵀ for several rows of x and every weight form: small batches and medium prompts.

W, decoded in registers plane by plane, is the left operand; x, transposed, is the right one, so eight rows of x fill
the narrow side of the instruction and weights fill the wide side. A group scale that covers a whole step of K
multiplies the float32 sums, without rounding. In short steps with few groups, sums are kept per group and multiplied by
scales and minima. Otherwise scales multiply the decoded weights, which are then rounded to the dtype of x (exact for
FP4 codes). The size and order of steps over K are fixed by constants for any number of rows. K may be split into SPLIT
parts, which the last program to finish adds in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import gated
from .codes import group_min, group_scale, group_terms, half_value, load_high, spread
from .pairs import bf16_pairs, int4_pairs


@triton.jit
def _operand(value, OPERAND: tl.constexpr):
    """Cast to the operand type. Float32 in the interpreter, whose casts to bfloat16 truncate."""
    if OPERAND == "f32":
        operand = value.to(tl.float32)
    elif OPERAND == "bf16":
        operand = value.to(tl.bfloat16)
    else:
        operand = value.to(tl.float16)
    return operand


@triton.jit
def _exact_operand(
    h, high, PLANE: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
    OPERAND: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Decode a plane of int16 halves, minus ZERO, to an operand, exactly."""
    if (CODE == "bf16" and OPERAND == "bf16") or (CODE == "f16" and OPERAND == "f16"):
        value = h.to(tl.bfloat16 if OPERAND == "bf16" else tl.float16, bitcast=True)
    elif PAIRS and CODE == "int4":
        value = int4_pairs(h, PLANE, ZERO, OPERAND)
    elif PAIRS and OPERAND == "bf16" and CODE == "int8":
        value = bf16_pairs(h, PLANE, CODE)
    elif PAIRS and OPERAND == "bf16" and CODE == "e4m3":
        value = (bf16_pairs(h, PLANE, CODE) * (2.0**120)).to(tl.bfloat16)
    else:
        value = _operand(half_value(h.to(tl.int32), high, PLANE, CODE, LOW, HIGH, ZERO), OPERAND)
    return value


_LINE = tl.constexpr(64)  # halves per cache line of 128 bytes


@triton.jit
def _fetch(places):
    """Prefetch cache lines to L2: int16 pointers [rows, lines], one per line."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], tl.int32, False, 1
    )


@triton.jit(do_not_specialize=["m"])
def gemm_kernel(
    x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, residual_ptr,
    place_ptr, expert_ptr, out_ptr, partial_ptr, counter_ptr, m, n,
    K: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, MIN: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr, SHARE: tl.constexpr,
    OPERAND: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HALVES: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs (ROWS / 2 if gated) of TOKENS rows of x, over one of SPLIT parts of K.

    SHARE   0, or number of outputs that share a row of x: W then holds the rows of all experts, expert_ptr has the
            expert of the tile and place_ptr its outputs; negative entries are unused
    """
    PLANES: tl.constexpr = 16 // LOW
    CHUNK: tl.constexpr = 8 * PLANES
    H: tl.constexpr = (K + CHUNK - 1) // CHUNK * 8
    STEPS: tl.constexpr = (H + HALVES - 1) // HALVES
    PART: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    EVEN: tl.constexpr = H % HALVES == 0 and K % CHUNK == 0
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    SUPERS: tl.constexpr = K // 256
    AFTER: tl.constexpr = GROUP % (HALVES * PLANES) == 0 and (MIN == "none" or MIN == "zero")  # scale the sums
    # FP4 or FP8 codes with an E4M3 or E8M0 scale: their product is exact in bfloat16
    NARROW: tl.constexpr = PAIRS and OPERAND == "bf16" and (SCALE == "e4m3" or SCALE == "e8m0")
    # scale the sums of each group: each group of a step has its own columns, with x masked to that group
    SMALL: tl.constexpr = HALVES == 16 and (CODE == "int4" or CODE == "int8") and SCALE != "none"
    GROUPED: tl.constexpr = SMALL and not AFTER and (16 * PLANES % GROUP == 0 or GROUP % (16 * PLANES) == 0)
    GROUPS_IN_STEP: tl.constexpr = max(HALVES * PLANES // GROUP, 1) if GROUPED else 1
    COLUMNS: tl.constexpr = GROUPS_IN_STEP * TOKENS

    tile = tl.program_id(1)
    t = tl.arange(0, ROWS)
    if GATE != "":
        rows = tl.minimum(tile * (ROWS // 2) + t % (ROWS // 2), n - 1) + (t // (ROWS // 2)) * n
    else:
        rows = tl.minimum(tile * ROWS + t, n - 1)
    lane = tl.arange(0, HALVES)
    column = tl.arange(0, COLUMNS)
    tokens = tl.program_id(0) * TOKENS + column % TOKENS
    if SHARE > 0:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        expert = tl.load(expert_ptr + tl.program_id(0))
        if expert < 0:
            return
        rows += expert * (2 * n if GATE != "" else n)
        pairs = tl.load(place_ptr + tokens)
        x_ok = (pairs >= 0)[None, :]
        tokens = tl.maximum(pairs, 0) // SHARE
    else:
        x_ok = (tokens < m)[None, :]
    if GROUPS_IN_STEP > 1:
        x_ok &= (lane // (HALVES // GROUPS_IN_STEP))[:, None] == (column // TOKENS)[None, :]
    row64 = rows.to(tl.int64)
    low_rows = low_ptr + (row64 * H)[:, None]
    x_rows = x_ptr + (tokens.to(tl.int64) * K)[None, :]
    first = tl.program_id(2) * PART
    if PDL and SHARE == 0:
        tl.extra.cuda.gdc_launch_dependents()
        # weights do not depend on the previous kernel: prefetch those of the first two steps while waiting for it
        LINES: tl.constexpr = (2 * HALVES + _LINE - 1) // _LINE
        line = first * HALVES + tl.arange(0, LINES) * _LINE
        _fetch(low_rows + tl.minimum(line, H - 1)[None, :])
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(first, tl.minimum(first + PART, STEPS), num_stages=STAGES):
        half = step * HALVES + lane
        if EVEN:
            h = tl.load(low_rows + half[None, :])
        else:
            h = tl.load(low_rows + half[None, :], mask=(half < H)[None, :], other=0)
        high = load_high(high_ptr, row64, half, H, CODE, HIGH)
        place = half // RUN * (RUN * PLANES) + half % RUN
        if SCALE != "none" and not AFTER and not GROUPED:
            scale, least = group_terms(
                scale_ptr, min_ptr, super_ptr, super_min_ptr, row64, step * HALVES,
                K, PLANES, SCALE, MIN, GROUP, RUN, SCALE_ROWS, HALVES,
            )  # fmt: skip
            if NARROW:
                factor = spread((scale * (2.0**100)).to(tl.bfloat16), ROWS, HALVES, RUN)
            else:
                factor = spread(scale, ROWS, HALVES, RUN)
            if MIN != "none":
                offset = spread(least, ROWS, HALVES, RUN)
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        x_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for i in tl.static_range(PLANES):
            k = place + i * RUN
            if EVEN:
                x = tl.load(x_rows + k[:, None], mask=x_ok, other=0.0)
            else:
                x = tl.load(x_rows + k[:, None], mask=(k < K)[:, None] & x_ok, other=0.0)
            if SCALE == "none":
                w = _exact_operand(h, high, i, CODE, LOW, HIGH, ZERO, OPERAND, PAIRS)
            elif AFTER or GROUPED:
                w = _exact_operand(h, high, i, CODE, LOW, HIGH, ZERO, OPERAND, PAIRS)
                if AFTER and MIN == "zero":
                    zero = tl.load(min_ptr + row64 * GROUPS + step * (HALVES * PLANES) // GROUP)
                    w = _operand(w - _operand(zero, OPERAND)[:, None], OPERAND)
            elif NARROW:
                w = (bf16_pairs(h, i, CODE) * factor).to(tl.bfloat16)
            else:
                value = half_value(h.to(tl.int32), high, i, CODE, LOW, HIGH, ZERO) * factor
                if MIN != "none":
                    value += offset
                w = _operand(value, OPERAND)
            x = _operand(x, OPERAND)
            part = tl.dot(w, x, part)
            if GROUPED and MIN != "none":
                x_sums = tl.dot(tl.full((ROWS, HALVES), 1.0, x.dtype), x, x_sums)
        if SCALE != "none" and AFTER:
            group = step * (HALVES * PLANES) // GROUP
            index = row64 // SCALE_ROWS * GROUPS + group
            scale = group_scale(scale_ptr, super_ptr, index, row64 * SUPERS + group * GROUP // 256, rows >= 0, SCALE)
            acc += part * scale[:, None]
        elif GROUPED:
            group = step * (HALVES * PLANES) // GROUP + tl.arange(0, GROUPS_IN_STEP)[None, :]
            index = (row64 // SCALE_ROWS * GROUPS)[:, None] + group
            above = (row64 * SUPERS)[:, None] + group * GROUP // 256
            there = group * GROUP < K
            scale = group_scale(scale_ptr, super_ptr, index, above, there, SCALE)
            acc += part * spread(scale, ROWS, COLUMNS, TOKENS)
            if MIN != "none":
                least = group_min(min_ptr, scale_ptr, super_min_ptr, index, above, there, scale, MIN)
                acc += x_sums * spread(least, ROWS, COLUMNS, TOKENS)
        else:
            acc += part

    if GROUPS_IN_STEP > 1:
        acc = tl.sum(tl.reshape(acc, (ROWS, GROUPS_IN_STEP, TOKENS)), 1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if SHARE > 0:
        tokens = tl.load(place_ptr + tokens)
        token_ok = tokens >= 0
    else:
        token_ok = tokens < m
    if SPLIT > 1:
        # [SPLIT, number of tiles, ROWS, TOKENS] partial sums
        spot = tile * tl.num_programs(0) + tl.program_id(0)
        tiles = tl.num_programs(0) * tl.num_programs(1)
        inside = t[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        size: tl.constexpr = ROWS * TOKENS
        tl.store(partial_ptr + (tl.program_id(2) * tiles + spot).to(tl.int64) * size + inside, acc)
        tl.debug_barrier()
        done = tl.atomic_add(counter_ptr + spot, 1, sem="acq_rel")
        if done != SPLIT - 1:
            return
        tl.store(counter_ptr + spot, 0)
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        for other in range(SPLIT):
            theirs = partial_ptr + (other * tiles + spot).to(tl.int64) * size
            acc += tl.load(theirs + inside, cache_modifier=".cg")

    if NARROW:
        acc *= 2.0**26 if CODE == "e2m1" else 2.0**20
    if ROW_SCALE:
        acc *= tl.load(row_scale_ptr + rows)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    if GATE != "":
        g, up = tl.split(tl.permute(tl.reshape(acc, (2, ROWS // 2, TOKENS)), (1, 2, 0)))
        y = gated(g, up, GATE, LIMIT)
        outputs = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
    else:
        y = acc
        outputs = tile * ROWS + t
    spot64 = (tokens.to(tl.int64) * n)[None, :] + outputs[:, None]
    ok = (outputs < n)[:, None] & token_ok[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + spot64, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + spot64, y.to(out_ptr.dtype.element_ty), mask=ok)
