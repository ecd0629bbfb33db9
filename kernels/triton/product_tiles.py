"""Tile candidates of the product kernels, expected best first.

The order was measured on an H100 for bfloat16, INT4 with groups of 128 and NVFP4 with the shapes of an 8B model. For
other forms it is derived from those, or from instruction, byte and register counts. `localllm tune` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import triton

from .cards import AMD, Card
from .layout import CODES, HALVES

Tile = Mapping[str, int]

# (rows, warps) of `gemv_kernel`, by arithmetic; more rows save reads of x, fewer rows save registers
FIXED = ((8, 4), (4, 4), (8, 2), (4, 1), (4, 2), (8, 1))
WIDE = ((4, 8), (8, 8), (2, 4), (4, 4), (2, 8), (8, 4), (4, 2), (2, 2), (4, 1))
NARROW = ((4, 2), (4, 1), (2, 2), (2, 1), (4, 4), (2, 4), (1, 1), (1, 2))
FEW_ROWS = ("iq4", "int2", "int3")  # a row takes 34 to 52 registers in `gemv_kernel`: two at most
# capabilities whose memory delivers 4-bit weights faster than float32 arithmetic can use them; on others the extra
# launch that converts x costs more than integer arithmetic saves
FAST_MEMORY = (90, 100, 103)
# most INT4 weights that are multiplied in float32 there as well if x has no norm. On an H100 an 8B model's output takes
# 6.1 us (17 million), against 5.7 and 1.2 for the conversion and a launch; down (50 million) 14.1, against 12.7 and 1.2
SMALL_WEIGHT = 1 << 25
# (rows, warps) of `gemm_kernel`: up to 8 rows of x, up to 16, more, and more with codes that are exact operands. With
# 16 rows of x and an 8B model's gate and up in INT4, an H100 takes 31 us with 64 rows, 88 with 32 and 164 with 16
FEW = ((32, 2), (64, 4), (16, 1))
SMALL = ((64, 4), (32, 2), (16, 1))
LARGE = ((64, 4), (128, 8), (128, 4))
# instead of LARGE where tiles of 128 rows fill the GPU: an 8B model's gate and up in NVFP4, with 64 rows of x, take an
# H100 106 us instead of 161
LARGE_WIDE = ((128, 4), (128, 8), (64, 4))
LARGE_EXACT = ((128, 8), (64, 4), (128, 4))
# for up to SMALL_TOKENS rows, with exact operands and few groups per step: scales multiply the sums of each group
GROUPED_TILES = ((32, 1), (64, 2), (16, 1))
GROUPED = ("int4", "int8")
# most weights per thread and step of `gemm_kernel`: with more the compiler runs out of registers
STEP_ELEMENTS = 64
TENSOR_MEMORY = 64 * 512  # sums that fit in tensor memory on sm_100; Triton 3.6 keeps one set per plane, 3.9 does not
MOST = 8  # candidates passed to the tuner
WARPS = 6  # warps per SM needed to hide memory latency: with fewer, K is split
TOKEN_CLASSES = (8, 16, 32, 64, 128)  # rows of x, rounded up: each class has its own candidates and kernels
SMALL_TOKENS = 16  # up to this many rows of x fused segments are used (decode)


def is_fixed(code: str, run: int, card: Card) -> bool:
    """Whether `gemv_kernel` can multiply these codes, with runs of `run` halves, in integers on this GPU."""
    return code in ("int4", "e2m1") and run >= HALVES // 2 and 80 <= card.capability < AMD


@cache
def gemv_tiles(
    n: int, k: int, code: str, card: Card, gated: bool = False, fixed: bool = False, plain: bool = False
) -> tuple[Tile, ...]:
    """Candidates of `gemv.gemv_kernel`: {"rows", "chunks", "warps"}, expected best first; {"apart": 1}: the norm apart.

    n, k    rows of W (gate and up together) and columns
    fixed   result of `is_fixed`: adds integer candidates, {"fixed": 1}; first on FAST_MEMORY, last elsewhere
    plain   x has no norm and is not in fixed point yet: then small INT4 weights do not repay its conversion, and a norm
            need not be tried as a launch of its own
    """
    widest = max(triton.next_power_of_2(-(-k // CODES[code].chunk)), 32)
    most = 2 if code in FEW_ROWS else 8

    def fit(ranked: tuple[tuple[int, int], ...], more: dict[str, int]) -> list[Tile]:
        found = [(rows, warps) for rows, warps in ranked if 32 * warps <= widest and 1 + gated <= rows <= most]
        # tiles that leave SMs idle go last, and on fast memory those with few programs per SM before them: the second
        # product of an 8B's MLP in NVFP4 takes an H100 16.9 us with 4 rows and 19.5 with 8
        enough = (2, 4) if card.capability in FAST_MEMORY else (2,)
        found.sort(key=lambda tile: sum(n // tile[0] < count * card.num_sms for count in enough))
        return [{"rows": rows, "chunks": 32 * warps, "warps": warps} | more for rows, warps in found]

    floats = fit(WIDE if CODES[code].low >= 8 else NARROW, {})
    if CODES[code].low == 8 and card.capability in FAST_MEMORY and not plain:
        # a launch of its own for the norm, not measured: FP8 needs 9.4 instructions per weight with it, 7.1 without
        floats.insert(1, {**floats[0], "apart": 1})
    if not fixed:
        return tuple(floats[:MOST])
    whole = fit(FIXED, {"fixed": 1})
    converts = card.capability in FAST_MEMORY and not (plain and code == "int4" and n * k <= SMALL_WEIGHT)
    first, last = (whole, floats) if converts else (floats, whole)
    return (*first[: MOST - 2], *last[:2])


def few_rows(code: str, fixed: bool) -> int:
    """Maximum rows of x that `gemv_kernel` multiplies together.

    Step times of an 8B model on an H200 in ms. INT4: 2.29 for one row; 2.94, 3.58 and 4.13 for two to four, against
    4.22, 4.69 and 4.91 with `gemm_kernel`. NVFP4: 2.63; 3.33, 4.01 and 4.94 against 4.90, 5.06 and 5.36. bfloat16:
    4.45; 4.81 against 5.77 for two rows, but 6.82 against 5.36 for three.
    """
    return 4 if fixed else 2 if CODES[code].low == 16 else 1


@cache
def few_tiles(n: int, k: int, code: str, card: Card, gated: bool, fixed: bool, group: int) -> tuple[Tile, ...]:
    """Candidates of both kernels for up to `few_rows` rows; `gemv_kernel` first on FAST_MEMORY."""
    tiles = gemv_tiles(n, k, code, card, gated, fixed)
    single = [tile for tile in tiles if ("fixed" in tile) == fixed and "apart" not in tile][: MOST // 2]
    several = list(gemm_tiles(n, k, code, TOKEN_CLASSES[0], card, group=group))[: MOST // 2]
    return (*single, *several) if card.capability in FAST_MEMORY else (*several, *single)


@cache
def gemm_tiles(
    n: int, k: int, code: str, tokens: int, card: Card, whole: bool = False, group: int = 0
) -> tuple[Tile, ...]:
    """Candidates of `gemm.gemm_kernel`: {"rows", "tokens", "halves", "split", "stages", "warps"}, expected best first.

    tokens   rows of x, one of TOKEN_CLASSES; a tile may have fewer
    whole    do not split K
    group    elements per scale; 0: no group scales
    """
    kind = CODES[code]
    halves_in_row = -(-k // kind.chunk) * HALVES
    sums = TENSOR_MEMORY if card.family == 100 else 1 << 30
    tokens = min(tokens, sums // (64 * kind.planes))
    most = 1 if whole else k * (kind.low + kind.high) // (128 * tokens)  # partial sums take at most half the bytes of W
    found: list[Tile] = []
    few = tokens <= SMALL_TOKENS
    grouped = few and code in GROUPED and 0 < group <= 2 * HALVES * kind.planes
    small = FEW if tokens <= TOKEN_CLASSES[0] else SMALL
    large = LARGE_EXACT if code in GROUPED else LARGE if n < 128 * card.num_sms else LARGE_WIDE
    for rows, warps in GROUPED_TILES if grouped else small if few else large:
        widest = 2 * HALVES if grouped else 64 if halves_in_row >= 64 else 32
        halves = min(widest, STEP_ELEMENTS * 32 * warps // (rows * kind.planes))
        columns = tokens * max(1, halves * kind.planes // group) if grouped else tokens
        if halves < 2 * HALVES or rows * columns * kind.planes > sums:
            continue
        # AMD: with four stages Triton 3.6 fails for some forms, and three need more shared memory than counted here
        most_stages = 2 if card.capability >= AMD else 4
        sizes = (s for s in range(most_stages, 1, -1) if _shared(rows, columns, halves, s, code) <= card.shared_bytes)
        if (stages := next(sizes, 0)) == 0:
            continue
        enough = WARPS * card.num_sms // warps
        fills = next((s for s in (1, 2, 4) if -(-n // rows) * s >= enough or 2 * s > most), 8)
        for split in dict.fromkeys((fills, 1)):
            if split == 1 or halves * split <= halves_in_row:
                tile = {"rows": rows, "tokens": tokens, "halves": halves, "split": split}
                found.append(tile | {"stages": stages, "warps": warps})
    return tuple(found)


def _shared(rows: int, columns: int, halves: int, stages: int, code: str) -> int:
    """Shared memory in bytes: stages in flight plus scale conversion; the epilogue reuses it for the sums."""
    kind = CODES[code]
    step = rows * halves * (2 + kind.high) + halves * kind.planes * columns * 2
    return max(stages * step + rows * halves // 2, rows * columns * 4)
