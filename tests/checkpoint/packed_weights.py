"""Random linear layers in each family of stored formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GROUP = 32
MODULES = tuple(f"{name}.weight" for name in ("_proj", ".w1", ".w2", ".w3", ".dense"))
Packed = dict[str, Tensor]


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def scales(*shape: int) -> Tensor:
    """Such that four-bit codes make weights of about 1 / sqrt(K)."""
    return torch.rand(shape) * 0.01 + 0.02


def awq(n: int, k: int) -> Packed:
    groups = k // GROUP
    return {"qweight": words(k, n // 8), "qzeros": words(groups, n // 8), "scales": scales(groups, n).half()}


def gptq(n: int, k: int) -> Packed:
    order = torch.randperm(k).int() // GROUP
    return {
        "qweight": words(k // 8, n),
        "qzeros": words(k // GROUP, n // 8),
        "scales": scales(k // GROUP, n).half(),
        "g_idx": order,
        "bias": torch.zeros(n).half(),
    }


def compressed(n: int, k: int) -> Packed:
    packed, scale = words(n, k // 8), scales(n, k // GROUP).bfloat16()
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([n, k])}


def fp8(n: int, k: int) -> Packed:
    return {"weight": torch.randn(n, k).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.1 + n / 1e4)}


def nvfp4(n: int, k: int) -> Packed:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = (torch.rand(n, k // 16) + 0.5).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(0.04 + n / 1e5)}


PACK4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[int, int], Packed], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}),
    "compressed-tensors": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": PACK4}},
        },
    ),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


def packed_model(model: Any, name: str) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """What replaces the projections of a tiny model, and its `quantization_config`."""
    pack, config = FORMATS[name]
    tensors: dict[str, Tensor | None] = {}
    for key, weight in model.tensors.items():
        if key.endswith(MODULES) and not weight.shape[0] % 8 and not weight.shape[1] % GROUP:
            tensors[key] = None
            module = key.removesuffix(".weight")
            tensors |= {f"{module}.{suffix}": part for suffix, part in pack(*weight.shape).items()}
    return tensors, config
