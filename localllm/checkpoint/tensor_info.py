"""`TensorInfo`: where one stored tensor lies, and as what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, as stored. Nothing is read."""

    name: str
    dtype: str  # safetensors: BF16, F16, F32, F8_E4M3, U8, I8, I32, ...; GGUF: F32, F16, BF16, Q4_1, Q4_K, ...
    shape: tuple[int, ...]  # Torch order, [N, K] for a linear layer; for packed safetensors the stored shape.
    nbytes: int
    file: Path
    offset: int  # Bytes from the start of `file`.
