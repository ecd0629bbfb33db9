"""MXFP4. kinds: mxfp4, gptoss_mxfp4 (all experts of a layer: `x_blocks` U8 [E, N, K/32, 16], `x_scales` [E, N, K/32])

params: codes: suffix; experts: how many (gpt-oss)
"""

from __future__ import annotations

from .module import POWERS_OF_TWO, StoredFormat, StoredModule


def detect(module: StoredModule) -> StoredFormat | None:
    """Codes U8 [N, K/2] with powers of two for scales."""
    blocks = module.get("_blocks")
    if blocks is not None and blocks.dtype == "U8" and len(blocks.shape) == 4:
        module.need("_scales", "an MXFP4 weight")
        module.expect("_scales", blocks.shape[:3])
        experts, n, groups, _ = blocks.shape
        return StoredFormat("gptoss_mxfp4", "mxfp4", (n, groups * 32), {"experts": experts})
    codes = module.suffix("weight_packed", "weight")
    if codes is None or module.dtype(codes) != "U8":
        return None
    n, half = module.matrix(codes)
    if module.need("weight_scale", "a packed weight").dtype not in POWERS_OF_TWO:
        return None
    module.expect("weight_scale", (n, half // 16))
    return StoredFormat("mxfp4", "mxfp4", (n, half * 2), {"codes": codes})
