"""ModelOpt INT4 AWQ: `weight` U8 [N/2, K] with float scales. kind: modelopt_int4

params: group_size
"""

from __future__ import annotations

from .module import StoredFormat, StoredModule


def detect(module: StoredModule) -> StoredFormat | None:
    """U8 codes packed along N; formats that pack along K are tried first."""
    if module.dtype("weight") != "U8":
        return None
    rows, columns = module.matrix("weight")
    if module.need("weight_scale", "a packed weight").shape in ((), (1,)):
        raise module.unsupported("has U8 codes with one scale, the layout of BitNet, which is not supported")
    n, groups = module.matrix("weight_scale")
    if n != rows * 2:
        what = f"has shape {[n, groups]}, expected [{rows * 2}, groups of {columns} inputs]"
        raise module.bad(module.tensor("weight_scale"), what)
    size = module.group_size("weight_scale", columns, groups, (module.setting("group_size"),))
    return StoredFormat("modelopt_int4", "w4a16", (n, columns), {"group_size": size})
