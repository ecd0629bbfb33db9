"""AWQ, 4 bits, in three layouts. kinds: awq_gemm, awq_gemv, awq_gemv_fast

params: group_size; zero_point: bool (False: z = 8; awq_gemv_fast's qzeros hold -(scale * zero))
"""

from __future__ import annotations

from .module import StoredFormat, StoredModule, positive


def detect(module: StoredModule) -> StoredFormat | None:
    """`qweight` in I16 is GEMV-fast; otherwise its shape relative to `scales` decides (GPTQ is tried first)."""
    if module.get("qweight") is None:
        return None
    rows, columns = module.matrix("qweight")
    groups, width = module.matrix("scales")
    if module.dtype("qweight") == "I16":
        return _stored(module, "awq_gemv_fast", (rows * 4, columns))
    if columns * 8 == width:
        return _stored(module, "awq_gemm", (width, rows))
    if groups == rows:
        return _stored(module, "awq_gemv", (rows, columns * 8))
    what = f"qweight {[rows, columns]} and scales {[groups, width]} match neither AWQ nor GPTQ"
    raise module.bad(f"{module.name}.qweight", what)


def _stored(module: StoredModule, kind: str, shape: tuple[int, int]) -> StoredFormat:
    bits = module.setting("bits", "w_bit")
    if bits not in (None, 4):
        raise module.unsupported(f"is AWQ with {bits} bits; only 4 bits are supported")
    n, k = shape
    stated = module.setting("group_size", "q_group_size")
    if kind == "awq_gemm":
        size = module.group_size("scales", k, module.tensors["scales"].shape[0], (stated,))
    else:  # scales are padded here, so only the config states the size; every tool defaults to 128
        size = positive(stated) or 128
    zero_point = module.setting("zero_point") is not False
    if zero_point:
        module.need("qzeros", "an asymmetric AWQ weight")
        if kind == "awq_gemm":
            module.expect("qzeros", (-(-k // size), n // 8))
    return StoredFormat(kind, "awq", shape, {"group_size": size, "zero_point": zero_point})
