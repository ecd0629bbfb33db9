"""Index scores of sparse attention: a tile of queries, all heads of each, against a tile of block keys per program.

In plain PyTorch the products of every head are written, read and summed: at 200,000 tokens with four heads 0.8 MB per
query. Here they stay in registers. A score's additions have the same order in every batch and for any number of blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, float32

from .launch import card_of, interpreting, launch, power_of_2

ROWS = 16  # rows of the product, at least: queries times heads
KEYS, SCORES = 64, 4096  # most keys of a tile; products of a tile, if it has more than 64 rows
STEP = 128  # elements of a head at once


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _score_keys(
    q, keys, places, out, num_queries, num_keys,
    HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PLACED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sum over HEADS of relu(q · k) of QUERIES queries and KEYS keys; heads are padded to PADDED.

    PLACED  a query has keys of its own: those at its `places`
    """
    row = tl.arange(0, QUERIES * PADDED)
    query = tl.program_id(1).to(tl.int64) * QUERIES + row // PADDED
    ok = (query < num_queries) & (row % PADDED < HEADS)
    from_q = q + (query * HEADS + row % PADDED) * DIM
    key = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    seen, at = key < num_keys, key
    if PLACED:
        at = tl.load(places + tl.program_id(1).to(tl.int64) * num_keys + key, mask=seen, other=-1).to(tl.int64)
        seen = at >= 0
    products = tl.zeros([QUERIES * PADDED, KEYS], tl.float32)
    for start in tl.static_range(0, DIM, STEP):
        d = start + tl.arange(0, STEP)
        left = tl.load(from_q[:, None] + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)
        right = tl.load(keys + at[None, :] * DIM + d[:, None], mask=seen[None, :] & (d < DIM)[:, None], other=0.0)
        if INTERPRET or left.dtype != right.dtype:
            left, right = left.to(tl.float32), right.to(tl.float32)
        products = tl.dot(left, right, products, input_precision="ieee")
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    total = tl.sum(tl.reshape(products, [QUERIES, PADDED, KEYS]), 1)
    total = tl.where(total == total, total, 0.0)
    query = tl.program_id(1).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    ok = (query < num_queries)[:, None] & (key < num_keys)[None, :]
    tl.store(out + query[:, None] * num_keys + key[None, :], total, mask=ok)


def index_scores(q: Tensor, keys: Tensor, places: Tensor | None = None) -> Tensor:
    """`reference.index_scores`."""
    count, heads, dim = q.shape
    num_keys = keys.shape[0] if places is None else places.shape[1]
    out = empty((count, num_keys), dtype=float32, device=q.device)
    padded, step = power_of_2(heads), min(max(16, power_of_2(dim)), STEP)
    queries = max(1, ROWS // padded)
    if places is not None:  # the rows of one query are fewer than a product has
        padded, queries = max(ROWS, padded), 1
    tile = max(16, min(KEYS, SCORES // (queries * padded)))
    sizes = {"HEADS": heads, "PADDED": padded, "DIM": dim, "STEP": step, "QUERIES": queries, "KEYS": tile}
    grid = -(-num_keys // tile), -(-count // queries)
    tensors = q.contiguous(), keys.contiguous(), keys if places is None else places.contiguous(), out
    # without bfloat16 or float16 on both sides products are plain multiplications, with more registers
    warps = 4 if q.dtype == keys.dtype and card_of(q.device).capability >= 80 else 8
    sizes |= {"PLACED": places is not None, "INTERPRET": interpreting()}
    launch(_score_keys, grid, *tensors, count, num_keys, num_warps=warps, **sizes)
    return out
