"""GGUF block layouts in plain PyTorch: raw rows of a tensor to float32, bit for bit as ggml's reference does it.

Every decoder takes blocks u8 [num_blocks, block_bytes] and gives float32 [num_blocks, block_elems]. `d` is a block's
float16 scale, `m`/`dmin` its float16 minimum. "Planar" means: the low nibbles are the first half of the elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Value of each FP4 code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GGUF_E2M1 = tuple(value or 0.0 for value in E2M1)  # As ggml has it: code 8 is 0, not -0.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Elements decoded at a time: temporaries stay near 5 MB, whatever the tensor, and in the cache (Q4_K 3.7 ns an element
# on an EPYC core; 8.7 with four times as many).
CHUNK_ELEMS = 1 << 18


class BlockType(NamedTuple):
    """One block layout."""

    elems: int  # elements in a block
    nbytes: int  # bytes of a block
    decode: Callable[[Tensor], Tensor]
    scale_offsets: tuple[int, ...]  # byte offsets of the float16 scales and minima: what must be finite


def _f16(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.float16).float()


def _i8(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.int8).float()


def _planar(q: Tensor) -> Tensor:
    return torch.cat([q & 15, q >> 4], -1)


def _bits(b: Tensor) -> Tensor:
    return ((b.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=b.device)) & 1).flatten(-2)


def _crumbs(q: Tensor) -> Tensor:
    """[blocks, a, 1, c] bytes -> [blocks, a, 4, c] two-bit values, lowest bits first."""
    return (q >> constant((0, 2, 4, 6), torch.uint8, q.device).view(1, 1, 4, 1)) & 3


def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table that stays on the device: making it anew would be a copy from the host, which no CUDA graph can hold."""
    # -0.0 and 0.0 are equal and have one hash: the tables of E2M1 and of GGUF's FP4, which differ in that, would be one
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
    """2^(b-128) of E8M0 bytes b, half the scale they stand for: b = 255 stays finite, b = 0 and 1 are subnormal.

    Multiply by twice the element: the product rounds once, as the scale itself would.
    """
    b = scale.int()
    bits = torch.where(b < 2, torch.full_like(b, 0x00200000) << b.clamp(max=1), (b - 1).clamp(min=0) << 23)
    return bits.view(torch.float32)


def _q4_0(b: Tensor) -> Tensor:
    return _f16(b[:, :2]) * (_planar(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _f16(b[:, :2]) * _planar(b[:, 4:]).float() + _f16(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    q = _planar(b[:, 6:]) | (_bits(b[:, 2:6]) << 4)
    return _f16(b[:, :2]) * (q.float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    q = _planar(b[:, 8:]) | (_bits(b[:, 4:8]) << 4)
    return _f16(b[:, :2]) * q.float() + _f16(b[:, 2:4])


def _q8_0(b: Tensor) -> Tensor:
    return _f16(b[:, :2]) * _i8(b[:, 2:])


def _iq4_nl(b: Tensor) -> Tensor:
    return _f16(b[:, :2]) * _lookup(IQ4, _planar(b[:, 2:]))


def _mxfp4(b: Tensor) -> Tensor:
    return (_lookup(_GGUF_E2M1, _planar(b[:, 1:])) * 2) * exp2_e8m0(b[:, :1])


def _ue4m3(b: Tensor) -> Tensor:
    """Unsigned E4M3 bytes to float32 as ggml has it: the sign bit is ignored, 0x7F means 0, 0xFF comes out as 480."""
    value = (b & 0x7F).contiguous().view(torch.float8_e4m3fn).float()
    return value.masked_fill(b == 0x7F, 0.0).nan_to_num(480.0)


def _nvfp4(b: Tensor) -> Tensor:
    """Four unsigned E4M3 scales, one per 16 elements; planar inside each 16."""
    q = _planar(b[:, 4:36].reshape(-1, 4, 8))
    return (_ue4m3(b[:, :4]).unsqueeze(-1) * _lookup(_GGUF_E2M1, q)).flatten(1)


def _k4_scales(s: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima of Q4_K and Q5_K."""
    lo, hi, extra = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = torch.cat([lo & 63, (extra & 15) | ((lo >> 6) << 4)], -1)
    mins = torch.cat([hi & 63, (extra >> 4) | ((hi >> 6) << 4)], -1)
    return scales.float(), mins.float()


def _k4_combine(b: Tensor, q: Tensor) -> Tensor:
    scales, mins = _k4_scales(b[:, 4:16])
    d, dmin = _f16(b[:, :2]), _f16(b[:, 2:4])
    return ((d * scales).unsqueeze(-1) * q - (dmin * mins).unsqueeze(-1)).flatten(1)


def _q4_k(b: Tensor) -> Tensor:
    """Eight sub-blocks of 32; of the bytes 32j..32j+31 the low nibbles are sub-block 2j, the high ones 2j+1."""
    q = b[:, 16:144].reshape(-1, 4, 32)
    return _k4_combine(b, torch.stack([q & 15, q >> 4], 2).flatten(1, 2).float())


def _q5_k(b: Tensor) -> Tensor:
    """As Q4_K; bit j of qh[l] is the fifth bit of element l of sub-block j."""
    q = b[:, 48:176].reshape(-1, 4, 32)
    shift = torch.arange(8, dtype=torch.uint8, device=b.device).view(1, 8, 1)
    high = (b[:, 16:48].unsqueeze(1) >> shift) & 1
    return _k4_combine(b, (torch.stack([q & 15, q >> 4], 2).flatten(1, 2) | (high << 4)).float())


def _q6_k(b: Tensor) -> Tensor:
    """Sixteen sub-blocks of 16 with signed 8-bit scales."""
    low = b[:, :128].reshape(-1, 2, 64)
    low = torch.stack([low & 15, low >> 4], 2).reshape(-1, 2, 4, 32)
    q = (low | (_crumbs(b[:, 128:192].reshape(-1, 2, 1, 32)) << 4)).to(torch.int8) - 32
    return ((_f16(b[:, 208:210]) * _i8(b[:, 192:208])).unsqueeze(-1) * q.float().reshape(-1, 16, 16)).flatten(1)


def _q2_k(b: Tensor) -> Tensor:
    """Sixteen sub-blocks of 16; a scale byte holds the scale below and the minimum above."""
    q = _crumbs(b[:, 16:80].reshape(-1, 2, 1, 32)).reshape(-1, 16, 16).float()
    scales, mins = (b[:, :16] & 15).float(), (b[:, :16] >> 4).float()
    d, dmin = _f16(b[:, 80:82]), _f16(b[:, 82:84])
    return ((d * scales).unsqueeze(-1) * q - (dmin * mins).unsqueeze(-1)).flatten(1)


def _q3_k(b: Tensor) -> Tensor:
    """Sixteen sub-blocks of 16, 6-bit scales - 32; bit j of hmask: group j of 32 elements keeps its value, else -4."""
    s = b[:, 96:108]
    low = torch.cat([s[:, :8] & 15, s[:, :8] >> 4], -1)
    high = _crumbs(s[:, 8:12].reshape(-1, 1, 1, 4)).reshape(-1, 16)
    scales = (low | (high << 4)).to(torch.int8).float() - 32
    shift = torch.arange(8, dtype=torch.uint8, device=b.device).view(1, 8, 1)
    keep = ((b[:, :32].unsqueeze(1) >> shift) & 1).to(torch.int8)
    q = _crumbs(b[:, 32:96].reshape(-1, 2, 1, 32)).reshape(-1, 8, 32).to(torch.int8) - 4 * (1 - keep)
    return ((_f16(b[:, 108:110]) * scales).unsqueeze(-1) * q.float().reshape(-1, 16, 16)).flatten(1)


def _iq4_xs(b: Tensor) -> Tensor:
    """Eight sub-blocks of 32, 6-bit scales - 32, codes into the IQ4 table."""
    high_word = b[:, 2:4].contiguous().view(torch.int16).int() & 0xFFFF
    low = torch.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], -1).flatten(1).int()
    high = (high_word >> (2 * torch.arange(8, dtype=torch.int32, device=b.device))) & 3
    scales = ((low | (high << 4)) - 32).float()
    q = _planar(b[:, 8:136].reshape(-1, 8, 16))
    return ((_f16(b[:, :2]) * scales).unsqueeze(-1) * _lookup(IQ4, q)).flatten(1)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda b: b.contiguous().view(dtype).float()


BLOCK_TYPES: dict[str, BlockType] = {
    "F32": BlockType(1, 4, _plain(torch.float32), ()),
    "F16": BlockType(1, 2, _plain(torch.float16), ()),
    "BF16": BlockType(1, 2, _plain(torch.bfloat16), ()),
    "Q4_0": BlockType(32, 18, _q4_0, (0,)),
    "Q4_1": BlockType(32, 20, _q4_1, (0, 2)),
    "Q5_0": BlockType(32, 22, _q5_0, (0,)),
    "Q5_1": BlockType(32, 24, _q5_1, (0, 2)),
    "Q8_0": BlockType(32, 34, _q8_0, (0,)),
    "Q2_K": BlockType(256, 84, _q2_k, (80, 82)),
    "Q3_K": BlockType(256, 110, _q3_k, (108,)),
    "Q4_K": BlockType(256, 144, _q4_k, (0, 2)),
    "Q5_K": BlockType(256, 176, _q5_k, (0, 2)),
    "Q6_K": BlockType(256, 210, _q6_k, (208,)),
    "IQ4_NL": BlockType(32, 18, _iq4_nl, (0,)),
    "IQ4_XS": BlockType(256, 136, _iq4_xs, (0,)),
    "MXFP4": BlockType(32, 17, _mxfp4, ()),
    "NVFP4": BlockType(64, 36, _nvfp4, ()),
}


def dequantize_blocks(data: Tensor, block_type: str) -> Tensor:
    """Rows of a GGUF tensor as stored, u8 [rows, row_bytes] -> float32 [rows, K], decoded in bounded chunks.

    Raises ValueError for an unknown block type or a row that is no whole number of blocks.
    """
    layout = BLOCK_TYPES.get(block_type)
    if layout is None:
        raise ValueError(f"no decoder for GGUF block type {block_type}")
    rows, row_bytes = data.shape
    if row_bytes % layout.nbytes:
        raise ValueError(f"a row of {row_bytes} bytes is no whole number of {layout.nbytes}-byte {block_type} blocks")
    columns = row_bytes // layout.nbytes * layout.elems
    out = torch.empty(rows, columns, dtype=torch.float32, device=data.device)
    step = max(1, CHUNK_ELEMS // max(columns, 1))
    for start in range(0, rows, step):
        chunk = data[start : start + step]
        out[start : start + step] = layout.decode(chunk.reshape(-1, layout.nbytes)).view(chunk.shape[0], columns)
    return out
