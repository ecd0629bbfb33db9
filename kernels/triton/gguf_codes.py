"""GGUF blocks taken apart: codes, group scales and minima, super scales. What `layout` stores side by side.

Formulas are those of `kernels/gguf_blocks.py`; nothing is rounded. Scales of six bits get a byte each, so Q4_K grows
from 4.5 to 4.625 bits a weight, Q5_K from 5.5 to 5.625, Q3_K from 3.44 to 3.56; the others keep their size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..gguf_blocks import BLOCK_TYPES


class GgufCode(NamedTuple):
    """How `layout.Prepared` holds a block type."""

    code: str
    scale_kind: str
    min_kind: str
    zero: int
    group: int


GGUF_CODES = {
    "Q2_K": GgufCode("int2", "nibble", "nibble", 0, 16),
    "Q3_K": GgufCode("int3", "sub", "none", 4, 16),
    "Q4_K": GgufCode("int4", "sub", "sub", 0, 32),
    "Q5_K": GgufCode("int5", "sub", "sub", 0, 32),
    "Q6_K": GgufCode("int6", "sub", "none", 32, 16),
    "Q5_0": GgufCode("int5", "float", "none", 16, 32),
    "Q5_1": GgufCode("int5", "float", "float", 0, 32),
    "IQ4_NL": GgufCode("iq4", "float", "none", 0, 32),
    "IQ4_XS": GgufCode("iq4", "sub", "none", 0, 32),
}


class Blocks(NamedTuple):
    """Parts of some rows; what was not asked for, or is not there, is empty or None."""

    codes: Tensor  # uint8 [rows, K]
    scales: Tensor | None = None  # [rows, G]: float16, int8, or uint8 of both nibbles
    mins: Tensor | None = None  # [rows, G]: float16 or uint8
    supers: Tensor | None = None  # float16 [rows, K / 256]
    super_mins: Tensor | None = None


def split_blocks(data: Tensor, block_type: str, *, codes: bool = False) -> Blocks:
    """Rows as stored, uint8 [rows, row_bytes] -> their codes, or else everything but the codes."""
    layout = BLOCK_TYPES[block_type]
    b = data.view(data.shape[0], -1, layout.nbytes)
    if codes:
        return Blocks(_CODES[block_type](b).flatten(1))
    return _SCALES[block_type](b)


def _planar(q: Tensor) -> Tensor:
    """The low nibbles are the first half of the elements."""
    return torch.cat([q & 15, q >> 4], -1)


def _bit(b: Tensor, shift: Tensor) -> Tensor:
    return (b >> shift) & 1


def _shifts(count: int, step: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device)


def _half(b: Tensor, offset: int) -> Tensor:
    """float16 [rows, blocks] at a byte offset in each block."""
    return b[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1)


def _q5_codes(b: Tensor, high: int, low: int) -> Tensor:
    bits = _bit(b[..., high : high + 4].unsqueeze(-1), _shifts(8, 1, b)).flatten(-2)
    return _planar(b[..., low:]) | (bits << 4)


def _q4_k_codes(b: Tensor, low: int = 16) -> Tensor:
    q = b[..., low : low + 128].unflatten(-1, (4, 32))
    return torch.stack([q & 15, q >> 4], -2).flatten(-3)


def _q5_k_codes(b: Tensor) -> Tensor:
    high = _bit(b[..., 16:48].unsqueeze(-2), _shifts(8, 1, b).view(-1, 1)).flatten(-2)
    return _q4_k_codes(b, 48) | (high << 4)


def _crumbs(q: Tensor, width: int) -> Tensor:
    """[..., 2 * width] bytes -> two-bit values, 4 * width of each half in turn."""
    q = q.unflatten(-1, (-1, 1, width))
    return ((q >> _shifts(4, 2, q).view(-1, 1)) & 3).flatten(-3)


def _q6_k_codes(b: Tensor) -> Tensor:
    q = b[..., :128].unflatten(-1, (2, 64))
    low = torch.stack([q & 15, q >> 4], -2).flatten(-3)
    return low | (_crumbs(b[..., 128:192], 32) << 4)


def _q3_k_codes(b: Tensor) -> Tensor:
    keep = _bit(b[..., :32].unsqueeze(-2), _shifts(8, 1, b).view(-1, 1)).flatten(-2)
    return _crumbs(b[..., 32:96], 32) | (keep << 2)


_CODES = {
    "Q2_K": lambda b: _crumbs(b[..., 16:80], 32),
    "Q3_K": _q3_k_codes,
    "Q4_K": _q4_k_codes,
    "Q5_K": _q5_k_codes,
    "Q6_K": _q6_k_codes,
    "Q5_0": lambda b: _q5_codes(b, 2, 6),
    "Q5_1": lambda b: _q5_codes(b, 4, 8),
    "IQ4_NL": lambda b: _planar(b[..., 2:]),
    "IQ4_XS": lambda b: _planar(b[..., 8:136].unflatten(-1, (8, 16))).flatten(-2),
}


def _k4_scales(b: Tensor) -> Blocks:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima of Q4_K and Q5_K."""
    lo, hi, extra = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat([lo & 63, (extra & 15) | ((lo >> 6) << 4)], -1)
    mins = torch.cat([hi & 63, (extra >> 4) | ((hi >> 6) << 4)], -1)
    none = b.new_empty(0)
    return Blocks(none, scales.to(torch.int8).flatten(1), mins.flatten(1), _half(b, 0), _half(b, 2))


def _q3_k_scales(b: Tensor) -> Blocks:
    s = b[..., 96:108]
    low = torch.cat([s[..., :8] & 15, s[..., :8] >> 4], -1)
    high = (s[..., 8:12].unsqueeze(-2) >> _shifts(4, 2, s).view(-1, 1)).flatten(-2) & 3
    scales = (low | (high << 4)).to(torch.int8) - 32
    return Blocks(b.new_empty(0), scales.flatten(1), supers=_half(b, 108))


def _iq4_xs_scales(b: Tensor) -> Blocks:
    word = b[..., 2:4].contiguous().view(torch.int16).int() & 0xFFFF
    low = torch.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], -1).flatten(-2).int()
    high = (word >> (2 * torch.arange(8, dtype=torch.int32, device=b.device))) & 3
    return Blocks(b.new_empty(0), ((low | (high << 4)) - 32).to(torch.int8).flatten(1), supers=_half(b, 0))


_SCALES = {
    "Q2_K": lambda b: Blocks(b.new_empty(0), b[..., :16].flatten(1), supers=_half(b, 80), super_mins=_half(b, 82)),
    "Q3_K": _q3_k_scales,
    "Q4_K": _k4_scales,
    "Q5_K": _k4_scales,
    "Q6_K": lambda b: Blocks(
        b.new_empty(0), b[..., 192:208].contiguous().view(torch.int8).flatten(1), supers=_half(b, 208)
    ),
    "Q5_0": lambda b: Blocks(b.new_empty(0), _half(b, 0)),
    "Q5_1": lambda b: Blocks(b.new_empty(0), _half(b, 0), _half(b, 2)),
    "IQ4_NL": lambda b: Blocks(b.new_empty(0), _half(b, 0)),
    "IQ4_XS": _iq4_xs_scales,
}
