"""GGUF block types: which decoder reads them, ours in PyTorch or, for the rare codebook types, the `gguf` package's."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.checkpoint.formats.gguf import CODEBOOK_TYPES
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.gguf_blocks import dequantize_blocks as _dequantize_blocks

__all__ = ["BLOCK_TYPES", "CODEBOOK_TYPES", "dequantize_blocks"]


def dequantize_blocks(data: Tensor, block_type: str) -> Tensor:
    """Rows as stored, u8 [rows, row_bytes] -> float32 [rows, K], bit for bit as `gguf.quants` gives them.

    Raises ValueError for an unknown block type or a row that is no whole number of blocks.
    """
    if block_type not in CODEBOOK_TYPES:
        return _dequantize_blocks(data, block_type)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[block_type]))
