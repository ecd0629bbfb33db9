"""Keys and values into their slots: a few heads of one token a program, encoded where the pages hold 8 bits.

Codes and scales are those of `kv_codes.encode`, bit for bit: divisions are IEEE, E4M3 is made by its bits. Negative
slots are passed over, so a bucket of a captured graph may have rows that nothing fills.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..kv_pages import KVPages
from .e4m3 import encode_e4m3, round_even
from .hadamard import rotate_rows, run_length
from .launch import launch, wait_for_previous

TILE = 512  # elements of a program


@triton.jit
def store_vectors(
    x, pages, scales, slot, head, d, ok,
    DIM: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr, LAYER_SCALE: tl.constexpr,
):  # fmt: skip
    """Put float32 vectors x [rows, dims] of heads [rows, 1] into a token's slot; `ok` says which elements there are."""
    place = ((slot // PAGE) * KV_HEADS + head) * PAGE + slot % PAGE
    at = pages + place * DIM + d
    if (FORMAT == "int8") | (FORMAT == "fp8"):
        largest: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
        if LAYER_SCALE:
            wide = tl.div_rn(x, tl.load(scales) + tl.zeros_like(x))
        else:
            size = tl.abs(x)
            finite = tl.max((size < float("inf")).to(tl.int32) ^ 1, 1, keep_dims=True) == 0
            peak = tl.max(tl.where(finite, size, 0.0), 1, keep_dims=True)
            none = peak <= 1e-30
            safe = tl.where(none, 1.0, peak)
            inverse = tl.where(none, 0.0, tl.div_rn(tl.zeros_like(safe) + largest, safe))
            scale = tl.where(none, 0.0, tl.div_rn(peak, tl.zeros_like(peak) + largest))
            scale = tl.where(finite, scale, float("nan"))
            wide = tl.where(finite, x, 0.0) * inverse
            tl.store(scales + place, scale, mask=tl.max(ok.to(tl.int32), 1, keep_dims=True) > 0)
        if FORMAT == "fp8":
            codes = encode_e4m3(wide)
        else:
            codes = tl.minimum(tl.maximum(round_even(wide), -largest), largest).to(tl.int8)
        tl.store(at, codes, mask=ok)
    else:
        tl.store(at, x.to(pages.dtype.element_ty), mask=ok)


@triton.jit
def _kv_write(
    k, v, k_pages, v_pages, k_scales, v_scales, slot_mapping, k_stride, v_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, FORMAT: tl.constexpr, LAYER_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    slot = tl.load(slot_mapping + token) + tl.zeros([ROWS, 1], tl.int64)
    ok = (head < KV_HEADS) & (d < DIM) & (slot >= 0)
    slot = tl.maximum(slot, 0)
    wait_for_previous(PDL)
    key = tl.load(k + token * k_stride + head * DIM + d, mask=ok, other=0.0).to(tl.float32)
    if FORMAT == "int8":
        key = rotate_rows(key, RUN)
    store_vectors(key, k_pages, k_scales, slot, head, d, ok, DIM, KV_HEADS, PAGE, FORMAT, LAYER_SCALE)
    value = tl.load(v + token * v_stride + head * DIM + d, mask=ok, other=0.0).to(tl.float32)
    store_vectors(value, v_pages, v_scales, slot, head, d, ok, DIM, KV_HEADS, PAGE, FORMAT, LAYER_SCALE)


def page_constants(pages: KVPages) -> dict[str, Any]:
    """What of the pages is constant in a kernel that writes them."""
    kv_heads, page, dim = pages.k.shape[1:]
    return {
        "DIM": dim,
        "PADDED": triton.next_power_of_2(dim),
        "KV_HEADS": kv_heads,
        "PAGE": page,
        "ROWS": max(1, TILE // triton.next_power_of_2(dim)),
        "RUN": run_length(dim),
        "FORMAT": pages.format,
        "LAYER_SCALE": pages.k_scales is not None and pages.k_scales.dim() == 1,
    }


def page_tensors(pages: KVPages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k, v and their scales; pages in the place of scales that are not there."""
    if not (pages.k.is_contiguous() and pages.v.is_contiguous()):
        raise ValueError("pages must be contiguous")
    k_scales = pages.k if pages.k_scales is None else pages.k_scales
    return pages.k, pages.v, k_scales, pages.v if pages.v_scales is None else pages.v_scales


def kv_write(k: Tensor, v: Tensor, pages: KVPages, slot_mapping: Tensor) -> None:
    """As `reference.kv_write`; k, v [num_tokens, num_kv_heads, head_dim], tokens may be strided.

    slot_mapping  int64 [num_tokens]; a negative slot is passed over
    """
    k, v = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (k, v))
    constants = page_constants(pages)
    grid = (k.shape[0], triton.cdiv(k.shape[1], constants["ROWS"]))
    tensors = (k, v, *page_tensors(pages), slot_mapping)
    launch(_kv_write, grid, *tensors, k.stride(0), v.stride(0), **constants)
