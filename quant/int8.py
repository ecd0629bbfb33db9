"""INT8 weights with per-row scales: compressed-tensors `int-quantized`, ModelOpt SmoothQuant. Run as W8A16.

weight         I8 [N, K]
weight_scale   [N, 1] | [N] | [1] | []
"""

from __future__ import annotations

from localllm.errors import UnsupportedFormat
from localllm.kernels import Weight

from .stored import FLOATS, WeightReader


def load_int8(module: WeightReader, _params: dict) -> Weight:
    """`int8` with one scale per row."""
    n, k = module.shape
    weight = module.get("weight", ("I8",), module.shape)
    if module.has("weight_zero_point") and bool(module.get("weight_zero_point", ("I8", "I32", *FLOATS)).any()):
        raise UnsupportedFormat(
            f"{module.prefix} is INT8 with zero points, which is not supported", "use a symmetric INT8 or FP8 version"
        )
    scales = module.scales("weight_scale").view(-1, 1).expand(n, 1).contiguous()
    return Weight("int8", module.shape, weight, scales, pre_scale=module.pre_scale(), group_size=k)
