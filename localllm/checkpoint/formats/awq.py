"""Detection of integer formats, whose packing the shapes must tell: AWQ, GPTQ, compressed-tensors' packed integers."""

from __future__ import annotations

from typing import Any

from .stored_format import Module, StoredFormat


def awq_or_gptq(module: Module) -> StoredFormat:
    """`qweight`: I16 is AWQ GEMV-fast; with g_idx it is GPTQ; otherwise the shapes against `scales` decide."""
    qweight = module.tensors["qweight"]
    module.need("scales", "a packed weight")
    method = str(module.setting("quant_method") or "").lower()
    if method == "exl2" or qweight.dtype not in ("I32", "I16"):
        raise module.unsupported(f"qweight is stored as {qweight.dtype}: AWQ and GPTQ use I32 or I16")
    rows, columns = module.matrix("qweight")
    groups, width = module.matrix("scales")
    if qweight.dtype == "I16":
        return _awq(module, "awq_gemv_fast", (rows * 4, columns))
    if module.get("g_idx") is not None:
        return _gptq(module, rows, columns)
    if columns * 8 == width:
        return _awq(module, "awq_gemm", (width, rows))
    if groups == rows:
        return _awq(module, "awq_gemv", (rows, columns * 8))
    if width == columns:
        return _gptq(module, rows, columns)
    what = f"qweight {[rows, columns]} and scales {[groups, width]} fit neither AWQ nor GPTQ"
    raise module.bad(f"{module.name}.qweight", what)


def _awq(module: Module, kind: str, shape: tuple[int, int]) -> StoredFormat:
    bits = module.setting("bits", "w_bit")
    if bits not in (None, 4):
        raise module.unsupported(f"AWQ with {bits} bits; only 4 exist in practice")
    n, k = shape
    size = _positive(module.setting("group_size", "q_group_size"))
    if kind == "awq_gemm":
        groups = module.tensors["scales"].shape[0]
        if k % groups:
            raise module.bad(f"{module.name}.scales", f"has {groups} groups, which do not divide {k} inputs")
        size = k // groups
    else:
        size = size or 128  # scales are padded there: only the config knows; 128 is what every tool defaults to
    zero_point = module.setting("zero_point") is not False
    if zero_point:
        module.need("qzeros", "an asymmetric AWQ weight")
        if kind == "awq_gemm":
            module.expect("qzeros", (k // size, n // 8))
    if k % size:
        raise module.bad(f"{module.name}.qweight", f"has {k} inputs, not a multiple of the group size {size}")
    return module.made(kind, shape, bits=4, group_size=size, zero_point=zero_point)


def _gptq(module: Module, rows: int, columns: int) -> StoredFormat:
    label = str(module.setting("checkpoint_format", "format") or "gptq").lower()
    if label not in ("gptq", "gptq_v2") or module.setting("is_marlin_format"):
        raise module.unsupported(
            f"GPTQ in the layout {label if label != 'gptq' else 'marlin'}; gptq and gptq_v2 are read"
        )
    g_idx = module.get("g_idx")
    bits = _positive(module.setting("bits", "w_bit"))
    if g_idx is not None:
        bits = rows * 32 // g_idx.shape[0] if g_idx.shape[0] else 0
    bits = bits or 4
    if bits not in (2, 3, 4, 8) or rows * 32 % bits:
        raise module.unsupported(f"GPTQ with {bits} bits; 2, 3, 4 and 8 are read")
    k = rows * 32 // bits
    if g_idx is not None:
        module.expect("g_idx", (k,))
    groups = module.tensors["scales"].shape[0]
    module.expect("scales", (groups, columns))
    sym = module.setting("sym")
    if sym is not True or module.get("qzeros") is not None:
        module.need("qzeros", "an asymmetric GPTQ weight")
        module.expect("qzeros", (groups, columns * bits // 32))
    size = _positive(module.setting("group_size"))
    if size is None or -(-k // size) != groups:
        size = -(-k // groups)
    params: dict[str, Any] = {"bits": bits, "group_size": size, "sym": sym if isinstance(sym, bool) else None}
    return module.made("gptq", (columns, k), **params, v2=label == "gptq_v2", g_idx=g_idx is not None)


def compressed_ints(module: Module) -> StoredFormat:
    """compressed-tensors `pack-quantized`: I32 words along K, `weight_shape` = [N, K]."""
    rows, words = module.matrix("weight_packed")
    scale = module.need("weight_scale", "a packed weight")
    if module.get("weight_meta") is not None or module.get("meta") is not None:
        raise module.unsupported("compressed-tensors marlin-24 is not read (removed upstream as well)")
    bits = _bits(module)
    stated = module.ints("weight_shape", 2)
    n, k = stated or [rows, words * 32 // (bits or 4)]
    if bits is None:
        bits = max(1, words * 32 // k) if k > 0 else 4
    if n != rows or k < 1 or bits not in range(1, 9):
        raise module.bad(
            f"{module.name}.weight_shape", f"says [{n}, {k}], weight_packed has {rows} rows of {words} words"
        )
    dense = words == -(-k * bits // 32)
    if not dense and words != -(-k // (32 // bits)):
        what = f"has {words} words a row, {bits} bits and {k} inputs need {-(-k * bits // 32)}"
        raise module.bad(f"{module.name}.weight_packed", what)
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    if len(scale.shape) == 0 or scale.shape[0] != n or k % groups:
        raise module.bad(scale.name, f"has shape {list(scale.shape)}, [{n}, groups that divide {k}] is expected")
    zero = module.get("weight_zero_point")
    kind = None if zero is None else ("packed" if zero.dtype == "I32" else "plain")
    if kind == "packed":
        module.expect("weight_zero_point", (-(-n * bits // 32), groups), (n * bits // 32, groups))
    elif kind == "plain":
        module.expect("weight_zero_point", (n, groups))
    g_idx = module.get("weight_g_idx")
    if g_idx is not None:
        module.expect("weight_g_idx", (k,))
    params: dict[str, Any] = {"bits": bits, "group_size": k // groups, "zero_point": kind}
    return module.made("ct_pack", (n, k), **params, g_idx=g_idx is not None, dense=dense)


def _bits(module: Module) -> int | None:
    """`num_bits` when all groups of the config agree on it; else the shapes tell."""
    groups = module.config.get("config_groups")
    if not isinstance(groups, dict):
        return None
    found = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            found.add(_positive(weights.get("num_bits")))
    return found.pop() if len(found) == 1 else None


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
