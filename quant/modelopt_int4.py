"""ModelOpt INT4 AWQ: two rows in a byte, signed codes. Becomes `int4g`.

weight            U8 [N/2, K]: row 2i in the low nibble, row 2i + 1 in the high one, two's complement
weight_scale      [N, K/g], absolute: W4A8's `weight_scale_2` only tells an FP8 kernel its range
pre_quant_scale   [K], optional: multiplies x
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels import Weight

from .packing import Codes, Groups, from_codes
from .stored import WeightReader, bad


def load_modelopt_int4(module: WeightReader, _params: dict) -> Weight:
    """`int4g`: code 8 is 0, as the sign bit flipped makes it."""
    n, k = module.shape
    if n % 2:
        raise bad(f"{module.prefix} has {n} outputs, two share a byte in ModelOpt INT4")
    stored = module.get("weight", ("U8",), (n // 2, k))
    scales = module.scales("weight_scale")
    if scales.dim() != 2 or scales.shape[0] != n:
        raise bad(f"tensor {module.name('weight_scale')} has shape {list(scales.shape)}, expected [{n}, groups]")
    size = module.group_size("weight_scale", scales.shape[1])

    def rows(part: slice) -> Tensor:
        pairs = stored[part.start // 2 : -(-part.stop // 2)] ^ 0x88
        return torch.stack([pairs & 15, pairs >> 4], 1).flatten(0, 1)

    weight = from_codes(module, Codes(4, rows, multiple=2), Groups(scales, None, size, None))
    return weight._replace(pre_scale=module.pre_scale())
