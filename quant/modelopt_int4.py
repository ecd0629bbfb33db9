"""ModelOpt INT4 AWQ: two rows per byte, signed codes. Becomes `int4g`.

weight            U8 [N/2, K]: row 2i in the low nibble, row 2i + 1 in the high one, two's complement
weight_scale      [N, K/g], absolute; W4A8's `weight_scale_2` only gives FP8 kernels their range and is not needed
pre_quant_scale   [K], optional: multiplies x
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels import Weight

from .packing import Codes, from_codes, group_order
from .stored import WeightReader


def load_modelopt_int4(module: WeightReader, params: dict) -> Weight:
    """`int4g`; flipping the sign bit of the codes makes 8 the code of 0."""
    n, k = module.shape
    stored = module.get("weight", ("U8",), (n // 2, k))
    size = params["group_size"]
    scales = module.scales("weight_scale", (n, -(-k // size)))

    def rows(part: slice) -> Tensor:
        pairs = stored[part.start // 2 : -(-part.stop // 2)] ^ 0x88
        return torch.stack([pairs & 15, pairs >> 4], 1).flatten(0, 1)

    weight = from_codes(module, Codes(4, rows, multiple=2), group_order(module, scales, None, size))
    return weight._replace(pre_scale=module.pre_scale())
