"""NVFP4: e2m1 codes, one E4M3 scale per 16 inputs, one number per tensor. Becomes `fp4g16`.

                     codes u8 [N, K/2]   scales e4m3 [N, K/16]   per tensor, f32 [] or [1]
modelopt             weight              weight_scale            weight_scale_2, multiplies
compressed-tensors   weight_packed       weight_scale            weight_global_scale, divides
"""

from __future__ import annotations

import torch

from localllm.errors import UnsupportedFormat
from localllm.kernels import Weight

from .stored import Module, bad


def load_modelopt(module: Module, _params: dict) -> Weight:
    """ModelOpt NVFP4, W4A16 and AWQ variants too; `pre_quant_scale` is kept."""
    if module.has("svdquant_lora_a"):
        raise UnsupportedFormat(
            f"{module.prefix} is NVFP4 with a low-rank branch (NVFP4_SVD), which cannot be read",
            "use the plain NVFP4, FP8 or BF16 version of this model",
        )
    return _load(module, "weight", module.scalar("weight_scale_2"))


def load_compressed(module: Module, _params: dict) -> Weight:
    """compressed-tensors `nvfp4-pack-quantized`."""
    return _load(module, "weight_packed", 1.0 / module.scalar("weight_global_scale"))


def _load(module: Module, codes: str, alpha: float) -> Weight:
    n, k = module.shape
    if k % 16:
        raise bad(f"{module.prefix} has {k} inputs, NVFP4 needs a multiple of 16")
    qweight = module.get(codes, ("U8",), (n, k // 2))
    scales = module.e4m3("weight_scale", (n, k // 16))
    return Weight(
        "fp4g16",
        module.shape,
        qweight,
        scales,
        global_scale=torch.full((n,), alpha, dtype=torch.float32),
        pre_scale=module.pre_scale(),
        group_size=16,
    )
