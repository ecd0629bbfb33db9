"""GPTQ with 2, 3, 4 or 8 bits. kind: gptq

params: bits, group_size, sym: bool | None (None: unknown, see qzeros), v2: bool, g_idx: bool
"""

from __future__ import annotations

from .module import StoredFormat, StoredModule, positive


def detect(module: StoredModule) -> StoredFormat | None:
    """`qweight` with g_idx; or with scales of the same width and a different number of rows than in AWQ."""
    qweight = module.get("qweight")
    if qweight is None:
        return None
    module.need("scales", "a packed weight")
    method = str(module.setting("quant_method") or "").lower()
    if method == "exl2" or qweight.dtype not in ("I32", "I16"):
        raise module.unsupported(f"has qweight stored as {qweight.dtype}; AWQ and GPTQ use I32 or I16")
    rows, columns = module.matrix("qweight")
    groups, width = module.matrix("scales")
    g_idx = module.get("g_idx")
    if qweight.dtype == "I16" or (g_idx is None and (width != columns or groups == rows)):
        return None
    label = str(module.setting("checkpoint_format", "format") or "gptq").lower()
    if label not in ("gptq", "gptq_v2") or module.setting("is_marlin_format"):
        label = "marlin" if label == "gptq" else label
        raise module.unsupported(f"is GPTQ in the layout {label}; gptq and gptq_v2 are supported")
    bits, qzeros = positive(module.setting("bits", "w_bit")), module.get("qzeros")
    if g_idx is not None:
        bits = rows * 32 // g_idx.shape[0] if g_idx.shape[0] else 0
    elif qzeros is not None and columns:  # modules may differ from the config's bits (AutoRound's extra_config)
        bits = module.matrix("qzeros")[1] * 32 // columns
    bits = bits or 4
    if bits not in (2, 3, 4, 8) or rows * 32 % bits:
        raise module.unsupported(f"is GPTQ with {bits} bits; 2, 3, 4 and 8 are supported")
    k = rows * 32 // bits
    if g_idx is not None:
        module.expect("g_idx", (k,))
    module.expect("scales", (groups, columns))
    sym = module.setting("sym")
    if sym is not True or qzeros is not None:
        module.need("qzeros", "an asymmetric GPTQ weight")
        module.expect("qzeros", (groups, columns * bits // 32))
    size = positive(module.setting("group_size"))
    if g_idx is None:
        size = module.group_size("scales", k, groups, (size,))
    elif size is None or -(-k // size) != groups:
        size = -(-k // groups)
    params = {"bits": bits, "group_size": size, "sym": sym if isinstance(sym, bool) else None}
    params |= {"v2": label == "gptq_v2" or _is_auto_round_packing(module), "g_idx": g_idx is not None}
    return StoredFormat("gptq", "gptq", (columns, k), params)


def _is_auto_round_packing(module: StoredModule) -> bool:
    """True if AutoRound packed the weights in its own layout, which is like v2. Older files state it as `backend`."""
    packing = str(module.setting("packing_format", "backend") or "").replace("gptqmodel", "")
    return packing.startswith("auto_round") and "gptq" not in packing
