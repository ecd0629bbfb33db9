"""MXFP4. kind: mxfp4

params: codes: suffix
"""

from __future__ import annotations

from .module import POWERS_OF_TWO, StoredFormat, StoredModule


def detect(module: StoredModule) -> StoredFormat | None:
    """U8 codes [N, K/2] with power-of-two scales; I8 ones in the files of DeepSeek V4."""
    codes = module.suffix("weight_packed", "weight")
    if codes is None or module.dtype(codes) not in ("U8", "I8"):
        return None
    if module.dtype(codes) == "I8" and module.dtype("weight_scale") not in POWERS_OF_TWO:
        return None  # one byte for a value
    n, half = module.matrix(codes)
    if module.need("weight_scale", "a packed weight").dtype not in POWERS_OF_TWO:
        return None
    module.expect("weight_scale", (n, half // 16))
    return StoredFormat("mxfp4", "mxfp4", (n, half * 2), {"codes": codes})
