"""AWQ, 4 bits: w = (q - z) * s, no +1 on zeros. All three layouts become `int4g`.

gemm        qweight I32 [K, N/8], qzeros I32 [K/g, N/8], scales [K/g, N]; packed along N, column j of a word in nibble
            (0, 4, 1, 5, 2, 6, 3, 7)[j]
gemv        qweight I32 [N, K/8], lowest bits first; qzeros I32 [N, Zw], scales [N, Zw * 8], padded
gemv_fast   qweight I16 [N/4, K]; scales [Zw * 8, N] and qzeros float [Zw * 8, N], holding -(scale * zero)
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.errors import BadModelFile
from localllm.kernels import Weight

from .packing import Codes, from_codes, group_order, unpack_stream
from .stored import WeightReader

_COLUMN_SHIFTS = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32)


def unpack_gemm(words: Tensor) -> Tensor:
    """i32 [R, C/8] -> u8 [R, C] in logical column order."""
    return ((words.unsqueeze(-1) >> _COLUMN_SHIFTS) & 15).to(torch.uint8).flatten(-2)


def unpack_gemv_fast(words: Tensor) -> Tensor:
    """i16 [N/4, K] -> u8 [N, K]: four rows share a word row, in runs of 64 columns, 32 apart in steps of 8."""
    quarter, k = words.shape
    wide = words.int() & 0xFFFF
    nibbles = (wide.unsqueeze(-1) >> torch.tensor([0, 4, 8, 12], dtype=torch.int32)) & 15
    runs = nibbles.view(quarter, k // 64, 4, 64).transpose(1, 2).reshape(quarter * 4, k // 32, 4, 2, 4)
    return runs.permute(0, 1, 4, 2, 3).reshape(quarter * 4, k).to(torch.uint8)


def load_gemm(module: WeightReader, params: dict) -> Weight:
    """AWQ `version: gemm`, used by nearly all files."""
    n, k = module.shape
    words = module.get("qweight", ("I32",), (k, n // 8))
    groups = -(-k // params["group_size"])
    scales = module.scales("scales", (groups, n)).t().contiguous()
    zeros = None
    if params["zero_point"]:
        zeros = unpack_gemm(module.get("qzeros", ("I32",), (groups, n // 8))).t().contiguous()
    codes = Codes(4, lambda rows: unpack_gemm(words[:, rows.start // 8 : -(-rows.stop // 8)]).t(), multiple=8)
    return from_codes(module, codes, group_order(module, scales, zeros, params["group_size"]))


def load_gemv(module: WeightReader, params: dict) -> Weight:
    """AWQ `version: gemv`; the group size comes from the config, because scales and zeros are padded."""
    n, k = module.shape
    groups = -(-k // params["group_size"])
    words = module.get("qweight", ("I32",), (n, k // 8))
    scales = _columns(module, "scales", module.scales("scales"), (n, groups))
    zeros = None
    if params["zero_point"]:
        unpacked = unpack_stream(module.get("qzeros", ("I32",)), 4)
        zeros = _columns(module, "qzeros", unpacked, (n, groups))
    codes = Codes(4, lambda rows: unpack_stream(words[rows], 4))
    return from_codes(module, codes, group_order(module, scales, zeros, params["group_size"]))


def load_gemv_fast(module: WeightReader, params: dict) -> Weight:
    """AWQ `version: gemv_fast`: w = q * s + qzeros."""
    n, k = module.shape
    groups = -(-k // params["group_size"])
    if k % 64:
        raise BadModelFile(f"{module.prefix} has {k} inputs, but AWQ's fast GEMV layout needs a multiple of 64")
    words = module.get("qweight", ("I16",), (n // 4, k))
    scales = _columns(module, "scales", module.scales("scales").t(), (n, groups))
    mins = None
    if params["zero_point"]:
        mins = _columns(module, "qzeros", module.scales("qzeros").t(), (n, groups))
    codes = Codes(4, lambda rows: unpack_gemv_fast(words[rows.start // 4 : rows.stop // 4]), multiple=4)
    ordered = group_order(module, scales, mins, params["group_size"])
    return from_codes(module, codes, ordered._replace(zeros=None))._replace(mins=ordered.zeros)


def _columns(module: WeightReader, suffix: str, padded: Tensor, shape: tuple[int, int]) -> Tensor:
    """The first columns of a padded [N, >= K/g] tensor."""
    if padded.shape[0] != shape[0] or padded.shape[1] < shape[1]:
        raise module.bad(suffix, f"has shape {list(padded.shape)}, expected at least {list(shape)}")
    return padded[:, : shape[1]].contiguous()
