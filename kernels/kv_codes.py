"""Numbers into KV codes and back, in plain PyTorch: the 8-bit formats of `kv_pages`, as every back end must have them.

A token's vector of one head is encoded on its own. E4M3 is written and read by its bits, so results do not depend on
what a device or an interpreter makes of float8 types.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "fp8": 448.0}  # format -> the largest code
SMALLEST_PEAK = 1e-30  # A vector whose largest number is not above this is stored as zeros.
_SMALLEST_NORMAL = 0x3C800000  # bits of 2^-6, the smallest E4M3 number with a leading one
_LARGEST_BITS = 0x43E00000  # bits of 448
_STEP_ADDEND = 16384.0  # float32 numbers from here on stand 2^-9 apart, as E4M3 numbers below 2^-6 do
_STEP_BITS = 0x46800000


def hadamard(x: Tensor) -> Tensor:
    """x · H: an orthonormal Hadamard matrix on each run of n dimensions, n the largest power of two dividing them.

    It spreads a dimension's outliers over all of them, and is its own inverse: (q H)·(k H) = q·k.

    x        [..., head_dim]   any float type
    returns  [..., head_dim]   float32; head_dim odd: unchanged
    """
    size = x.shape[-1] & -x.shape[-1]
    runs, half = x.float().reshape(-1, size), 1
    while half < size:
        pairs = runs.view(-1, size // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        runs = torch.stack([first + second, first - second], 2).view(-1, size)
        half *= 2
    return (runs * size**-0.5).view(x.shape)


def encode(x: Tensor, kv_format: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The codes of vectors, and the scale that makes numbers of them: x ≈ codes · scale.

    x          [..., head_dim]   any float type; K is rotated before (`hadamard`) where the format has it so
    kv_format  int8 | fp8
    scale      float32 [1] where it is given; else each vector's largest number becomes the largest code
    returns    codes [..., head_dim] int8 | uint8 (E4M3); scales float32 [...], NaN for a vector that has no finite peak
    """
    wide = x.float()
    largest = LARGEST[kv_format]
    if scale is None:
        peak = wide.abs().amax(-1)
        tiny = peak <= SMALLEST_PEAK
        top = torch.full_like(peak, largest)  # torch rounds twice where one of the two is a Python number
        scales = torch.where(tiny, 0.0, peak / top)
        inverse = torch.where(tiny, 0.0, top / peak)
        finite = peak.isfinite()
        scales, inverse = torch.where(finite, scales, torch.nan), torch.where(finite, inverse, 0.0)
        wide = torch.where(finite.unsqueeze(-1), wide, 0.0) * inverse.unsqueeze(-1)
    else:
        scales, wide = scale, wide / scale
    if kv_format == "fp8":
        return encode_e4m3(wide), scales
    return wide.round_().clamp_(-largest, largest).to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """codes int8 | uint8 (E4M3) [..., head_dim], scales float32 [...] or [1] -> float32 [..., head_dim]."""
    wide = decode_e4m3(codes) if codes.dtype is torch.uint8 else codes.float()
    return wide * (scales if scales.dim() == 1 and scales.shape[0] == 1 else scales.unsqueeze(-1))


def encode_e4m3(x: Tensor) -> Tensor:
    """float32 -> uint8: the nearest E4M3 number, ties to even, at most ±448; NaN is 0x7F."""
    bits = x.contiguous().view(torch.int32)
    sign, size = bits >> 24 & 0x80, bits & 0x7FFFFFFF
    nan = size > 0x7F800000
    size = size.clamp(max=_LARGEST_BITS)
    normal = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (120 << 3)
    small = (size.view(torch.float32) + _STEP_ADDEND).view(torch.int32) - _STEP_BITS
    codes = torch.where(size >= _SMALLEST_NORMAL, normal, small)
    return (torch.where(nan, 0x7F, codes) | sign).to(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """uint8 -> float32, exact; 0x7F and 0xFF are NaN."""
    wide = codes.to(torch.int32)
    sign, size = (wide & 0x80) << 24, wide & 0x7F
    normal = ((size << 20) + (120 << 23)).view(torch.float32)
    values = torch.where(size >= 8, normal, size * 2.0**-9)
    values = torch.where(size == 0x7F, torch.nan, values)
    return (values.view(torch.int32) | sign).view(torch.float32)
