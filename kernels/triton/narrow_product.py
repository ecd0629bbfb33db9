"""Products whose activations are rounded as well, by permission: when they run, how they are launched.

Few rows of x stay exact: a decoding step is bound by the bytes of W, and rounding x would save none of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from . import narrow
from .launch import interpreting, launch
from .layout import Prepared
from .product import Extras, product
from .product_tiles import SMALL_TOKENS
from .quantize import quantize_e4m3, quantize_nvfp4

BLOCK = 128  # elements of x that share a scale where W has a scale per block


def _tile(tokens: int, least: int = 64) -> tuple[dict[str, Any], int]:
    """Rows of x and of W in a program, and its warps. Not measured."""
    if max(tokens, least) <= 64:
        return {"TOKENS": 64, "ROWS": 64}, 4
    return {"TOKENS": 128, "ROWS": 128}, 8


def fp8_product(x: Tensor, p: Prepared, bias: Tensor | None = None) -> Tensor:
    """x [num_tokens, K], rounded to E4M3, times an FP8 weight: [num_tokens, N], dtype of x."""
    if x.shape[0] <= SMALL_TOKENS or p.perm is not None or p.pre_scale is not None:
        return product(x, p, Extras(bias))
    x, padded = x.contiguous(), p.low.shape[1] * 2
    groups = 1 if p.scales is None else -(-padded // BLOCK)
    codes = torch.empty(x.shape[0], padded, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape[0], p.shape[0], dtype=x.dtype, device=x.device)
    block = BLOCK if groups > 1 or padded <= BLOCK else triton.next_power_of_2(padded)
    sizes: dict[str, Any] = {"K": x.shape[1], "PADDED": padded, "GROUP": block, "BLOCK": block}
    launch(quantize_e4m3, (x.shape[0], groups), x, codes, scales, num_warps=max(1, min(8, block // 256)), **sizes)
    hand = interpreting()
    tile, warps = _tile(x.shape[0])
    kind, stages = (torch.uint8, 2) if hand else (torch.float8_e4m3fn, 3)
    launch(
        narrow.w8a8_kernel,
        (-(-out.shape[0] // tile["TOKENS"]), -(-out.shape[1] // tile["ROWS"])),
        *(codes.view(kind), scales, p.low.view(kind), scales if p.scales is None else p.scales),
        *(scales if part is None else part for part in (p.row_scale, bias)),
        *(out, *out.shape),
        BYTES=padded,
        BLOCKS=p.scales is not None,
        ROW_SCALE=p.row_scale is not None,
        BIAS=bias is not None,
        HAND=hand,
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
        **tile,
    )
    return out


def nvfp4_product(x: Tensor, p: Prepared, bias: Tensor | None = None) -> Tensor:
    """x [num_tokens, K], rounded to NVFP4, times an NVFP4 weight: [num_tokens, N], dtype of x."""
    if x.shape[0] <= SMALL_TOKENS or p.perm is not None or p.pre_scale is not None:
        return product(x, p, Extras(bias))
    assert p.scales is not None and p.row_scale is not None
    x, (tokens, padded) = x.contiguous(), (x.shape[0], p.low.shape[1] * 4)
    codes = torch.empty(tokens, padded // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, padded // 16, dtype=torch.uint8, device=x.device)
    row_scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    out = torch.empty(tokens, p.shape[0], dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(padded)
    sizes: dict[str, Any] = {"K": x.shape[1], "PADDED": padded, "BLOCK": block}
    warps = max(1, min(8, block // 512))
    launch(quantize_nvfp4, (tokens,), x, codes, scales, row_scales, num_warps=warps, **sizes)
    hand = interpreting()
    # with fewer than 128 rows sm_100 has no block-scaled instruction
    tile, warps = _tile(tokens, 64 if hand else 128)
    kind = torch.uint8 if hand else torch.float8_e4m3fn
    launch(
        narrow.w4a4_kernel,
        (-(-out.shape[0] // tile["TOKENS"]), -(-out.shape[1] // tile["ROWS"])),
        *(codes, scales.view(kind), row_scales, p.low.view(torch.uint8), p.scales.view(kind), p.row_scale),
        *(row_scales if bias is None else bias, out, *out.shape),
        BYTES=padded // 2,
        BIAS=bias is not None,
        HAND=hand,
        OPERAND="f32" if hand else "bf16",
        STEP=32 if hand else 128,
        STAGES=2,
        num_warps=warps,
        num_stages=2,
        **tile,
    )
    return out
