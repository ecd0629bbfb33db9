"""NVFP4 of compressed-tensors and of ModelOpt. kind: nvfp4

params: codes: suffix; world: suffix of the per-tensor scale; divides: bool, whether to divide by that scale
"""

from __future__ import annotations

from .module import StoredFormat, StoredModule


def detect(module: StoredModule) -> StoredFormat | None:
    """U8 codes [N, K/2] with E4M3 scales."""
    codes = module.suffix("weight_packed", "weight")
    if codes is None or module.dtype(codes) != "U8":
        return None
    n, half = module.matrix(codes)
    dtype = module.need("weight_scale", "a packed weight").dtype
    divides = codes == "weight_packed"
    if dtype != "F8_E4M3":
        if divides:
            raise module.unsupported(f"has 4-bit codes with {dtype} scales; NVFP4 and MXFP4 are supported")
        return None
    world = "weight_global_scale" if divides else "weight_scale_2"
    module.need(world, "an NVFP4 weight")
    module.expect("weight_scale", (n, half // 8))
    module.expect(world, (), (1,), (1, 1))
    if module.get("svdquant_lora_a") is not None and not divides:
        raise module.unsupported("is NVFP4 with a low-rank branch (NVFP4_SVD), which is not supported")
    return StoredFormat("nvfp4", "nvfp4", (n, half * 2), {"codes": codes, "world": world, "divides": divides})
