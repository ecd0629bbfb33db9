"""GGUF's block types; `gguf_types.py` lists their sizes. kind: gguf"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..mapped_file import TensorInfo
from .module import StoredFormat, StoredModule

# codebook types, which no kernel supports: they are converted to bfloat16 while loading
CODEBOOK_TYPES = frozenset(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"))


def detect(module: StoredModule) -> StoredFormat | None:
    """Every matrix."""
    weight = module.get("weight")
    if weight is None or len(weight.shape) != 2:
        return None
    if weight.dtype in ("I8", "I16", "I32", "I64"):
        raise module.unsupported(f"is a matrix of integers ({weight.dtype}) without scales")
    return StoredFormat("gguf", weight.dtype, (weight.shape[0], weight.shape[1]))


def decoded_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Additional bytes of tensors that are decoded to bfloat16 while loading."""
    return sum(2 * math.prod(info.shape) - info.nbytes for info in tensors if info.dtype in CODEBOOK_TYPES)
