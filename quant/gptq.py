"""GPTQ with 2, 3, 4 or 8 bits: w = (q - z[g]) * s[g].

qweight   I32 [K * bits / 32, N], a little-endian bit stream along K
qzeros    I32 [G, N * bits / 32], along N; v1 stores z - 1, v2 stores z; not read if the file is symmetric
scales    F16 [G, N]
g_idx     I32 [K], the group of each input column
"""

from __future__ import annotations

from torch import Tensor

from localllm.errors import BadModelFile
from localllm.kernels import Weight

from .packing import Codes, from_codes, group_order, unpack_stream
from .stored import WeightReader

# qzeros words of a symmetric file: (v1, v2), as signed words
_SYMMETRIC_WORDS = {4: (0x77777777, -0x77777778), 8: (0x7F7F7F7F, -0x7F7F7F80)}


def load_gptq(module: WeightReader, params: dict) -> Weight:
    """`int4g`, or `int8` for 8 bits; `perm` is set only if g_idx really reorders columns, whatever `desc_act` says."""
    n, k = module.shape
    bits = params["bits"]
    if n * bits % 32:
        raise BadModelFile(f"{module.prefix} has {n} outputs, which do not fill whole 32-bit words of {bits}-bit GPTQ")
    words = module.get("qweight", ("I32",), (k * bits // 32, n))
    scales = module.scales("scales").t().contiguous()
    zeros = _zeros(module, bits, scales.shape[1], params)
    g_idx = module.get("g_idx", ("I32", "I64"), (k,)) if params["g_idx"] else None
    codes = Codes(bits, lambda rows: unpack_stream(words[:, rows].t(), bits))
    return from_codes(module, codes, group_order(module, scales, zeros, params["group_size"], g_idx))


def _zeros(module: WeightReader, bits: int, groups: int, params: dict) -> Tensor | None:
    """u8 [N, G], or None for the middle code."""
    if params["sym"] is True:
        return None
    n = module.shape[0]
    words = module.get("qzeros", ("I32",), (groups, n * bits // 32))
    # Some published files are labelled wrong: if all words equal a symmetric constant, the file is symmetric.
    if any(bool((words == constant).all()) for constant in _SYMMETRIC_WORDS.get(bits, ())):
        return None
    zeros = unpack_stream(words, bits)
    if not params["v2"]:
        zeros = (zeros + 1) & ((1 << bits) - 1)  # 15 -> 0, as AutoGPTQ does
    return zeros.t().contiguous()
