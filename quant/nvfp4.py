"""NVFP4: e2m1 codes, one E4M3 scale per 16 inputs, one number per tensor. Becomes `fp4g16`.

                     codes u8 [N, K/2]   scales e4m3 [N, K/16]   per tensor, f32 [] or [1]
modelopt             weight              weight_scale            weight_scale_2, multiplies
compressed-tensors   weight_packed       weight_scale            weight_global_scale, divides
"""

from __future__ import annotations

import torch

from localllm.errors import BadModelFile
from localllm.kernels import Weight

from .stored import WeightReader


def load_nvfp4(module: WeightReader, params: dict) -> Weight:
    """Load one linear layer, including W4A16 and AWQ variants; `pre_quant_scale` is kept."""
    n, k = module.shape
    if k % 16:
        raise BadModelFile(f"{module.prefix} has {k} inputs, but NVFP4 needs a multiple of 16")
    world = module.scalar(params["world"])
    alpha = 1.0 / world if params["divides"] else world
    return Weight(
        "fp4g16",
        module.shape,
        module.get(params["codes"], ("U8",), (n, k // 2)),
        module.e4m3("weight_scale", (n, k // 16)),
        global_scale=torch.full((n,), alpha, dtype=torch.float32),
        pre_scale=module.pre_scale(),
        group_size=16,
    )
