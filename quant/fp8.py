"""FP8 E4M3 weights: per tensor, per row, in blocks of 128 x 128, and MXFP8.

weight          F8_E4M3 [N, K]
weight_scale    multiplies; [] | [1] | [N] | [N, 1] | [cdiv(N, 128), cdiv(K, 128)] | [.., 1, .., 1]
                [N / 64, cdiv(K, 128)] for rows cut out of blocks (`checkpoint.shards`)
weight_scale_inv   also multiplies, despite its name; F32 (DeepSeek) or BF16 (Qwen); U8 and E8M0 are powers of two
MXFP8           weight_scale or weight_scale_inv u8 E8M0 [N, K/32]
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels import Weight
from localllm.kernels.dequant import FP8_BLOCK

from .stored import FLOATS, WeightReader


def load_fp8(module: WeightReader, params: dict) -> Weight:
    """`fp8` with float32 scales: [1], [N, 1] or one per 128 x 128 block. `dense` if blocks are half as high."""
    n, k = module.shape
    weight = module.e4m3("weight", module.shape)
    scales = _float32(module, params["scale"])
    if "rows" in params:
        factors = scales.repeat_interleave(params["rows"], 0).repeat_interleave(FP8_BLOCK, 1)
        return Weight("dense", module.shape, weight.float() * factors[:n, :k])
    blocks = (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
    if scales.numel() == 1:
        scales = scales.view(1)
    elif tuple(scales.shape) in ((n,), (n, 1)):
        scales = scales.view(n, 1)
    else:
        scales = scales.view(blocks)
    size = FP8_BLOCK if scales.dim() == 2 and scales.shape[1] != 1 else 0
    return Weight("fp8", module.shape, weight, scales, pre_scale=module.pre_scale(), group_size=size)


def load_mxfp8(module: WeightReader, params: dict) -> Weight:
    """`fp8mx`: one power of two per 32 inputs."""
    n, k = module.shape
    weight = module.e4m3("weight", module.shape)
    scales = module.e8m0(params["scale"], (n, k // 32))
    return Weight("fp8mx", module.shape, weight, scales, pre_scale=module.pre_scale(), group_size=32)


def _float32(module: WeightReader, suffix: str) -> Tensor:
    stored = module.get(suffix, (*FLOATS, "U8", "F8_E8M0", "F8_E4M3"))
    if stored.dtype == torch.uint8:
        module.e8m0(suffix, tuple(stored.shape))
        return torch.ldexp(torch.ones(stored.shape), stored.int() - 127)
    return module.finite(suffix, stored.float())
