"""Canonical weights -> tensors and configuration of a weight-only compressed-tensors checkpoint.

form     format                  tensors, by suffix of the module's name
int4g    pack-quantized          weight_packed i32, weight_scale, weight_zero_point i32 packed along N, weight_shape
int8     pack-quantized, 8 bits  weight_packed i32, weight_scale [N, 1], weight_shape
fp8      float-quantized         weight e4m3, weight_scale [N, 1] or [blocks of N, blocks of K]
fp4g16   nvfp4-pack-quantized    weight_packed u8, weight_scale e4m3, weight_global_scale [1], which divides
fp4g32   mxfp4-pack-quantized    weight_packed u8, weight_scale u8
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from localllm.kernels import Weight
from localllm.kernels.dequant import unpack_nibbles

from .encode import Target

VERSION = "0.13.0"  # of compressed-tensors, which defines this layout


def tensors(weight: Weight) -> dict[str, Tensor]:
    """Suffix -> tensor to store. Raises ValueError for a form without a compressed-tensors layout."""
    assert weight.scales is not None
    if weight.form == "int4g" and weight.mins is None:
        found = {"weight_packed": pack_words(unpack_nibbles(weight.qweight), 4), "weight_scale": weight.scales}
        if weight.zeros is not None:
            found["weight_zero_point"] = pack_words(weight.zeros.t(), 4).t().contiguous()
        return found | {"weight_shape": torch.tensor(weight.shape)}
    if weight.form == "int8":
        codes = (weight.qweight.to(torch.int16) + 128).to(torch.uint8)
        packed = pack_words(codes, 8)
        return {"weight_packed": packed, "weight_scale": weight.scales, "weight_shape": torch.tensor(weight.shape)}
    if weight.form == "fp8":
        return {"weight": weight.qweight, "weight_scale": weight.scales}
    if weight.form not in ("fp4g16", "fp4g32"):
        raise ValueError(f"compressed-tensors has no layout for {weight.form}")
    found = {"weight_packed": weight.qweight, "weight_scale": weight.scales}
    if weight.global_scale is not None:
        found["weight_global_scale"] = (1.0 / weight.global_scale[:1]).contiguous()
    return found


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """u8 [..., K] -> i32 [..., ceil(K * bits / 32)], lowest bits first; the last word is padded with 0."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    words = torch.zeros(padded.shape[:-1], dtype=torch.int64, device=codes.device)
    for index in range(per_word):
        words |= padded[..., index].long() << (bits * index)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def configuration(target: Target, ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json. `ignored`: linear modules that are not quantized."""
    bits, kind, strategy, group, layout = _SCHEMES[target.name]
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": target.name != "int4",
        "dynamic": False,
        "group_size": target.group_size if group else None,
        "actorder": None,
        "block_structure": [target.group_size, target.group_size] if strategy == "block" else None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    if target.name in _SCALE_DTYPES:
        weights |= dict.fromkeys(("scale_dtype", "zp_dtype"), _SCALE_DTYPES[target.name])
    group_0 = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_0},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": VERSION,
    }


_SCALE_DTYPES = {"mxfp4": "torch.uint8", "nvfp4": "torch.float8_e4m3fn"}
# target -> bits, type, strategy, has a group size, format
_SCHEMES: dict[str, tuple[int, str, str, bool, str]] = {
    "int4": (4, "int", "group", True, "pack-quantized"),
    "int4-sym": (4, "int", "group", True, "pack-quantized"),
    "int8": (8, "int", "channel", False, "pack-quantized"),
    "fp8": (8, "float", "channel", False, "float-quantized"),
    "fp8-block": (8, "float", "block", False, "float-quantized"),
    "nvfp4": (4, "float", "tensor_group", True, "nvfp4-pack-quantized"),
    "mxfp4": (4, "float", "group", True, "mxfp4-pack-quantized"),
}
