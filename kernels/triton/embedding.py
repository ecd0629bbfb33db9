"""Rows of a dense table, scaled and cast on the way: one launch for lookup, cast and scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import TYPES, launch

BLOCK = 2048


@triton.jit
def _rows(token_ids, table, out, scale, dim, num_blocks, BLOCK: tl.constexpr, TABLE: tl.constexpr):
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    d = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row).to(tl.int64)
    x = tl.load(table + token * dim + d, mask=d < dim, other=0.0).to(tl.float32)
    if (
        out.dtype.element_ty == tl.bfloat16 and TABLE != "bf16"
    ):  # the reference casts first, then scales in the type of out
        x = x.to(tl.bfloat16).to(tl.float32)
    elif out.dtype.element_ty == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    tl.store(out + row * dim + d, (x * scale).to(out.dtype.element_ty), mask=d < dim)


def embedding(token_ids: Tensor, table: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """As `reference.embedding`: token_ids int64 [num_tokens], table [vocab, hidden] -> [num_tokens, hidden] `dtype`."""
    if not table.is_contiguous():
        raise ValueError("the table must be contiguous")
    dim = table.shape[1]
    out = torch.empty((token_ids.shape[0], dim), dtype=dtype, device=table.device)
    blocks = triton.cdiv(dim, BLOCK)
    grid = (token_ids.shape[0] * blocks,)
    launch(
        _rows, grid, token_ids, table, out, scale, dim, blocks, BLOCK=BLOCK, TABLE=TYPES[table.dtype].removeprefix("*")
    )
    return out
