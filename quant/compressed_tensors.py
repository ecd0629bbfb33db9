"""compressed-tensors `pack-quantized`; its NVFP4, MXFP4, INT8 and FP8 formats are in the modules of those names.

weight_packed       I32 [N, words], unsigned q + 2^(bits-1), lowest bits first along K
weight_scale        [N, K/g] or [N, 1]
weight_zero_point   I32 [words, K/g] packed along N with the same offset; or I8 [N, K/g], plain and signed
weight_g_idx        I32 [K], old files only
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels import Weight

from .packing import Codes, from_codes, group_order, unpack_stream, unpack_words
from .stored import WeightReader


def load_pack(module: WeightReader, params: dict) -> Weight:
    """`int4g` up to 4 bits, `int8` above."""
    n, k = module.shape
    bits, dense = params["bits"], params["dense"]
    width = -(-k * bits // 32) if dense else -(-k // (32 // bits))
    words = module.get("weight_packed", ("I32",), (n, width))
    groups = -(-k // params["group_size"])
    scales = module.scales("weight_scale", (n, groups))
    zeros = _zeros(module, bits, groups, params)
    g_idx = module.get("weight_g_idx", ("I32", "I64"), (k,)) if params["g_idx"] else None
    if g_idx is not None and bool((g_idx < 0).all()):
        g_idx = None  # -1 everywhere: allocated but never filled
    unpack = unpack_stream if dense else unpack_words
    codes = Codes(bits, lambda rows: unpack(words[rows], bits)[:, :k])
    return from_codes(module, codes, group_order(module, scales, zeros, params["group_size"], g_idx))


def _zeros(module: WeightReader, bits: int, groups: int, params: dict) -> Tensor | None:
    """u8 [N, K/g] with the offset of the codes, or None for the middle code."""
    kind = params["zero_point"]
    n = module.shape[0]
    if kind is None:
        return None
    if kind == "packed":
        words = module.get("weight_zero_point", ("I32",), (-(-n * bits // 32), groups))
        return unpack_stream(words.t().contiguous(), bits)[:, :n].t().contiguous()
    plain = module.get("weight_zero_point", ("I8",), (n, groups)).short() + (1 << (bits - 1))
    if int(plain.min()) < 0 or int(plain.max()) >= 1 << bits:
        raise module.bad("weight_zero_point", f"has zero points outside {bits} bits")
    return plain.to(torch.uint8)
