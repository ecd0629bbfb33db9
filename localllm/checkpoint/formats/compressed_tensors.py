"""compressed-tensors `pack-quantized`: I32 words along K, `weight_shape` = [N, K]. kind: ct_pack

params: bits, group_size, zero_point: None | "packed" | "plain" (int8 [N, K/g]), g_idx: bool,
        dense: bool (False: floor(32 / bits) values per word)
"""

from __future__ import annotations

from typing import Any

from .module import StoredFormat, StoredModule, positive


def detect(module: StoredModule) -> StoredFormat | None:
    """`weight_packed` I32."""
    if module.get("weight_packed") is None:
        return None
    if module.dtype("weight_packed") != "I32":
        dtype = module.dtype("weight_packed")
        raise module.unsupported(f"has weight_packed stored as {dtype}; I32 and U8 are supported")
    rows, words = module.matrix("weight_packed")
    scale = module.need("weight_scale", "a packed weight")
    if module.get("weight_meta") is not None or module.get("meta") is not None:
        raise module.unsupported("is stored as compressed-tensors marlin-24, which is not supported (removed upstream)")
    bits = _bits(module)
    stated = module.ints("weight_shape", 2)
    n, k = stated or [rows, words * 32 // (bits or 4)]
    if bits is None:
        bits = max(1, words * 32 // k) if k > 0 else 4
    if n != rows or k < 1 or bits not in range(1, 9):
        raise module.bad(
            f"{module.name}.weight_shape", f"says [{n}, {k}], but weight_packed has {rows} rows of {words} words"
        )
    dense = words == -(-k * bits // 32)
    if not dense and words != -(-k // (32 // bits)):
        what = f"has {words} words per row; {bits} bits and {k} inputs need {-(-k * bits // 32)}"
        raise module.bad(f"{module.name}.weight_packed", what)
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    if len(scale.shape) == 0 or scale.shape[0] != n:
        raise module.bad(scale.name, f"has shape {list(scale.shape)}, expected [{n}, groups of {k} inputs]")
    size = module.group_size("weight_scale", k, groups, _stated(module, "group_size"))
    zero = module.get("weight_zero_point")
    kind = None if zero is None else ("packed" if zero.dtype == "I32" else "plain")
    if kind == "packed":
        module.expect("weight_zero_point", (-(-n * bits // 32), groups), (n * bits // 32, groups))
    elif kind == "plain":
        module.expect("weight_zero_point", (n, groups))
    g_idx = module.get("weight_g_idx")
    if g_idx is not None:
        module.expect("weight_g_idx", (k,))
    params = {"bits": bits, "group_size": size, "zero_point": kind, "g_idx": g_idx is not None, "dense": dense}
    return StoredFormat("ct_pack", f"w{bits}a16", (n, k), params)


def _bits(module: StoredModule) -> int | None:
    """`num_bits` if all groups of the config agree on it; else None, and the shapes decide."""
    found = {positive(bits) for bits in _stated(module, "num_bits")}
    return found.pop() if len(found) == 1 else None


def _stated(module: StoredModule, key: str) -> list[Any]:
    """The values of `key` in the config's weight settings, one per group of modules."""
    groups = module.model.quantization_config.get("config_groups")
    parts = groups.values() if isinstance(groups, dict) else ()
    weights = (part.get("weights") if isinstance(part, dict) else None for part in parts)
    return [one.get(key) for one in weights if isinstance(one, dict)]
