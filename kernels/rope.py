"""RoPE tables: inverse frequencies for each scaling type, and cosines and sines by position.

`reference.rope` applies them. Formulas and order of float32 operations match `transformers`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 1024  # positions computed at a time; whole blocks, so a row's bits do not depend on how the table grew


def inverse_frequencies(theta: float, dim: int) -> Tensor:
    """theta^(-2j/dim) for j in [0, dim/2): float32 [dim / 2]."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def scale_llama3(
    inv_freq: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Tensor:
    """Llama 3.1 scaling: wavelengths above original/low are stretched by `factor`, below original/high unchanged.

    Wavelengths in between are blended linearly.
    """
    wavelength = 2 * math.pi / inv_freq
    longest, shortest = original_context / low_freq_factor, original_context / high_freq_factor
    stretched = torch.where(wavelength > longest, inv_freq / factor, inv_freq)
    if low_freq_factor == high_freq_factor:  # Llama 4: no blended range
        return stretched
    smooth = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(between, blended, stretched)


def scale_yarn(
    inv_freq: Tensor,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_context: int,
    truncate: bool = True,
) -> Tensor:
    """YaRN scaling: dimensions with fewer than beta_slow rotations in the original context are stretched by `factor`.

    Those with more than beta_fast rotations are unchanged; a linear ramp blends the ones in between.
    """
    half = inv_freq.shape[0]

    def dimension(rotations: float) -> float:
        return 2 * half * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = torch.clamp((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001), 0, 1)
    kept = 1 - ramp
    return inv_freq / factor * (1 - kept) + inv_freq * kept


class RopeTable:
    """Cosines and sines by position, float32; grows in whole blocks as sequences get longer.

    inv_freq          float32 [half]
    attention_factor  multiplies both cosines and sines
    """

    def __init__(self, inv_freq: Tensor, attention_factor: float = 1.0, device: str | torch.device = "cpu") -> None:
        self.inv_freq = inv_freq.float().contiguous()
        self.attention_factor = attention_factor
        self.device = torch.device(device)
        half = self.inv_freq.shape[0]
        self._cos = torch.empty((0, half), dtype=torch.float32, device=self.device)
        self._sin = torch.empty((0, half), dtype=torch.float32, device=self.device)

    def rows(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each float32 [num_tokens, half], at `positions` int64 [num_tokens], all below `length`."""
        self.reserve(length)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def mixed(self, positions: Tensor, axes: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """M-RoPE: as `rows`, with `positions` int64 [axes, num_tokens]; pair j uses axis `axes[j]` (int64 [half])."""
        self.reserve(length)
        places = positions.index_select(0, axes).t()
        return self._cos.gather(0, places), self._sin.gather(0, places)

    def upto(self, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of at least all positions below `length`: float32 [positions, half]."""
        self.reserve(length)
        return self._cos, self._sin

    def reserve(self, length: int) -> None:
        """Grow the table to cover positions below `length`."""
        if length <= self._cos.shape[0]:
            return
        cos, sin = [self._cos], [self._sin]
        for start in range(self._cos.shape[0], length, BLOCK):
            positions = torch.arange(start, start + BLOCK, dtype=torch.float32)
            angles = positions[:, None] * self.inv_freq[None, :]
            cos.append((angles.cos() * self.attention_factor).to(self.device))
            sin.append((angles.sin() * self.attention_factor).to(self.device))
        self._cos, self._sin = torch.cat(cos), torch.cat(sin)
