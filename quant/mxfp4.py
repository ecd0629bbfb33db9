"""MXFP4: e2m1 codes and one power of two per 32 inputs. Becomes `fp4g32`.

weight_packed or weight u8 [N, K/2], in DeepSeek V4 i8; weight_scale u8 E8M0 [N, K/32]: compressed-tensors, ModelOpt,
gpt-oss (`stacks.py`)
"""

from __future__ import annotations

import torch

from localllm.errors import BadModelFile
from localllm.kernels import Weight

from .stored import WeightReader


def load_mxfp4(module: WeightReader, params: dict) -> Weight:
    """Load one linear layer."""
    n, k = module.shape
    if k % 32:
        raise BadModelFile(f"{module.prefix} has {k} inputs, but MXFP4 needs a multiple of 32")
    qweight = module.get(params["codes"], ("U8", "I8"), (n, k // 2)).view(torch.uint8)
    scales = module.e8m0("weight_scale", (n, k // 32))
    return Weight("fp4g32", module.shape, qweight, scales, pre_scale=module.pre_scale(), group_size=32)
