"""y = x Wᵀ with quantized activations, for prompts, if the user allows it: FP8 (W8A8) and NVFP4 (W4A4).

Both operands are rows of bytes in the order of `layout`; the order along K does not matter to the product. FP8 products
are accumulated over 128 elements and then added in float32, where block scales are applied. NVFP4 uses `tl.dot_scaled`;
with HAND, codes and scales are decoded first, which works on any GPU and in the interpreter (whose `dot_scaled` reads
all scales as E8M0). Small batches are not quantized: a decode step is bound by the bytes of W, which stay the same.

For E4M3 with a scale per row, torch's own product is the second candidate: the tuner takes it where it is faster, and
our kernel runs until then and on every GPU. With blocks torch has it on sm_90 alone, and for NVFP4 it needs the scales
in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..verify.tuning import Sampled, Shape, tuner
from .cards import AMD
from .codes import e4m3_value, half_value
from .launch import card_of, interpreting, launch, power_of_2, wait_for_previous
from .layout import Prepared
from .product import Extras, product
from .product_tiles import SMALL_TOKENS, Tile
from .quantize import quantize_e4m3, quantize_nvfp4

BLOCK = 128  # elements of x per scale if W has block scales


@triton.jit
def _store(acc, out_ptr, bias_ptr, rows, columns, m, n, BIAS: tl.constexpr):
    if BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    spot = (rows.to(tl.int64) * n)[:, None] + columns[None, :]
    tl.store(out_ptr + spot, acc.to(out_ptr.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit(do_not_specialize=["m"])
def _w8a8(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, row_scale_ptr, bias_ptr, out_ptr, m, n,
    BYTES: tl.constexpr, BLOCKS: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr, HAND: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, w: E4M3 [m, BYTES], [n, BYTES]; scales per 128 of x and 128 x 128 of w if BLOCKS, otherwise per row."""
    STEP: tl.constexpr = 128
    GROUPS: tl.constexpr = (BYTES + STEP - 1) // STEP
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(rows, m - 1).to(tl.int64)
    column = tl.minimum(columns, n - 1).to(tl.int64)
    lane = tl.arange(0, STEP)
    wait_for_previous(PDL)
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    for g in tl.range(0, GROUPS, num_stages=STAGES):
        k = g * STEP + lane
        if BYTES % STEP == 0:
            x = tl.load(x_ptr + (row * BYTES)[:, None] + k[None, :])
            w = tl.load(w_ptr + (column * BYTES)[None, :] + k[:, None])
        else:
            x = tl.load(x_ptr + (row * BYTES)[:, None] + k[None, :], mask=(k < BYTES)[None, :], other=0.0)
            w = tl.load(w_ptr + (column * BYTES)[None, :] + k[:, None], mask=(k < BYTES)[:, None], other=0.0)
        if HAND:
            part = tl.dot(e4m3_value(x.to(tl.int32)), e4m3_value(w.to(tl.int32)), input_precision="ieee")
        else:
            part = tl.dot(x, w)
        if BLOCKS:
            x_scale = tl.load(x_scale_ptr + row * GROUPS + g)
            w_scale = tl.load(w_scale_ptr + column // 128 * GROUPS + g)
            acc += part * x_scale[:, None] * w_scale[None, :]
        else:
            acc += part
    if not BLOCKS:
        acc *= tl.load(x_scale_ptr + row)[:, None]
    if ROW_SCALE:
        acc *= tl.load(row_scale_ptr + column)[None, :]
    _store(acc, out_ptr, bias_ptr, rows, columns, m, n, BIAS)


@triton.jit
def _nvfp4_values(codes, scales, HIGH_NIBBLE: tl.constexpr):
    """uint8 [A, B], E4M3 scales [A, B / 8] -> float32 [A, B] values of one nibble of each byte."""
    A: tl.constexpr = codes.shape[0]
    B: tl.constexpr = codes.shape[1]
    values = half_value(codes.to(tl.int32), 0, HIGH_NIBBLE, "e2m1", 4, 0, 0)
    spread = tl.broadcast_to(e4m3_value(scales.to(tl.int32))[:, :, None], (A, B // 8, 8))
    return values * tl.reshape(spread, (A, B))


@triton.jit(do_not_specialize=["m"])
def _w4a4(
    x_ptr, x_scale_ptr, x_row_scale_ptr, w_ptr, w_scale_ptr, row_scale_ptr, bias_ptr, out_ptr, m, n,
    BYTES: tl.constexpr, BIAS: tl.constexpr, HAND: tl.constexpr, OPERAND: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, w: E2M1 pairs [m, BYTES], [n, BYTES], E4M3 scales [.., BYTES / 8], float32 row scales; STEP bytes a step."""
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(rows, m - 1).to(tl.int64)
    column = tl.minimum(columns, n - 1).to(tl.int64)
    lane = tl.arange(0, STEP)
    group = tl.arange(0, STEP // 8)
    wait_for_previous(PDL)
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    for k in tl.range(0, BYTES, STEP, num_stages=STAGES):
        byte, block = k + lane, k // 8 + group
        at_x = x_ptr + (row * BYTES)[:, None] + byte[None, :]
        at_w = w_ptr + (column * BYTES)[:, None] + byte[None, :]
        at_xs = x_scale_ptr + (row * (BYTES // 8))[:, None] + block[None, :]
        at_ws = w_scale_ptr + (column * (BYTES // 8))[:, None] + block[None, :]
        if BYTES % STEP == 0:
            x, w, xs, ws = tl.load(at_x), tl.load(at_w), tl.load(at_xs), tl.load(at_ws)
        else:
            inside, whole = (byte < BYTES)[None, :], (block < BYTES // 8)[None, :]
            x, w = tl.load(at_x, mask=inside, other=0), tl.load(at_w, mask=inside, other=0)
            xs, ws = tl.load(at_xs, mask=whole, other=0.0), tl.load(at_ws, mask=whole, other=0.0)
        if HAND:
            for nibble in tl.static_range(2):
                a, b = _nvfp4_values(x, xs, nibble), _nvfp4_values(w, ws, nibble)
                if OPERAND == "bf16":
                    acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16).trans(), acc)
                else:
                    acc = tl.dot(a, b.trans(), acc, input_precision="ieee")
        else:
            acc = tl.dot_scaled(x, xs, "e2m1", w.trans(), ws, "e2m1", acc)
    acc *= tl.load(x_row_scale_ptr + row)[:, None] * tl.load(row_scale_ptr + column)[None, :]
    _store(acc, out_ptr, bias_ptr, rows, columns, m, n, BIAS)


OWN: Tile = {"library": 0}
LIBRARY: Tile = {"library": 1}
MOST_TIMED = 2048  # rows of x: with more the faster product is the same


def _library_product(codes: Tensor, scales: Tensor, p: Prepared, bias: Tensor | None, out: Tensor) -> Tensor:
    """torch's product of E4M3 rows; like ours it sums in the order of the stored bytes."""
    kind = torch.float8_e4m3fn
    weight = p.low.view(kind).view(p.shape[0], -1).t()
    assert p.row_scale is not None
    given = {"scale_a": scales, "scale_b": p.row_scale.view(1, -1), "out_dtype": out.dtype}
    torch._scaled_mm(codes.view(kind), weight, **given, out=out)
    return out if bias is None else out.add_(bias.to(out.dtype))


def _picked(x: Tensor, p: Prepared) -> Tile:
    """Which product is faster here; ours until the tuner has timed both, and where torch's does not apply."""
    applies = p.scales is None and p.row_scale is not None and p.shape[0] % 16 == 0 and x.dtype == torch.bfloat16
    if x.device.type != "cuda" or not applies or not 89 <= card_of(x.device).capability < AMD:
        return OWN
    tokens = min(power_of_2(x.shape[0]), MOST_TIMED)
    shape = Shape("linear_w8a8", (*p.shape, tokens))
    own = tuner(x.device)
    return own.picked(shape) or own.pick(shape, (OWN, LIBRARY), _trial(tokens, x, p))


def _trial(tokens: int, like: Tensor, p: Prepared) -> Sampled:
    """Return a trial of both products on random values, created only when it is needed."""
    (n, k), halves, device, dtype = p.shape, p.low.shape[1], like.device, like.dtype
    nothing = torch.empty(0, dtype=p.low.dtype)  # the trial keeps no weights
    empty = p._replace(low=nothing, row_scale=nothing)

    def made() -> tuple[Tensor, Prepared]:
        low = torch.randint(0, 1 << 14, (n, halves), dtype=nothing.dtype, device=device) & 0x3F3F  # all finite
        weight = empty._replace(low=low, row_scale=torch.full((n,), 0.01, device=device))
        return torch.randn(tokens, k, dtype=dtype, device=device), weight

    def trial(data: tuple[Tensor, Prepared], choice: Tile) -> Callable[[], Tensor]:
        return partial(narrow_product, *data, choice=choice)

    return Sampled(made, trial)


def narrow_product(x: Tensor, p: Prepared, bias: Tensor | None = None, choice: Tile | None = None) -> Tensor:
    """x [num_tokens, K], quantized to the weight's format (E4M3 or NVFP4), times the weight: [num_tokens, N].

    choice   OWN or LIBRARY instead of the tuner's
    """
    tokens = x.shape[0]
    cut = p.code != "e4m3" and p.shape[1] % 32 != 0  # the stored codes are padded, their scales are not
    if tokens <= SMALL_TOKENS or p.perm is not None or p.pre_scale is not None or cut:
        return product(x, p, Extras(bias))
    x, hand = x.contiguous(), interpreting()
    out = torch.empty(tokens, p.shape[0], dtype=x.dtype, device=x.device)
    kind = torch.uint8 if hand else torch.float8_e4m3fn

    def new(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(tokens, columns, dtype=dtype, device=x.device)

    def run(kernel: Any, *tensors: Tensor, least: int, stages: int, **more: Any) -> None:
        """Launch with tiles of 128 or 64 rows of x and of W; not measured."""
        side = 64 if max(tokens, least) <= 64 else 128
        grid = (-(-tokens // side), -(-p.shape[0] // side))
        more |= {"BIAS": bias is not None, "HAND": hand, "TOKENS": side, "ROWS": side, "STAGES": stages}
        tensors = (*tensors, tensors[0] if bias is None else bias, out)
        launch(kernel, grid, *tensors, *out.shape, num_warps=side // 16, num_stages=stages, **more)

    if p.code == "e4m3":
        padded = p.low.shape[1] * 2
        groups = 1 if p.scales is None else -(-padded // BLOCK)
        codes, scales = new(padded, torch.uint8), new(groups, torch.float32)
        block = BLOCK if groups > 1 or padded <= BLOCK else power_of_2(padded)
        sizes: dict[str, Any] = {"K": x.shape[1], "PADDED": padded, "BLOCK": block}
        launch(quantize_e4m3, (tokens, groups), x, codes, scales, num_warps=max(1, min(8, block // 256)), **sizes)
        if (_picked(x, p) if choice is None else choice) == LIBRARY:
            return _library_product(codes, scales, p, bias, out)
        weight = (p.low.view(kind), scales if p.scales is None else p.scales)
        has = {"BLOCKS": p.scales is not None, "ROW_SCALE": p.row_scale is not None}
        row_scale = scales if p.row_scale is None else p.row_scale
        stages = 2 if hand else 3
        run(_w8a8, codes.view(kind), scales, *weight, row_scale, least=64, stages=stages, BYTES=padded, **has)
        return out
    assert p.scales is not None and p.row_scale is not None
    padded = p.low.shape[1] * 4
    codes, scales, row_scales = new(padded // 2, torch.uint8), new(padded // 16, torch.uint8), new(1, torch.float32)
    block = power_of_2(padded)
    sizes = {"K": x.shape[1], "PADDED": padded, "BLOCK": block}
    launch(quantize_nvfp4, (tokens,), x, codes, scales, row_scales, num_warps=max(1, min(8, block // 512)), **sizes)
    given = (codes, scales.view(kind), row_scales, p.low.view(torch.uint8), p.scales.view(kind), p.row_scale)
    more = {"BYTES": padded // 2, "OPERAND": "f32" if hand else "bf16", "STEP": 32 if hand else 128}
    # sm_100 has no block-scaled instruction for fewer than 128 rows
    run(_w4a4, *given, least=64 if hand else 128, stages=2, **more)
    return out
