"""GGUF block dequantization in plain PyTorch: raw tensor rows to float32, bit-identical to ggml's reference.

Every decoder maps blocks u8 [num_blocks, block_bytes] to float32 [num_blocks, block_elems]. `d` is a block's float16
scale, `m`/`dmin` its float16 minimum. "Planar": low nibbles hold the first half of the elements, high ones the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# value of each FP4 code
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GGUF_E2M1 = tuple(value or 0.0 for value in E2M1)  # in ggml code 8 is 0, not -0
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# elements decoded at a time: temporaries stay near 5 MB and in cache (Q4_K: 3.7 ns per element on an EPYC core, but
# 8.7 ns with four times as many)
CHUNK_ELEMS = 1 << 18


class BlockType(NamedTuple):
    """One block layout."""

    elems: int  # elements in a block
    nbytes: int  # bytes of a block
    decode: Callable[[Tensor], Tensor]
    scale_offsets: tuple[int, ...]  # byte offsets of the float16 scales and minima, which must be finite


def _planar(q: Tensor) -> Tensor:
    return torch.cat([q & 15, q >> 4], -1)


def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A lookup table cached on the device: creating it would copy from the host, which CUDA graphs cannot capture."""
    # 0.0 == -0.0 with the same hash, so without the signs E2M1 and ggml's FP4 table would share a cache entry
    signs = tuple(math.copysign(1.0, value) for value in values)
    return _constant(values, signs, dtype, device)


@cache
def _constant(values: tuple[float, ...], signs: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def _lookup(table: Sequence[float], codes: Tensor) -> Tensor:
    values = constant(tuple(table), torch.float32, codes.device)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


def exp2_e8m0(scale: Tensor) -> Tensor:
    """2^(b-128) of E8M0 bytes b: half the scale, so that b = 255 stays finite (b = 0 and 1 are subnormal).

    Multiply by twice the element: the product is then rounded once, as with the full scale.
    """
    b = scale.int()
    bits = torch.where(b < 2, torch.full_like(b, 0x00200000) << b.clamp(max=1), (b - 1).clamp(min=0) << 23)
    return bits.view(torch.float32)


def _mxfp4(b: Tensor) -> Tensor:
    return (_lookup(_GGUF_E2M1, _planar(b[:, 1:])) * 2) * exp2_e8m0(b[:, :1])


def _ue4m3(b: Tensor) -> Tensor:
    """Unsigned E4M3 bytes to float32 as in ggml: the sign bit is ignored, 0x7F is 0, and 0xFF is 480."""
    value = (b & 0x7F).contiguous().view(torch.float8_e4m3fn).float()
    return value.masked_fill(b == 0x7F, 0.0).nan_to_num(480.0)


def _nvfp4(b: Tensor) -> Tensor:
    """Four unsigned E4M3 scales, one per 16 elements; planar inside each 16."""
    q = _planar(b[:, 4:36].reshape(-1, 4, 8))
    return (_ue4m3(b[:, :4]).unsqueeze(-1) * _lookup(_GGUF_E2M1, q)).flatten(1)


class Parts(NamedTuple):
    """Scales and minima of blocks.

    scales, mins        [..., groups per block]: float16, int8 or uint8
    supers, super_mins  float16 [..., 1]: super-block factors of scales and mins
    """

    scales: Tensor
    mins: Tensor | None = None
    supers: Tensor | None = None
    super_mins: Tensor | None = None


class Split(NamedTuple):
    """How to split blocks u8 [..., block_bytes]: value = scale * (code - zero) + min, or scale * table[code] + min.

    codes  u8 [..., block_elems]; i8 for Q8_0
    """

    codes: Callable[[Tensor], Tensor]
    parts: Callable[[Tensor], Parts]
    zero: int = 0
    table: tuple[int, ...] = ()


def _shifts(count: int, step: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device)


def _half(b: Tensor, offset: int) -> Tensor:
    """float16 [..., 1] at a byte offset in each block."""
    return b[..., offset : offset + 2].contiguous().view(torch.float16)


def _bits(b: Tensor) -> Tensor:
    """All bits of the bytes, lowest first within each byte."""
    return ((b.unsqueeze(-1) >> _shifts(8, 1, b)) & 1).flatten(-2)


def _bit_planes(b: Tensor) -> Tensor:
    """Bit 0 of every byte, then bit 1 of every byte, and so on."""
    return ((b.unsqueeze(-2) >> _shifts(8, 1, b).view(-1, 1)) & 1).flatten(-2)


def _crumbs(b: Tensor, width: int) -> Tensor:
    """2-bit values of each run of `width` bytes: bits 0-1 of all its bytes first, then bits 2-3, and so on."""
    q = b.unflatten(-1, (-1, 1, width))
    return ((q >> _shifts(4, 2, q).view(-1, 1)) & 3).flatten(-3)


def _nibbles(b: Tensor, width: int) -> Tensor:
    """Nibbles of each run of `width` bytes: all low ones, then all high ones."""
    return _planar(b.unflatten(-1, (-1, width))).flatten(-2)


def _q3_k_codes(b: Tensor) -> Tensor:
    """Bit j of an hmask byte belongs to group j of 32 elements; if it is clear, the value is 4 less."""
    return _crumbs(b[..., 32:96], 32) | (_bit_planes(b[..., :32]) << 2)


def _k4_parts(b: Tensor) -> Parts:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima of Q4_K and Q5_K."""
    lo, hi, extra = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat([lo & 63, (extra & 15) | ((lo >> 6) << 4)], -1)
    mins = torch.cat([hi & 63, (extra >> 4) | ((hi >> 6) << 4)], -1)
    return Parts(scales.to(torch.int8), mins, _half(b, 0), _half(b, 2))


def _q3_k_parts(b: Tensor) -> Parts:
    scales = _planar(b[..., 96:104]) | (_crumbs(b[..., 104:108], 4) << 4)
    return Parts(scales.to(torch.int8) - 32, supers=_half(b, 108))


def _iq4_xs_parts(b: Tensor) -> Parts:
    word = b[..., 2:4].contiguous().view(torch.int16).int() & 0xFFFF
    low = torch.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], -1).flatten(-2).int()
    high = (word >> (2 * torch.arange(8, dtype=torch.int32, device=b.device))) & 3
    return Parts(((low | (high << 4)) - 32).to(torch.int8), supers=_half(b, 0))


SPLITS = {
    "Q4_0": Split(lambda b: _planar(b[..., 2:]), lambda b: Parts(_half(b, 0)), 8),
    "Q4_1": Split(lambda b: _planar(b[..., 4:]), lambda b: Parts(_half(b, 0), _half(b, 2))),
    "Q8_0": Split(lambda b: b[..., 2:].contiguous().view(torch.int8), lambda b: Parts(_half(b, 0))),
    "Q5_0": Split(lambda b: _planar(b[..., 6:]) | (_bits(b[..., 2:6]) << 4), lambda b: Parts(_half(b, 0)), 16),
    "Q5_1": Split(lambda b: _planar(b[..., 8:]) | (_bits(b[..., 4:8]) << 4), lambda b: Parts(_half(b, 0), _half(b, 2))),
    "Q2_K": Split(
        lambda b: _crumbs(b[..., 16:80], 32),
        lambda b: Parts(b[..., :16] & 15, b[..., :16] >> 4, _half(b, 80), _half(b, 82)),
    ),
    "Q3_K": Split(_q3_k_codes, _q3_k_parts, 4),
    "Q4_K": Split(lambda b: _nibbles(b[..., 16:144], 32), _k4_parts),
    "Q5_K": Split(lambda b: _nibbles(b[..., 48:176], 32) | (_bit_planes(b[..., 16:48]) << 4), _k4_parts),
    "Q6_K": Split(
        lambda b: _nibbles(b[..., :128], 64) | (_crumbs(b[..., 128:192], 32) << 4),
        lambda b: Parts(b[..., 192:208].contiguous().view(torch.int8), supers=_half(b, 208)),
        32,
    ),
    "IQ4_NL": Split(lambda b: _planar(b[..., 2:]), lambda b: Parts(_half(b, 0)), table=IQ4),
    "IQ4_XS": Split(lambda b: _nibbles(b[..., 8:136], 16), _iq4_xs_parts, table=IQ4),
}


def _joined(block_type: str) -> Callable[[Tensor], Tensor]:
    """Return the decoder of a type in SPLITS, with the operation order of ggml's reference."""
    split = SPLITS[block_type]

    def decode(b: Tensor) -> Tensor:
        codes, parts = split.codes(b), split.parts(b)
        q = _lookup(split.table, codes) if split.table else codes.float() - split.zero if split.zero else codes.float()
        scales, mins = parts.scales.float(), parts.mins
        if parts.supers is not None:
            scales = parts.supers.float() * scales
        out = scales.unsqueeze(-1) * q.unflatten(-1, (scales.shape[-1], -1))
        if mins is not None and parts.super_mins is not None:
            out -= (parts.super_mins.float() * mins.float()).unsqueeze(-1)
        elif mins is not None:
            out += mins.float().unsqueeze(-1)
        return out.flatten(1)

    return decode


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda b: b.contiguous().view(dtype).float()


BLOCK_TYPES: dict[str, BlockType] = {
    "F32": BlockType(1, 4, _plain(torch.float32), ()),
    "F16": BlockType(1, 2, _plain(torch.float16), ()),
    "BF16": BlockType(1, 2, _plain(torch.bfloat16), ()),
    "Q4_0": BlockType(32, 18, _joined("Q4_0"), (0,)),
    "Q4_1": BlockType(32, 20, _joined("Q4_1"), (0, 2)),
    "Q5_0": BlockType(32, 22, _joined("Q5_0"), (0,)),
    "Q5_1": BlockType(32, 24, _joined("Q5_1"), (0, 2)),
    "Q8_0": BlockType(32, 34, _joined("Q8_0"), (0,)),
    "Q2_K": BlockType(256, 84, _joined("Q2_K"), (80, 82)),
    "Q3_K": BlockType(256, 110, _joined("Q3_K"), (108,)),
    "Q4_K": BlockType(256, 144, _joined("Q4_K"), (0, 2)),
    "Q5_K": BlockType(256, 176, _joined("Q5_K"), (0, 2)),
    "Q6_K": BlockType(256, 210, _joined("Q6_K"), (208,)),
    "IQ4_NL": BlockType(32, 18, _joined("IQ4_NL"), (0,)),
    "IQ4_XS": BlockType(256, 136, _joined("IQ4_XS"), (0,)),
    "MXFP4": BlockType(32, 17, _mxfp4, ()),
    "NVFP4": BlockType(64, 36, _nvfp4, ()),
}


def dequantize_blocks(data: Tensor, block_type: str) -> Tensor:
    """Dequantize stored rows of a GGUF tensor, u8 [rows, row_bytes] -> float32 [rows, K], in bounded chunks.

    Raises ValueError for an unknown block type or a row that is not a whole number of blocks.
    """
    layout = BLOCK_TYPES.get(block_type)
    if layout is None:
        raise ValueError(f"no decoder for GGUF block type {block_type}")
    rows, row_bytes = data.shape
    if row_bytes % layout.nbytes:
        raise ValueError(f"a row of {row_bytes} bytes is not a whole number of {block_type} blocks of {layout.nbytes}")
    columns = row_bytes // layout.nbytes * layout.elems
    out = torch.empty(rows, columns, dtype=torch.float32, device=data.device)
    step = max(1, CHUNK_ELEMS // max(columns, 1))
    for start in range(0, rows, step):
        chunk = data[start : start + step]
        out[start : start + step] = layout.decode(chunk.reshape(-1, layout.nbytes)).view(chunk.shape[0], columns)
    return out
