"""INT8 weights, row-scaled: compressed-tensors `int-quantized`, ModelOpt SmoothQuant. Run as W8A16.

weight         I8 [N, K]
weight_scale   [N, 1] | [N] | [1] | []
"""

from __future__ import annotations

from localllm.errors import UnsupportedFormat
from localllm.kernels import Weight

from .stored import WeightReader, bad


def load_int8(module: WeightReader, params: dict) -> Weight:
    """`int8` with one scale per row."""
    n, k = module.shape
    weight = module.get("weight", ("I8",), module.shape)
    suffix = params["scale"]
    scales = module.scales(suffix)
    if scales.numel() not in (1, n):
        raise bad(f"tensor {module.name(suffix)} has {scales.numel()} values, {n} rows need 1 or {n}")
    if module.has("weight_zero_point") and bool(
        module.get("weight_zero_point", ("I8", "I32", "F32", "BF16", "F16")).any()
    ):
        raise UnsupportedFormat(
            f"{module.prefix} is INT8 with zero points, which cannot be read", "use a symmetric INT8 or FP8 version"
        )
    scales = scales.view(-1, 1).expand(n, 1).contiguous()
    return Weight("int8", module.shape, weight, scales, pre_scale=module.pre_scale(), group_size=k)
