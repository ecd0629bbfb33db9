"""Batch-invariant `linear` on dense weights in plain PyTorch.

A GEMM may sum over K in a different order when the number of rows changes (a GEMV routine for one row, other blocking
for many). Rows are therefore split into tiles of sizes verified to give identical bits for this shape on this machine;
the remainder is padded to such a size.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .dequant import row_chunk, stored_rows
from .embedding import RowReader, weight_rows
from .registry import Impl, LinearFacts, fits_always
from .weight import Weight

ANCHOR = 16  # rows of the tile that all other sizes are compared with
TILES = (1, 2, 4, 8, ANCHOR, 64, 256)
PROOF_BUDGET = 1 << 32  # multiply-adds of the largest tile to verify: about 40 ms on two cores

_proven: dict[
    tuple, tuple[int, ...]
] = {}  # a memo: (N, K, dtype, device, threads, packed) -> tiles; the proof takes ms


class DenseWeight(NamedTuple):
    """A dense weight ready to multiply."""

    shape: tuple[int, int]
    matrix: Tensor  # [N, K] float32 or bfloat16, columns in stored order; oneDNN's own layout where `packed`
    packed: bool
    tiles: tuple[int, ...]  # row counts that give identical bits, ascending; empty before verification
    perm: Tensor | None
    pre_scale: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        extra = sum(t.numel() * t.element_size() for t in (self.perm, self.pre_scale) if t is not None)
        return self.shape[0] * self.shape[1] * self.matrix.element_size() + extra


def _pack(matrix: Tensor) -> tuple[Tensor, bool]:
    """Pack into oneDNN's blocked layout if available: 1.3 to 6 times as fast as F.linear for 1 to 16 rows."""
    if matrix.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return matrix, False
    if matrix.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return matrix, False
    return torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), ANCHOR), True


def _dense_matrix(weight: Weight, dtype: torch.dtype) -> Tensor:
    """[N, K] in stored column order: the stored tensor if already `dtype`, else converted chunk by chunk."""
    n, k = weight.shape
    if weight.form == "dense" and weight.qweight.dtype == dtype:
        return weight.qweight
    out = torch.empty(n, k, dtype=dtype, device=weight.qweight.device)
    step = row_chunk(k)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        out[rows] = stored_rows(weight, rows)
    return out


def _product(x: Tensor, w: DenseWeight, bias: Tensor | None) -> Tensor:
    if w.packed:
        return torch.ops.mkldnn._linear_pointwise(x, w.matrix, bias, "none", [], "")
    return F.linear(x, w.matrix, bias)


def _tiles(w: DenseWeight, rows: Tensor) -> tuple[int, ...]:
    """Sizes in TILES whose rows are bit-identical to those of the anchor tile; (1,) if a row's position matters.

    rows   [max(TILES), K]: the `_probe_rows` of the unpacked matrix
    """
    n, k = w.shape
    key = (n, k, w.matrix.dtype, str(w.matrix.device), torch.get_num_threads(), w.packed)
    if key in _proven:
        return _proven[key]
    sizes = [size for size in TILES if size <= ANCHOR or n * k * size <= PROOF_BUDGET]
    x = _orthogonal(rows[: max(sizes)])
    if 2 * int(x.count_nonzero()) < x.numel():
        return (ANCHOR,)  # mostly zeros: no evidence for other weights of this shape, so nothing is cached
    _proven[key] = _prove(w, x, sizes)
    return _proven[key]


def _probe_rows(n: int, device: torch.device) -> Tensor:
    return (torch.arange(max(TILES), device=device) * 7919) % n


def _orthogonal(rows: Tensor) -> Tensor:
    """For each row w, an x with x . w = 0 exactly: x[a] = w[b], x[b] = -w[a] for pairs (a, b) scattered over K.

    The computed product is then pure rounding error, which reveals the summation order even after rounding to bfloat16.
    """
    count, k = rows.shape
    scattered = torch.from_numpy(np.random.default_rng(1).permutation(k)).to(rows.device)
    order = torch.stack([scattered.roll(i) for i in range(count)])
    a, b = order[:, 0 : k // 2 * 2 : 2], order[:, 1::2]
    return torch.zeros_like(rows).scatter_(1, a, rows.gather(1, b)).scatter_(1, b, -rows.gather(1, a))


def _prove(w: DenseWeight, x: Tensor, sizes: list[int]) -> tuple[int, ...]:
    anchor = _product(x[:ANCHOR], w, None)
    if not torch.equal(_product(x[:ANCHOR].flip(0).contiguous(), w, None).flip(0), anchor):
        return (1,)
    good = []
    for size in sizes:
        if size <= ANCHOR:
            starts = {0, ANCHOR - size}
            same = all(torch.equal(_product(x[s : s + size], w, None), anchor[s : s + size]) for s in starts)
        else:
            wide = _product(x[:size], w, None)
            steps = range(0, size, ANCHOR)
            same = all(torch.equal(_product(x[s : s + ANCHOR], w, None), wide[s : s + ANCHOR]) for s in steps)
        if same:
            good.append(size)
    return tuple(good)


def _prepare(weight: Weight, *, keeps_bfloat16: bool = False) -> DenseWeight:
    """Convert to float32, which is exact for every form; with `keeps_bfloat16`, stored bfloat16 stays bfloat16."""
    dtype = torch.bfloat16 if keeps_bfloat16 and weight.qweight.dtype == torch.bfloat16 else torch.float32
    matrix = _dense_matrix(weight, dtype)
    rows = matrix[_probe_rows(weight.shape[0], matrix.device)]
    matrix, packed = _pack(matrix)
    bare = DenseWeight(weight.shape, matrix, packed, (), weight.perm, weight.pre_scale)
    return bare._replace(tiles=_tiles(bare, rows))


def gathered(x: Tensor, perm: Tensor | None, pre_scale: Tensor | None) -> Tensor:
    """Apply `pre_scale`, then `perm`, to x [num_tokens, K], to match the stored column order."""
    if pre_scale is not None:
        x = x * pre_scale.to(x.dtype)
    if perm is not None:
        x = x.index_select(1, perm)
    return x


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0]))


def _next_tile(left: int, tiles: tuple[int, ...]) -> int:
    """The largest tile that `left` rows fill, or the next larger one if they fill more than half of it."""
    fits = max((size for size in tiles if size <= left), default=0)
    above = next((size for size in tiles if size >= left), 0)
    return above if above and (not fits or left * 2 > above) else fits


def _run(x: Tensor, w: DenseWeight, bias: Tensor | None, *, whole: bool = False) -> Tensor:
    """Multiply in bit-stable tiles, or all rows at once if `whole` (not batch-invariant)."""
    inputs = gathered(x, w.perm, w.pre_scale).to(w.matrix.dtype).contiguous()
    bias = None if bias is None else bias.to(w.matrix.dtype)
    rows = inputs.shape[0]
    if rows in w.tiles or (whole and rows):
        return _product(inputs, w, bias).to(x.dtype)
    out = torch.empty(rows, w.shape[0], dtype=x.dtype, device=x.device)
    start = 0
    while start < rows:
        size = _next_tile(rows - start, w.tiles)
        tile = inputs[start : start + size]
        filled = tile.shape[0]
        out[start : start + filled] = _product(tile if filled == size else _padded(tile, size), w, bias)[:filled]
        start += filled
    return out


def _rows(w: DenseWeight) -> RowReader | None:
    """None if packed: oneDNN's layout is opaque, so rows cannot be addressed."""
    return None if w.packed else weight_rows(Weight("dense", w.shape, w.matrix, perm=w.perm, pre_scale=w.pre_scale))


def _fits_bfloat16(facts: LinearFacts) -> str | None:
    if facts.form != "dense":
        return f"form {facts.form} would lose bits in bfloat16"
    return None if facts.dtype == "bfloat16" else f"activations are {facts.dtype}"


def _fits_whole(facts: LinearFacts) -> str | None:
    return "sums in an order that depends on the batch" if facts.deterministic else _fits_float32(facts)


def _fits_float32(facts: LinearFacts) -> str | None:
    """On a GPU the memory plan counts stored bytes, and a float32 copy could take eight times as many."""
    if facts.device != "cpu" and (facts.dtype != "float32" or facts.form != "dense"):
        return "the GPU memory plan has no room for a float32 copy of the weights"
    return None


def _run_stored(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Dequantize row chunks of the weight on every call; x is multiplied in tiles of ANCHOR rows, a fixed order."""
    n, k = weight.shape
    inputs = gathered(x.float(), weight.perm, weight.pre_scale)
    rows = inputs.shape[0]
    tiles = _padded(inputs, -(-rows // ANCHOR) * ANCHOR).split(ANCHOR) if rows else ()
    out = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    step = row_chunk(k)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        matrix = stored_rows(weight, part)
        for index, tile in enumerate(tiles):
            place = slice(index * ANCHOR, min((index + 1) * ANCHOR, rows))
            out[place, part] = F.linear(tile, matrix)[: place.stop - place.start]
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype)


DENSE_BF16 = Impl("linear", "torch_dense_bf16", _fits_bfloat16, _run, partial(_prepare, keeps_bfloat16=True), _rows)
DENSE_TILED = Impl("linear", "torch_dense_tiled", _fits_float32, _run, _prepare, _rows)
DENSE = Impl("linear", "torch_dense", _fits_whole, partial(_run, whole=True), _prepare, _rows)
REFERENCE = Impl("linear", "torch_dequant", fits_always, _run_stored, lambda weight: weight, weight_rows)
