"""`TensorInfo`: where one stored tensor lies, and as what; `StoredModel`: the plain contents of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, as stored. Nothing is read."""

    name: str
    dtype: str
    """safetensors: BF16, F16, F32, F8_E4M3, U8, I8, I32, ...; GGUF: F32, F16, BF16, Q4_1, Q4_K, ..."""
    shape: tuple[int, ...]
    """Torch order, [N, K] for a linear layer; for packed safetensors the stored shape."""
    nbytes: int
    file: Path
    offset: int
    """Bytes from the start of `file`."""


class StoredModel(Protocol):
    """What detection and checks need of a checkpoint."""

    path: Path
    kind: str
    tensors: dict[str, TensorInfo]
    metadata: dict[str, Any]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    quantization_config: dict[str, Any]
    tokenizer_files: dict[str, Path]
    licence: str

    def read(self, name: str) -> np.ndarray:
        """A tensor's stored bytes, uint8."""
