"""GGUF tensors: types that repack without loss become canonical forms, others stay as stored.

Q4_0 Q4_1      int4g, groups of 32, scales f16 (and mins f16)
Q8_0           int8, groups of 32, scales f16
MXFP4          fp4g32
NVFP4          fp4g16; an optional `<prefix>.scale` F32 [] or [1] multiplies
F32 F16 BF16   dense
IQ1* IQ2* IQ3* TQ*   dense bfloat16, decoded at load, with a warning
other          gguf: raw rows
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

from localllm.checkpoint.formats.gguf import CODEBOOK_TYPES
from localllm.errors import UnsupportedFormat
from localllm.kernels import Weight
from localllm.kernels.gguf_blocks import BLOCK_TYPES

from .dense import load_dense
from .packing import chunks
from .stored import FLOATS, WeightReader, stored_bytes

_log = logging.getLogger(__name__)


def load_gguf(module: WeightReader, _params: dict) -> Weight:
    """`<prefix>.weight` in its canonical form.

    Raises BadModelFile for scales that are not finite, UnsupportedFormat for a block type that cannot be decoded.
    """
    name = module.name("weight")
    block_type = module.ckpt.tensors[name].dtype
    if block_type in (*FLOATS, "F64"):
        return load_dense(module, {})
    if block_type not in BLOCK_TYPES and block_type not in CODEBOOK_TYPES:
        hint = f"supported: {', '.join([*BLOCK_TYPES, *sorted(CODEBOOK_TYPES)])}"
        raise UnsupportedFormat(f"tensor {name} has block type {block_type}, which is not supported", hint)
    rows = stored_bytes(module.ckpt, name).view(module.shape[0], -1)
    if block_type in CODEBOOK_TYPES:
        return _codebook(module, rows, block_type)
    layout = BLOCK_TYPES[block_type]
    blocks = rows.view(rows.shape[0], -1, layout.nbytes)
    for offset in layout.scale_offsets:
        module.finite("weight", _halves(blocks, offset))
    if block_type in _REPACK:
        return _REPACK[block_type](module, blocks)
    return Weight("gguf", module.shape, rows, group_size=layout.elems, block_type=block_type)


def _halves(blocks: Tensor, offset: int) -> Tensor:
    """f16 [N, blocks] at an even byte offset in each block; copying as halves is four times as fast as bytes."""
    return blocks.view(torch.float16)[:, :, offset // 2].contiguous()


def _interleaved(planar: Tensor) -> Tensor:
    """u8 [..., b] of planar nibbles (low = first half) -> u8 [..., b] where byte j holds elements 2j and 2j+1."""
    even, odd = planar[..., 0::2], planar[..., 1::2]
    return torch.cat([(even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)], -1)


def _nibbles(module: WeightReader, blocks: Tensor, offset: int, run: int = 16) -> Tensor:
    """u8 [N, K/2] interleaved, from `run` bytes of planar nibbles at a time, starting at `offset` in each block."""
    n, k = module.shape
    out = torch.empty(n, k // 2, dtype=torch.uint8)
    for rows in chunks(n, k):
        planar = blocks[rows, :, offset:]
        out[rows] = _interleaved(planar.unflatten(-1, (-1, run))).flatten(1)
    return out


def _q4_0(module: WeightReader, blocks: Tensor) -> Weight:
    return Weight("int4g", module.shape, _nibbles(module, blocks, 2), _halves(blocks, 0), group_size=32)


def _q4_1(module: WeightReader, blocks: Tensor) -> Weight:
    scales, mins = _halves(blocks, 0), _halves(blocks, 2)
    return Weight("int4g", module.shape, _nibbles(module, blocks, 4), scales, mins=mins, group_size=32)


def _q8_0(module: WeightReader, blocks: Tensor) -> Weight:
    codes = blocks[:, :, 2:].reshape(module.shape).view(torch.int8)
    return Weight("int8", module.shape, codes, _halves(blocks, 0), group_size=32)


def _mxfp4(module: WeightReader, blocks: Tensor) -> Weight:
    scales = blocks[:, :, 0].contiguous()
    if bool((scales == 0xFF).any()):
        raise module.bad("weight", "holds E8M0 scales that are NaN (0xFF)")
    return Weight("fp4g32", module.shape, _nibbles(module, blocks, 1), scales, group_size=32)


def _nvfp4(module: WeightReader, blocks: Tensor) -> Weight:
    n = module.shape[0]
    stored = blocks[:, :, :4].reshape(n, -1)
    if bool((stored == 0xFF).any()):
        raise module.bad("weight", "holds E4M3 scales that are NaN (0xFF)")
    scales = stored & 0x7F  # ggml ignores the sign and reads 0x7F as 0
    scales = scales.masked_fill(scales == 0x7F, 0).view(torch.float8_e4m3fn)
    alpha = module.scalar("scale") if module.has("scale") else 1.0
    qweight = _nibbles(module, blocks, 4, run=8)
    return Weight("fp4g16", module.shape, qweight, scales, global_scale=torch.full((n,), alpha), group_size=16)


_REPACK = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "MXFP4": _mxfp4, "NVFP4": _nvfp4}


@lru_cache
def _warn_once(block_type: str) -> None:
    _log.warning("GGUF block type %s is decoded to bfloat16 at load and takes at least 4 times the memory", block_type)


def _codebook(module: WeightReader, rows: Tensor, block_type: str) -> Weight:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize  # slow, but each weight is decoded only once

    _warn_once(block_type)
    out = torch.empty(module.shape, dtype=torch.bfloat16)
    for part in chunks(*module.shape):
        out[part] = torch.from_numpy(dequantize(rows[part].numpy(), GGMLQuantizationType[block_type]))
    module.finite("weight", out)
    return Weight("dense", module.shape, out)
