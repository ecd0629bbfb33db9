"""Integer codes packed in 32-bit words, and their conversion to the canonical `int4g` and `int8`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.errors import BadModelFile
from localllm.kernels import Weight
from localllm.kernels.dequant import row_chunk

from .stored import WeightReader

_log = logging.getLogger(__name__)


def pack_nibbles(codes: Tensor) -> Tensor:
    """u8 [..., K] with values 0..15 -> u8 [..., K/2]; element 2j is the low nibble of byte j."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """i32 [..., W] -> u8 [..., W * (32 // bits)], lowest bits first; leftover bits of a word are unused."""
    per_word = 32 // bits
    shifts = torch.arange(0, per_word * bits, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """i32 [..., W] read as one little-endian bit stream -> u8 [..., W * 32 // bits]; values may cross word boundaries.

    Eight values take exactly `bits` bytes, so it works on bytes, in a quarter of the time that 32-bit words take.
    """
    count = words.shape[-1] * 32 // bits
    stream = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits)).contiguous().view(torch.uint8)
    groups = stream.unflatten(-1, (-1, bits))  # [..., values / 8, bits]
    out = torch.empty(*groups.shape[:-1], 8, dtype=torch.uint8)
    for index in range(8):
        byte, shift = divmod(index * bits, 8)
        value = groups[..., byte] >> shift
        if shift + bits > 8:
            value = value | (groups[..., byte + 1] << (8 - shift))
        out[..., index] = value & ((1 << bits) - 1)
    return out.flatten(-2)[..., :count]


def chunks(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """Slices over `rows` of bounded size, starting at multiples of `multiple`."""
    step = max(multiple, row_chunk(columns) // multiple * multiple)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class Groups(NamedTuple):
    """Scales and zeros for groups of equal size that divides K."""

    scales: Tensor
    zeros: Tensor | None
    size: int
    perm: Tensor | None


def group_order(
    module: WeightReader, scales: Tensor, zeros: Tensor | None, length: int, g_idx: Tensor | None = None
) -> Groups:
    """Sort columns by group so that groups are contiguous and equally long.

    scales, zeros  [N, G]
    length         group size stated in the file; if K is not a multiple of it, the last group is shorter
    g_idx          [K], the group of each column, or None for k // length; `perm` is None if it equals that
    """
    k, count = module.shape[1], scales.shape[1]
    plain = torch.arange(k) // length
    groups = plain if g_idx is None else g_idx.long()
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        low, high = int(groups.min()), int(groups.max())
        raise BadModelFile(
            f"{module.prefix}: group numbers range from {low} to {high}, but there are scales only for 0 to {count - 1}"
        )
    perm = None
    if not torch.equal(groups, plain):
        ordered, perm = torch.sort(groups, stable=True)
        perm = None if torch.equal(perm, torch.arange(k)) else perm.int()
        groups = ordered
    used, sizes = torch.unique_consecutive(groups, return_counts=True)
    size = gcd(*sizes.tolist())
    if size < 2 and k > 1:
        raise BadModelFile(
            f"{module.prefix}: groups of {int(sizes.min())} to {int(sizes.max())} columns cannot be aligned"
        )
    order = used.repeat_interleave(sizes // size)
    if order.numel() != count or not torch.equal(order, torch.arange(count)):
        scales, zeros = scales[:, order], None if zeros is None else zeros[:, order]
    return Groups(scales.contiguous(), None if zeros is None else zeros.contiguous(), size, perm)


class Codes(NamedTuple):
    """A reader of unsigned integer codes."""

    bits: int
    rows: Callable[[slice], Tensor]  # u8 [len(slice), K] in the file's column order
    multiple: int = 1  # slices must start at multiples of this


def from_codes(module: WeightReader, codes: Codes, groups: Groups) -> Weight:
    """Codes and groups -> `int4g` up to 4 bits; above, `int8` if every q - z fits, else exact float32 `dense`.

    groups.zeros u8 [N, K/g]; None means the middle code, 2^(bits-1).
    """
    if codes.bits <= 4:
        return _int4g(module, codes, groups)
    return _int8(module, codes, groups) or _dense(module, codes, groups)


def _ordered(codes: Codes, groups: Groups, rows: slice) -> Tensor:
    part = codes.rows(rows)
    return part if groups.perm is None else part.index_select(1, groups.perm)


def _int4g(module: WeightReader, codes: Codes, groups: Groups) -> Weight:
    n, k = module.shape
    if k % 2:
        raise BadModelFile(f"{module.prefix} has {k} inputs, but packed codes need an even number")
    shift = 8 - (1 << (codes.bits - 1)) if groups.zeros is None else 0  # the middle code of int4g is 8
    qweight = torch.empty(n, k // 2, dtype=torch.uint8)
    for rows in chunks(n, k, codes.multiple):
        qweight[rows] = pack_nibbles(_ordered(codes, groups, rows) + shift)
    return Weight("int4g", module.shape, qweight, groups.scales, groups.zeros, perm=groups.perm, group_size=groups.size)


def _centred(codes: Codes, groups: Groups, rows: slice) -> Tensor:
    """int16 [rows, K]: q - z."""
    q = _ordered(codes, groups, rows).short()
    if groups.zeros is None:
        return q - (1 << (codes.bits - 1))
    return (q.unflatten(-1, (-1, groups.size)) - groups.zeros[rows].short().unsqueeze(-1)).flatten(1)


def _int8(module: WeightReader, codes: Codes, groups: Groups) -> Weight | None:
    n, k = module.shape
    qweight = torch.empty(n, k, dtype=torch.int8)
    for rows in chunks(n, k, codes.multiple):
        part = _centred(codes, groups, rows)
        if int(part.min()) < -128 or int(part.max()) > 127:
            return None
        qweight[rows] = part.to(torch.int8)
    return Weight("int8", module.shape, qweight, groups.scales, perm=groups.perm, group_size=groups.size)


def _dense(module: WeightReader, codes: Codes, groups: Groups) -> Weight:
    _log.warning("%s: 8-bit codes with zero points do not fit in int8; kept as float32", module.prefix)
    n, k = module.shape
    out = torch.empty(n, k, dtype=torch.float32)
    for rows in chunks(n, k, codes.multiple):
        values = _centred(codes, groups, rows).float().unflatten(-1, (-1, groups.size))
        out[rows] = (values * groups.scales[rows].float().unsqueeze(-1)).flatten(1)
    return Weight("dense", module.shape, out, perm=groups.perm)
