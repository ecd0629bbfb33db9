"""Products whose activations are rounded as well, by permission: when they run, how they are launched.

Few rows of x stay exact: a decoding step is bound by the bytes of W, and rounding x would save none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import narrow, quantize
from .aot_spec import KernelSpec
from .launch import Launch, interpreting, pdl
from .layout import Prepared
from .probe import FP4_CAPABILITY, FP8_CAPABILITY, NVFP4_INSTRUCTION, NVFP4_LABEL
from .product import Extras, product
from .product_specs import FORMS, Form, described
from .product_tiles import SMALL_TOKENS

__all__ = ["fp8_product", "nvfp4_product", "specs"]

BLOCK = 128
"""elements of x that share a scale where W has a scale per block"""
HIDDEN = 4096


def _next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _tile(tokens: int, least: int = 64) -> dict[str, int]:
    """Rows of x and of W in a program, and its warps. Not measured."""
    if max(tokens, least) <= 64:
        return {"TOKENS": 64, "ROWS": 64, "num_warps": 4}
    return {"TOKENS": 128, "ROWS": 128, "num_warps": 8}


def _grid(m: int, n: int, tile: dict[str, int]) -> tuple[int, int]:
    return -(-m // tile["TOKENS"]), -(-n // tile["ROWS"])


# ---- FP8


def e4m3_launch(x: Tensor, codes: Tensor, scales: Tensor, with_pdl: bool) -> Launch:
    """`quantize.quantise_e4m3_kernel`: x [m, K] -> codes [m, padded K], scales [m, 1 or K / 128]."""
    groups, padded = scales.shape[1], codes.shape[1]
    block = BLOCK if groups > 1 or padded <= BLOCK else _next_power(padded)
    args: dict[str, Tensor | int | float] = {"x_ptr": x, "code_ptr": codes, "scale_ptr": scales}
    constants = {"K": x.shape[1], "PADDED": padded, "GROUP": block, "BLOCK": block, "PDL": with_pdl}
    warps = max(1, min(8, block // 256))
    return Launch(quantize.quantise_e4m3_kernel, (x.shape[0], groups), args, constants, warps, launch_pdl=with_pdl)


def w8a8_launch(
    codes: Tensor, scales: Tensor, p: Prepared, out: Tensor, bias: Tensor | None, hand: bool, with_pdl: bool
) -> Launch:
    """`narrow.w8a8_kernel` on codes as `e4m3_launch` leaves them."""
    m, tile = out.shape[0], _tile(out.shape[0])
    kind = torch.uint8 if hand else torch.float8_e4m3fn
    args = {
        "x_ptr": codes.view(kind),
        "x_scale_ptr": scales,
        "w_ptr": p.low.view(kind),
        "w_scale_ptr": scales if p.scales is None else p.scales,
        "row_scale_ptr": scales if p.row_scale is None else p.row_scale,
        "bias_ptr": scales if bias is None else bias,
        "out_ptr": out,
        "m": m,
        "n": p.shape[0],
    }
    stages = 2 if hand else 3
    constants = {
        "BYTES": codes.shape[1],
        "BLOCKS": p.scales is not None,
        "ROW_SCALE": p.row_scale is not None,
        "BIAS": bias is not None,
        "HAND": hand,
        "TOKENS": tile["TOKENS"],
        "ROWS": tile["ROWS"],
        "STAGES": stages,
        "PDL": with_pdl,
    }
    grid = _grid(m, p.shape[0], tile)
    return Launch(narrow.w8a8_kernel, grid, args, constants, tile["num_warps"], stages, with_pdl)


def fp8_product(x: Tensor, p: Prepared, bias: Tensor | None = None) -> Tensor:
    """x [num_tokens, K], rounded to E4M3, times an FP8 weight: [num_tokens, N], dtype of x."""
    if x.shape[0] <= SMALL_TOKENS or p.perm is not None or p.pre_scale is not None:
        return product(x, p, Extras(bias))
    x, with_pdl = x.contiguous(), pdl(x.device)
    padded = p.low.shape[1] * 2
    groups = 1 if p.scales is None else -(-padded // BLOCK)
    codes = torch.empty(x.shape[0], padded, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape[0], p.shape[0], dtype=x.dtype, device=x.device)
    e4m3_launch(x, codes, scales, with_pdl).start()
    w8a8_launch(codes, scales, p, out, bias, interpreting(), with_pdl).start()
    return out


# ---- NVFP4


def nvfp4_launch(x: Tensor, codes: Tensor, scales: Tensor, row_scales: Tensor, with_pdl: bool) -> Launch:
    """`quantize.quantise_nvfp4_kernel`: x [m, K] -> codes [m, padded K / 2], scales [m, padded K / 16], [m]."""
    args: dict[str, Tensor | int | float] = {
        "x_ptr": x,
        "code_ptr": codes,
        "scale_ptr": scales,
        "row_scale_ptr": row_scales,
    }
    padded = codes.shape[1] * 2
    block = _next_power(padded)
    constants = {"K": x.shape[1], "PADDED": padded, "BLOCK": block, "PDL": with_pdl}
    warps = max(1, min(8, block // 512))
    return Launch(quantize.quantise_nvfp4_kernel, (x.shape[0],), args, constants, warps, launch_pdl=with_pdl)


def w4a4_launch(
    codes: Tensor,
    scales: Tensor,
    row_scales: Tensor,
    p: Prepared,
    out: Tensor,
    bias: Tensor | None,
    hand: bool,
    with_pdl: bool,
) -> Launch:
    """`narrow.w4a4_kernel` on codes as `nvfp4_launch` leaves them."""
    assert p.scales is not None and p.row_scale is not None
    # with fewer than 128 rows sm_100 has no block-scaled instruction
    m, tile = out.shape[0], _tile(out.shape[0], 64 if hand else 128)
    kind = torch.uint8 if hand else torch.float8_e4m3fn
    args = {
        "x_ptr": codes,
        "x_scale_ptr": scales.view(kind),
        "x_row_scale_ptr": row_scales,
        "w_ptr": p.low.view(torch.uint8),
        "w_scale_ptr": p.scales.view(kind),
        "row_scale_ptr": p.row_scale,
        "bias_ptr": row_scales if bias is None else bias,
        "out_ptr": out,
        "m": m,
        "n": p.shape[0],
    }
    constants = {
        "BYTES": codes.shape[1],
        "BIAS": bias is not None,
        "HAND": hand,
        "OPERAND": "f32" if interpreting() else "bf16",
        "TOKENS": tile["TOKENS"],
        "ROWS": tile["ROWS"],
        "STEP": 32 if hand else 128,
        "STAGES": 2,
        "PDL": with_pdl,
    }
    return Launch(narrow.w4a4_kernel, _grid(m, p.shape[0], tile), args, constants, tile["num_warps"], 2, with_pdl)


def nvfp4_product(x: Tensor, p: Prepared, bias: Tensor | None = None) -> Tensor:
    """x [num_tokens, K], rounded to NVFP4, times an NVFP4 weight: [num_tokens, N], dtype of x."""
    if x.shape[0] <= SMALL_TOKENS or p.perm is not None or p.pre_scale is not None:
        return product(x, p, Extras(bias))
    x, with_pdl = x.contiguous(), pdl(x.device)
    tokens, width = x.shape[0], p.low.shape[1] * 2
    codes = torch.empty(tokens, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, width // 8, dtype=torch.uint8, device=x.device)
    row_scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    out = torch.empty(tokens, p.shape[0], dtype=x.dtype, device=x.device)
    nvfp4_launch(x, codes, scales, row_scales, with_pdl).start()
    w4a4_launch(codes, scales, row_scales, p, out, bias, interpreting(), with_pdl).start()
    return out


# ---- what is compiled ahead of time


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def specs(card: int) -> Iterator[KernelSpec]:
    """The kernels above on a card of that compute capability."""
    with_pdl, dtype = card >= 90, torch.bfloat16
    forms = {form.name: form for form in FORMS}
    for tokens in (64, 256):
        x, out = _empty(dtype, tokens, HIDDEN), _empty(dtype, tokens, HIDDEN)
        if card >= FP8_CAPABILITY:
            yield from _fp8_specs(forms, x, out, with_pdl)
        elif tokens >= 128:
            why = "no FP8 instructions below compute capability 8.9"
            yield KernelSpec("linear", "triton_fp8_w8a8", f"e4m3 w8a8 M={tokens}", None, {}, reason=why)
        if card < FP4_CAPABILITY and tokens >= 128:
            why = "no FP4 instructions below compute capability 10.0"
            yield KernelSpec("linear", "triton_nvfp4_w4a4", NVFP4_LABEL, None, {}, reason=why)
        if card >= FP4_CAPABILITY and tokens >= 128:
            p = described(forms["e2m1 e4m3"], HIDDEN, HIDDEN)
            parts = _empty(torch.uint8, tokens, HIDDEN // 2), _empty(torch.uint8, tokens, HIDDEN // 16)
            row_scales = _empty(torch.float32, tokens)
            yield nvfp4_launch(x, *parts, row_scales, with_pdl).spec("quantise", "triton", "nvfp4")
            launch = w4a4_launch(*parts, row_scales, p, out, None, False, with_pdl)
            yield launch.spec("linear", "triton_nvfp4_w4a4", NVFP4_LABEL, expect_mma=NVFP4_INSTRUCTION)


def _fp8_specs(forms: dict[str, Form], x: Tensor, out: Tensor, with_pdl: bool) -> Iterator[KernelSpec]:
    tokens, k = x.shape
    for name, groups in (("e4m3 row", 1), ("e4m3 block128", k // BLOCK)):
        p = described(forms[name], out.shape[1], k)
        codes, scales = _empty(torch.uint8, tokens, k), _empty(torch.float32, tokens, groups)
        if tokens == 64:
            yield e4m3_launch(x, codes, scales, with_pdl).spec("quantise", "triton", name)
        launch = w8a8_launch(codes, scales, p, out, None, False, with_pdl)
        yield launch.spec("linear", "triton_fp8_w8a8", f"{name} w8a8 M={tokens}")
