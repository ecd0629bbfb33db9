"""Tile and split sizes of attention. Derived from byte counts, except prefill on sm_90, which was timed on an H100.

The shared memory of a decode tile (keys x head_dim x 2 tensors x bytes; two tiles in flight, a third if wgmma runs
asynchronously) limits how many programs fit on an SM. Together they must keep tens of KB of loads in flight (3.35 TB/s
x 0.8 us / 132 SMs = 20 KB on an H100, 8 KB on an RTX 5090).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton

from ..kv_pages import SCALED_FORMATS
from .cards import AMD

BUSY = 16  # decode attention programs per SM; not measured
WGMMA = (90, 100)  # capabilities whose matrix instructions read 64 rows directly from shared memory


class Tile(NamedTuple):
    """Tile sizes and launch options of a kernel."""

    keys: int
    num_warps: int
    num_stages: int
    rows: int = 0  # of queries; prefill only
    native: int = 0  # widen E4M3 codes with the conversion instruction of sm_89 and later; decode only


class Splits(NamedTuple):
    """Keys per split: `first` as long as `most` splits suffice, then a multiple of it."""

    first: int
    most: int

    def places(self, num_keys: int, window: int | None) -> int:
        """Maximum number of splits of a query over up to `num_keys` keys."""
        if window is None or window >= num_keys:
            return max(1, min(self.most, -(-num_keys // self.first)))
        return min(self.most, -(-window // self.first)) + 1


@cache
def splits_of(num_kv_heads: int, sms: int) -> Splits:
    """Splits for one long sequence: four programs per SM, one per SM at 4096 keys. Fixed for a device.

    At most 64 splits with four or more KV heads: with four heads and 32,768 keys an H200 takes 24.5 us, and 27.5 us
    with 128 splits.
    """
    most = 64 if num_kv_heads >= 4 else 128
    first = _floor_power(4096 * num_kv_heads // sms)
    return Splits(min(max(first, 128), 512), min(max(_floor_power(4 * sms // num_kv_heads), 8), most))


def side_by_side(places: int, queries: int, num_kv_heads: int, sms: int) -> int:
    """Programs per query and KV head: one per split, or fewer if the GPU could not run them all at once.

    `places` covers the longest context of the bucket, so with short sequences most of the programs would have no work.
    """
    return min(places, max(1, BUSY * sms // (queries * num_kv_heads)))


@cache
def decode_tiles(cap: int, kv_format: str, head_dim: int, group: int) -> tuple[Tile, ...]:
    """Candidates for sm_`cap` and `group` query heads per KV head, expected best first; keys divide every split."""
    tiles = _decode_tiles(cap, kv_format, head_dim, group)
    if kv_format != "fp8" or not 89 <= cap < AMD or head_dim > 256:  # with 512 the compiler spills
        return tiles
    return (*tiles, tiles[0]._replace(native=1))


def _decode_tiles(cap: int, kv_format: str, head_dim: int, group: int) -> tuple[Tile, ...]:
    width = triton.next_power_of_2(head_dim // 2 if kv_format in SCALED_FORMATS else head_dim)
    if kv_format == "f32":
        return (Tile(16, 4, 2),)
    if cap < 80:  # no matrix instructions: limited by registers
        return (Tile(32 if width > 64 else 64, 2 if width <= 32 else 4, 3),)
    if cap >= AMD:  # 64 KiB of shared memory
        return (Tile(32, 8 if width > 128 else 4, 2),)
    if head_dim > 256:
        keys = 16 if width > 256 else 32
        return (Tile(keys, 4, 3), Tile(keys, 4, 2))
    narrow, wide = Tile(32, 2, 3), Tile(64, 4, 3)
    if cap == 90 and width == 128 and kv_format in SCALED_FORMATS:
        # with 64 keys, Triton 3.6 spills: 8 to 40 bytes, with 16 columns even if a thread may have all 255 registers
        return (Tile(32, 4, 3), wide, Tile(64, 4, 2))
    if cap in WGMMA and width in (64, 128):
        return (wide, Tile(64, 4, 2), narrow, Tile(32, 2, 4))
    if width > 128:  # two warps do not have the registers for 256 x 16 sums
        return (narrow, Tile(32, 2, 2)) if columns_of(group) == 8 else (Tile(32, 4, 3), Tile(32, 4, 2))
    return (narrow, Tile(32, 2, 4), wide)


@cache
def prefill_tiles(cap: int, kv_format: str, head_dim: int) -> tuple[Tile, ...]:
    """Candidates for sm_`cap`: as many rows as fit in registers, as many keys as fit in two or three stages."""
    width = triton.next_power_of_2(head_dim)
    if cap < 80 or kv_format == "f32":  # no matrix instructions: small tiles, sums in registers
        return (Tile(16, 4, 2, rows=16),)
    if width > 256:
        return (Tile(16, 8, 2, rows=32),)  # 64 rows, as wgmma needs, do not fit in registers
    if cap in WGMMA:
        if width > 128:
            return (Tile(32, 8, 2, rows=64), Tile(32, 4, 2, rows=64))
        # H100, 2,048 tokens after 2,048 cached ones: E4M3 pages 541, 564 and 613 us; bfloat16 247, 272, 276 and 285 us
        if kv_format in SCALED_FORMATS:
            return (Tile(64, 4, 2, rows=64), Tile(64, 8, 2, rows=128), Tile(64, 8, 3, rows=128))
        return (Tile(128, 8, 2, rows=128), Tile(64, 8, 2, rows=128), Tile(64, 4, 2, rows=64), Tile(64, 8, 3, rows=128))
    if width > 128:
        return (Tile(32, 8, 2, rows=64),)
    first = Tile(64, 8, 3, rows=128) if width <= 64 else Tile(32, 8, 3, rows=128)
    return (first, Tile(32, 8, 2, rows=128), Tile(32, 4, 3, rows=64))


@cache
def decode_registers(
    cap: int, kv_format: str, head_dim: int, group: int, chunked: bool = False, native: int = 0
) -> int:
    """Register limit per thread; 0 leaves it to the compiler, which prefers a spill to losing a warp of occupancy."""
    if kv_format not in SCALED_FORMATS:
        if cap in (86, 89) and 128 < head_dim <= 256 and columns_of(group) > 8:
            return 248  # Triton 3.9 spills with its default of 168; shared memory has room for one program only
        return 168 if cap == 100 and head_dim <= 128 else 0  # with its default of 128, Triton 3.6 spills
    if cap < 80 or head_dim > 128:
        # Triton 3.6 spills with 192 for 512 on sm_80, and with its default of 168 for 256 on GPUs without wgmma, as 3.9
        # does on sm_86 and sm_89. Shared memory has room for at most four programs of two warps there, so registers do
        most = 224 if head_dim > 256 else 0 if cap in WGMMA else 248
        return most if 80 <= cap < AMD else 0
    if native:  # with 168, 128 and, in chunks, 152 registers a Triton spills 8 to 32 bytes
        return 192 if columns_of(group) > 8 else 176 if chunked else 152
    if columns_of(group) > 8:
        return 192 if cap in (80, 90) else 168  # with fewer, Triton 3.6 spills; for int8 it spills with 128
    if cap == 90 and chunked:
        return 168  # 16 bytes spill with 128 and 136; with 168 as many programs fit as with 136
    return 136 if cap in (90, 100) and kv_format == "int8" else 128


@cache
def columns_of(group: int, cap: int = 0) -> int:
    """Columns of a decode tile on sm_`cap`: query heads per KV head, padded to the matrix instruction's minimum."""
    return max(16 if cap >= AMD else 8, triton.next_power_of_2(group))


def _floor_power(x: int) -> int:
    return 1 << max(x.bit_length() - 1, 0)
