"""Random weights of every canonical form, small enough for the interpreter, and how far a product is from exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from localllm.kernels.dequant import dequantize
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.weight import Weight

BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS")
FORMS = (
    *("dense-bf16", "dense-f16"),
    *("int4g-32", "int4g-64", "int4g-128", "int4g-whole", "int4g-zeros-64", "int4g-zeros-128", "int4g-mins-32"),
    *("int8-row", "int8-32", "fp4g16", "fp4g32", "fp8-tensor", "fp8-row", "fp8-block", "fp8mx"),
    *(f"gguf-{name}" for name in BLOCKS),
)
SMALLEST_K = {"gguf": 256, "fp8-block": 128, "int4g-128": 128, "int4g-zeros-128": 128}


def make(form: str, n: int, k: int) -> Weight:
    """A random weight whose values are of size 0.1 or so; K must be a multiple of its groups."""
    kind, _, variant = form.partition("-")
    nibbles = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    if kind == "dense":
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[variant]
        return Weight("dense", (n, k), (torch.randn(n, k) * 0.1).to(dtype))
    if kind == "int4g":
        shift, _, size = variant.rpartition("-")
        group = k if size == "whole" else int(size)
        scales = (torch.rand(n, k // group) * 0.02 + 0.001).half()
        zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8) if shift == "zeros" else None
        mins = (scales * -7.5).half() if shift == "mins" else None
        return Weight("int4g", (n, k), nibbles, scales, zeros=zeros, mins=mins, group_size=group)
    if kind == "int8":
        group = k if variant == "row" else int(variant)
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        return Weight("int8", (n, k), codes, torch.rand(n, k // group) * 0.001 + 1e-4, group_size=group)
    if kind == "fp4g16":
        scales = (torch.rand(n, k // 16) * 4 + 2**-9).to(torch.float8_e4m3fn)
        return Weight("fp4g16", (n, k), nibbles, scales, global_scale=torch.rand(n) * 0.02 + 0.001, group_size=16)
    if kind == "fp4g32":
        return Weight(
            "fp4g32", (n, k), nibbles, torch.randint(118, 125, (n, k // 32), dtype=torch.uint8), group_size=32
        )
    if kind == "gguf":
        return _gguf(variant, n, k)
    codes = (torch.randn(n, k) * 20).clamp(-448, 448).to(torch.float8_e4m3fn)
    if kind == "fp8mx":
        return Weight("fp8mx", (n, k), codes, torch.randint(114, 121, (n, k // 32), dtype=torch.uint8), group_size=32)
    shape = {"tensor": (1,), "row": (n, 1), "block": (-(-n // 128), -(-k // 128))}[variant]
    return Weight("fp8", (n, k), codes, torch.rand(shape) * 0.005 + 0.001)


def on(device: torch.device, weight: Weight) -> Weight:
    """The weight's tensors on the device the kernels run on."""
    moved: dict[str, Any] = {name: t.to(device) for name, t in weight._asdict().items() if isinstance(t, Tensor)}
    return weight._replace(**moved)


def _gguf(block_type: str, n: int, k: int) -> Weight:
    layout = BLOCK_TYPES[block_type]
    blocks = torch.randint(0, 256, (n, k // layout.elems, layout.nbytes), dtype=torch.uint8)
    for offset in layout.scale_offsets:
        size = 3e-5 if layout.elems == 256 else 3e-3  # super scales meet a scale of up to 127 besides
        scale = (torch.rand(n, k // layout.elems, 1) * size).half()
        blocks[:, :, offset : offset + 2] = scale.view(torch.uint8)
    return Weight("gguf", (n, k), blocks.flatten(1), group_size=layout.elems, block_type=block_type)


def error(y: Tensor, exact: Tensor) -> float:
    """Root mean square of y - exact over that of exact."""
    return float((y.double().cpu() - exact).norm() / exact.norm())


def exact_product(x: Tensor, weight: Weight) -> Tensor:
    """float64 x Wᵀ by the canonical weight's own decoder."""
    return x.double().cpu() @ dequantize(weight).double().t()
