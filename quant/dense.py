"""Dense weights, and other float tensors: norms, biases, embeddings.

weight   BF16 | F16 | F32 | F64  [N, K]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localllm.kernels import Weight

from .stored import FLOATS, WeightReader, read_tensor

if TYPE_CHECKING:
    from localllm.checkpoint.checkpoint import Checkpoint

COPY_BELOW_BYTES = 16 << 20


def load_dense(module: WeightReader, _params: dict) -> Weight:
    """Form `dense` in the file's dtype (F64 becomes f32), as a read-only view of the file."""
    weight = module.get("weight", (*FLOATS, "F64"), module.shape)
    return Weight("dense", module.shape, weight.float() if weight.dtype == torch.float64 else weight)


def read_dense(ckpt: Checkpoint, name: str) -> Tensor:
    """Read a float tensor as stored, f32 | bf16 | f16 (F64 becomes f32): norms, biases, dense embeddings.

    Below 16 MiB the result is a copy; above, a view of the mapped file that must not be written to.
    Raises BadModelFile if the tensor is missing or not a float type.
    """
    tensor = read_tensor(ckpt, name, (*FLOATS, "F64"))
    if tensor.dtype == torch.float64:
        return tensor.float()
    return tensor.clone() if tensor.numel() * tensor.element_size() < COPY_BELOW_BYTES else tensor
