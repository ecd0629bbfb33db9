"""KV cache quantization in plain PyTorch: the 8-bit formats of `kv_pages`, which every back end must reproduce.

Each head's vector of each token is encoded separately. E4M3 is encoded and decoded with integer operations, so results
do not depend on a device's or Triton interpreter's float8 support.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "fp8": 448.0}  # format -> the largest code
SMALLEST_PEAK = 1e-30  # a vector whose max|x| is at most this is stored as zeros
_SMALLEST_NORMAL = 0x3C800000  # float32 bits of 2^-6, the smallest normal E4M3 number
_LARGEST_BITS = 0x43E00000  # float32 bits of 448
_STEP_ADDEND = 16384.0  # the float32 spacing here is 2^-9, that of subnormal E4M3: adding it rounds x to the grid
_STEP_BITS = 0x46800000


def hadamard(x: Tensor) -> Tensor:
    """x · H, H an orthonormal Hadamard matrix on each block of n dimensions.

    n is the largest power of two that divides head_dim. Spreads outliers in one dimension over the block. H is its own
    inverse, so (q H)·(k H) = q·k.

    x        [..., head_dim]   any float type
    returns  [..., head_dim]   float32; unchanged if head_dim is odd
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
    """Quantize vectors: x ≈ codes · scale.

    x          [..., head_dim]   any float type; int8 keys must already be rotated (`hadamard`)
    kv_format  int8 | fp8
    scale      float32 [1]; None: one scale per vector, max|x| / largest code
    returns    codes [..., head_dim] int8 | uint8 (E4M3); scales float32 [...], NaN for vectors with NaN or inf
    """
    wide = x.float()
    largest = LARGEST[kv_format]
    if scale is None:
        peak = wide.abs().amax(-1)
        tiny = peak <= SMALLEST_PEAK
        top = torch.full_like(peak, largest)  # division by a Python number rounds twice in torch
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
    """Dequantize: codes int8 | uint8 (E4M3) [..., head_dim], scales float32 [...] or [1] -> float32 [..., head_dim]."""
    wide = decode_e4m3(codes) if codes.dtype is torch.uint8 else codes.float()
    return wide * (scales if scales.dim() == 1 and scales.shape[0] == 1 else scales.unsqueeze(-1))


def encode_e4m3(x: Tensor) -> Tensor:
    """float32 -> E4M3 bits in uint8: round to nearest even, saturate at ±448; NaN becomes 0x7F."""
    bits = x.contiguous().view(torch.int32)
    sign, size = bits >> 24 & 0x80, bits & 0x7FFFFFFF
    nan = size > 0x7F800000
    size = size.clamp(max=_LARGEST_BITS)
    normal = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (120 << 3)
    small = (size.view(torch.float32) + _STEP_ADDEND).view(torch.int32) - _STEP_BITS
    codes = torch.where(size >= _SMALLEST_NORMAL, normal, small)
    return (torch.where(nan, 0x7F, codes) | sign).to(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """E4M3 bits in uint8 -> float32, exact; 0x7F and 0xFF are NaN."""
    wide = codes.to(torch.int32)
    sign, size = (wide & 0x80) << 24, wide & 0x7F
    normal = ((size << 20) + (120 << 23)).view(torch.float32)
    values = torch.where(size >= 8, normal, size * 2.0**-9)
    values = torch.where(size == 0x7F, torch.nan, values)
    return (values.view(torch.int32) | sign).view(torch.float32)
