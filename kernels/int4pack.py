"""`linear` for `int4g` through PyTorch's own int4 product for the CPU: bfloat16 activations, no compiler needed.

w = (q - 8) * scale + zero with bfloat16 scale and zero, and a float32 sum: a relative error near 0.3 %, so it is passed
over when a dtype was asked for by name. A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import Impl, LinearFacts
from .dense_linear import gathered
from .dequant import dequantize, row_chunk, unpack_nibbles
from .weight import Weight

GROUP_SIZES = (32, 64, 128, 256)
"""What the operator accepts."""
BLOCK_ROWS = 64
"""Rows the widest layout (AVX-512) interleaves; the operator pads none."""


class Int4Pack(NamedTuple):
    """Codes in the operator's layout; the stored scales stay beside the rounded ones so that `unpack` is exact."""

    packed: Tensor
    """u8 [N, K/2]"""
    scales_and_zeros: Tensor
    """bf16 [K/g, N, 2]"""
    weight: Weight
    """the canonical weight, its qweight empty"""


@lru_cache(maxsize=1)
def _layout() -> tuple[int, Tensor] | None:
    """How this CPU interleaves the codes: (rows of a block, source row of each nibble), or None when not recognised.

    Row numbers are packed as codes, one hexadecimal digit at a time, and read back; random codes then confirm it.
    """
    columns = 32
    numbers = torch.arange(BLOCK_ROWS, dtype=torch.int32)
    codes = torch.arange(BLOCK_ROWS * columns, dtype=torch.int32).mul_(40503).bitwise_right_shift_(7).bitwise_and_(15)
    for rows in (64, 32, 16):
        digits = [
            unpack_nibbles(_convert(digit.view(-1, 1).repeat(1, columns)).flatten()[: rows // 2])
            for digit in (numbers & 15, numbers >> 4)
        ]
        source = digits[0].int() + 16 * digits[1].int()
        if sorted(source.tolist()) != list(range(rows)):
            continue
        q = codes.view(BLOCK_ROWS, columns)
        if torch.equal(_unpack_codes(_convert(q), q.shape, rows, source), q.to(torch.uint8)):
            return rows, source
    return None


def _convert(codes: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int().contiguous(), 1)


def _unpack_codes(packed: Tensor, shape: tuple[int, ...], rows: int, source: Tensor) -> Tensor:
    """u8 [N, K]: blocks of `rows` rows, column after column, each column's nibbles in the order `source`."""
    n, k = shape
    nibbles = unpack_nibbles(packed.view(n // rows, k, rows // 2))  # [blocks, K, rows]
    return nibbles[..., torch.argsort(source)].transpose(1, 2).reshape(n, k)


def _fits(facts: LinearFacts) -> str | None:
    n, k = facts.shape
    if facts.form != "int4g":
        return f"form {facts.form} is not int4g"
    if facts.device != "cpu":
        return f"runs on the CPU, not on {facts.device}"
    if facts.exact:
        return f"rounds activations to bfloat16 and {facts.dtype} was asked for"
    if facts.group_size not in GROUP_SIZES:
        return f"group size {facts.group_size} is none of {', '.join(map(str, GROUP_SIZES))}"
    if n % BLOCK_ROWS or k % facts.group_size:
        return f"shape {n}x{k} is no multiple of {BLOCK_ROWS}x{facts.group_size}"
    return None if _layout() else "this CPU packs the codes in an unknown order"


def _prepare(weight: Weight) -> Int4Pack:
    n, k = weight.shape
    assert weight.scales is not None
    packed = torch.empty(n, k // 2, dtype=torch.uint8)
    step = max(BLOCK_ROWS, row_chunk(k) // BLOCK_ROWS * BLOCK_ROWS)
    for start in range(0, n, step):
        packed[start : start + step] = _convert(unpack_nibbles(weight.qweight[start : start + step]))
    scales = weight.scales.float()
    if weight.mins is not None:
        zeros = weight.mins.float() + 8 * scales
    else:
        zeros = torch.zeros_like(scales) if weight.zeros is None else scales * (8 - weight.zeros.float())
    pairs = torch.stack([scales, zeros], -1).transpose(0, 1).contiguous().bfloat16()
    return Int4Pack(packed, pairs, weight._replace(qweight=torch.empty(0, dtype=torch.uint8)))


def _run(x: Tensor, prepared: Int4Pack, bias: Tensor | None) -> Tensor:
    weight = prepared.weight
    inputs = gathered(x, weight.perm, weight.pre_scale).bfloat16().contiguous()
    out = torch.ops.aten._weight_int4pack_mm_for_cpu(
        inputs, prepared.packed, weight.group_size, prepared.scales_and_zeros
    ).to(x.dtype)
    return out if bias is None else out + bias.to(x.dtype)


def _unpack(prepared: Int4Pack) -> Tensor:
    layout = _layout()
    assert layout is not None
    codes = _unpack_codes(prepared.packed, prepared.weight.shape, *layout)
    return dequantize(prepared.weight._replace(qweight=codes[:, 0::2] | (codes[:, 1::2] << 4)))


def _nbytes(prepared: Int4Pack) -> int:
    pairs = prepared.scales_and_zeros
    return prepared.packed.numel() + pairs.numel() * pairs.element_size() + prepared.weight.nbytes


INT4PACK = Impl("torch_int4pack", _fits, _prepare, _run, _unpack, _nbytes)
