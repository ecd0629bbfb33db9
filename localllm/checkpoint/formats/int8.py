"""INT8 with one scale per row. kind: int8"""

from __future__ import annotations

from .module import StoredFormat, StoredModule


def detect(module: StoredModule) -> StoredFormat | None:
    """`weight` in I8."""
    if module.dtype("weight") != "I8":
        return None
    n, k = module.matrix("weight")
    module.need("weight_scale", "an INT8 weight")
    module.expect("weight_scale", (n, 1), (n,), (1,), (), (1, 1))
    return StoredFormat("int8", "int8", (n, k))
