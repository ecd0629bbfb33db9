"""FP8 E4M3 with `weight_scale_inv` or `weight_scale` (weights are multiplied by either), and MXFP8. kinds: fp8, mxfp8

params: scale: suffix; rows: those of a block, if it is a half one (`shards`)
"""

from __future__ import annotations

from ..shards import BLOCK, HALF_BLOCK
from .module import DENSE, POWERS_OF_TWO, StoredFormat, StoredModule


def detect(module: StoredModule) -> StoredFormat | None:
    """`weight` in F8_E4M3; the scale's shape and dtype determine the scheme."""
    if module.dtype("weight") != "F8_E4M3":
        return None
    n, k = module.matrix("weight")
    suffix = module.suffix("weight_scale_inv", "weight_scale") or "weight_scale"
    scale = module.need(suffix, "an FP8 weight")
    if scale.shape == (n, k // 32) and scale.dtype in POWERS_OF_TWO and k % 32 == 0:
        return StoredFormat("mxfp8", "mxfp8", (n, k), {"scale": suffix})
    if scale.pieces and scale.shape == (n // HALF_BLOCK, -(-k // BLOCK)):
        return StoredFormat("fp8", "fp8", (n, k), {"scale": suffix, "rows": HALF_BLOCK})
    _check_blocks(module, suffix, n, k)
    known = (*DENSE, "F8_E4M3", "F8_E8M0", "U8")
    if scale.dtype not in known:
        raise module.unsupported(f"has FP8 scales of {scale.dtype}; supported: {', '.join(known)}")
    return StoredFormat("fp8", "fp8", (n, k), {"scale": suffix})


def _check_blocks(module: StoredModule, suffix: str, n: int, k: int) -> None:
    """Reject scales that are not per tensor, per row, or per block of 128 x 128."""
    shape = module.tensors[suffix].shape
    if shape in ((), (1,), (1, 1), (n,), (n, 1)):
        return
    size = module.setting("weight_block_size")
    rows, columns = size if isinstance(size, list) and len(size) == 2 else (128, 128)
    if type(rows) is not int or type(columns) is not int or rows < 1 or columns < 1:
        raise module.bad(f"{module.name}.{suffix}", f"weight_block_size is {size}, expected two positive numbers")
    blocks = (-(-n // rows), -(-k // columns))
    module.expect(suffix, blocks, (blocks[0], 1, blocks[1], 1))
    if (rows, columns) != (128, 128):
        raise module.unsupported(f"is FP8 in blocks of {rows} x {columns}; only 128 x 128 is supported")
