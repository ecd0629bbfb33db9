"""`linear` for `int4g` with PyTorch's int4 CPU operator, which takes bfloat16; needs no C compiler.

w = (q - 8) * scale + zero. Activations, scales and zeros are each split into a bfloat16 value and a bfloat16 remainder,
and three products are summed; the remaining relative error, 0.1 %, is the rounding of the operator itself. A single
product has 0.3 % and changes the starter model's greedy answer (mean KL to float32 over one chat: 0.0011 instead of
0.0004; all float32: 0.0001). Not used when the user requested a dtype. Batch-invariant.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dense_linear import gathered
from .dequant import row_chunk, unpack_nibbles
from .registry import Impl, LinearFacts
from .weight import Weight

GROUP_SIZES = (32, 64, 128, 256)  # supported by the operator
BLOCK_ROWS = 64  # rows interleaved by the widest layout (AVX-512); the operator does not pad


class Int4Pack(NamedTuple):
    """Codes u8 [N, K/2] and scales and zeros bf16 [K/g, N, 2], in the operator's layout.

    rest   bf16 remainder of `scales_and_zeros`
    """

    packed: Tensor
    scales_and_zeros: Tensor
    rest: Tensor
    group_size: int
    perm: Tensor | None
    pre_scale: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self if isinstance(t, Tensor))


def _convert(codes: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int().contiguous(), 1)


def _fits(facts: LinearFacts) -> str | None:
    n, k = facts.shape
    if facts.form != "int4g":
        return f"form {facts.form} is not int4g"
    if facts.device != "cpu":
        return f"runs on the CPU, not on {facts.device}"
    if facts.exact:
        return f"rounds activations to bfloat16, and {facts.dtype} was requested"
    if facts.group_size not in GROUP_SIZES:
        return f"group size must be one of {', '.join(map(str, GROUP_SIZES))}, not {facts.group_size}"
    if n % BLOCK_ROWS or k % facts.group_size:
        return f"shape {n}x{k} is not a multiple of {BLOCK_ROWS}x{facts.group_size}"
    return None


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
    exact = torch.stack([scales, zeros], -1).transpose(0, 1).contiguous()
    pairs = exact.bfloat16()
    rest = (exact - pairs.float()).bfloat16()
    return Int4Pack(packed, pairs, rest, weight.group_size, weight.perm, weight.pre_scale)


def _product(x: Tensor, prepared: Int4Pack, scales_and_zeros: Tensor) -> Tensor:
    """bf16 x [rows, K] -> float32 [rows, N]."""
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, prepared.packed, prepared.group_size, scales_and_zeros).float()


def _run(x: Tensor, prepared: Int4Pack, bias: Tensor | None) -> Tensor:
    wide = gathered(x, prepared.perm, prepared.pre_scale).float().contiguous()
    high = wide.bfloat16()
    both = torch.cat([high, (wide - high.float()).bfloat16()])  # one product reads the weight once for both
    main = _product(both, prepared, prepared.scales_and_zeros)
    rows = wide.shape[0]
    out = (main[:rows] + main[rows:]).add_(_product(high, prepared, prepared.rest)).to(x.dtype)
    return out if bias is None else out + bias.to(x.dtype)


INT4PACK = Impl("linear", "torch_int4pack", _fits, _run, _prepare, lambda _prepared: None, rounds=1e-3)
