"""Unquantized weights. kind: dense"""

from __future__ import annotations

from .module import DENSE, StoredFormat, StoredModule


def detect(module: StoredModule) -> StoredFormat | None:
    """`weight` with two dimensions; raises UnsupportedFormat for a matrix of an unknown dtype."""
    weight = module.get("weight")
    if weight is None or len(weight.shape) != 2:
        return None
    if weight.dtype not in DENSE:
        raise module.unsupported(f"is a matrix of {weight.dtype}, which is not supported")
    return StoredFormat("dense", DENSE[weight.dtype], module.matrix("weight"))
