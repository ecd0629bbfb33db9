"""Which constants a product kernel runs with: candidates, ordered by what a model of the card expects of them.

The model: a program asks for some bytes at a time; so many programs are resident on a multiprocessor (registers,
threads, shared memory); bytes in flight over the latency of memory, or the card's bandwidth, is the rate; the last
wave of programs may be part empty. Nothing here was measured on a card: `tuning.STARTING_POINTS` is where that goes.
No torch, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from .cards import Card, ceil_power
from .layout_codes import CODES, HALVES

Tile = Mapping[str, int]

LATENCY_US = 1.2  # of a load from memory under traffic
REGISTERS = 65_536
LANES_PER_US = 128 * 1_700 * 0.8  # lanes of a multiprocessor that issue, at 1.7 GHz and four fifths of the peak


class Cost(NamedTuple):
    """Of one kind of code.

    gemv           instructions a weight in `gemv_kernel`, counted in the machine code for sm_90
    gemm           the same in `gemm_kernel`, which decodes most codes in pairs (`pairs.py`)
    row_registers  registers of a row in `gemv_kernel`, as compiled
    """

    gemv: float
    gemm: float
    row_registers: int


COSTS = {
    "bf16": Cost(2.2, 0.5, 9),
    "f16": Cost(3.2, 2.5, 9),
    "e4m3": Cost(4.0, 3.0, 12),
    "int8": Cost(2.6, 2.5, 13),
    "int4": Cost(3.0, 2.2, 16),
    "e2m1": Cost(4.6, 3.2, 15),
    "iq4": Cost(10.0, 15.0, 34),
    "int5": Cost(5.5, 10.0, 26),
    "int6": Cost(6.0, 9.0, 28),
    "int2": Cost(4.0, 6.0, 37),
    "int3": Cost(6.0, 9.0, 52),
}
# (instructions a weight, registers of a row) where `gemv_kernel` multiplies in whole numbers, besides 9 instructions
# for each element of x and 40 registers
FIXED_COSTS = {"int4": (1.5, 10), "e2m1": (2.5, 15)}
# most weights a thread of `gemm_kernel` decodes in a step: with more the compiler runs out of registers
STEP_ELEMENTS = 64
TENSOR_MEMORY = 64 * 512  # sums that fit into it on sm_100; Triton 3.6 keeps those of each plane apart, 3.9 does not
MOST = 8  # candidates handed to the tuner
MIN_TOKENS = 8  # rows of x in the smallest tile
SMALL_TOKENS = 16  # up to so many rows of x a product is a decoding step: fused segments run


@dataclass(frozen=True, slots=True)
class Load:
    """What a choice of constants makes of a product."""

    programs: int
    program_bytes: int  # each reads in all
    in_flight: int  # bytes each has asked for at a time
    threads: int
    registers: int  # a thread
    shared_bytes: int
    instructions: float  # each thread issues
    passes: int = 0  # rounds through memory after the first: partial sums


def resident_programs(load: Load, card: Card) -> int:
    """Programs that fit on a multiprocessor at a time; 0 when not even one does."""
    by_registers = REGISTERS // (load.threads * (-(-load.registers // 8) * 8))
    by_shared = card.known.shared_bytes // max(load.shared_bytes, 1)
    return min(card.known.threads // load.threads, by_registers, by_shared, 24)


def expected_us(load: Load, card: Card) -> float:
    """Microseconds the model expects; infinite for what does not fit."""
    fits = resident_programs(load, card)
    if fits < 1:
        return float("inf")
    resident = min(fits, -(-load.programs // card.num_sms))
    rate = min(card.known.bytes_per_us, resident * load.in_flight / LATENCY_US)
    waves = load.programs / (resident * card.num_sms)
    rounds = (waves + math.ceil(waves)) / 2  # programs that end early make room: half of a wave's empty part is lost
    memory = resident * load.program_bytes / rate
    warps = resident * load.threads / 128  # for each of the four schedulers; one or two cannot hide each other's waits
    issue = resident * load.instructions * load.threads / (LANES_PER_US * min(1.0, 0.4 + 0.15 * warps))
    return 2.0 + LATENCY_US * (1 + load.passes) + rounds * (max(memory, issue) + 0.2 * min(memory, issue))


def _ordered(options: Iterable[tuple[float, Tile]]) -> tuple[Tile, ...]:
    ranked = sorted(options, key=lambda option: option[0])
    return tuple(tile for us, tile in ranked[:MOST] if us != float("inf"))


@cache
def one_row_tiles(
    n: int, k: int, code: str, card: Card, gated: bool, either: bool, fixed: bool = False
) -> tuple[Tile, ...]:
    """Candidates for one row of x, the best expected first: of `gemv_tiles` six, and two of `gemm_tiles`.

    n, k     rows of W (gate and up together) and columns
    either   `gemm.gemm_kernel` can do it as well
    fixed    `gemv.gemv_kernel` can do it in whole numbers as well: half of its candidates do
    """
    most = MOST - 2 * either
    tiles = [*gemv_tiles(n, k, code, card, gated)[: most // 2 if fixed else most]]
    if fixed:
        tiles += gemv_tiles(n, k, code, card, gated, fixed=True)[: most - most // 2]
    options = [(_gemv_us(n, k, code, tile, card), tile) for tile in tiles]
    if either:
        found = gemm_tiles(n, k, code, MIN_TOKENS, card)[:2]
        options += [(expected_us(_gemm_load(n, k, code, tile), card), tile) for tile in found]
    return _ordered(options)


def may_be_fixed(code: str, run: int, card: Card) -> bool:
    """Whether `gemv.gemv_kernel` can multiply such codes, in runs of so many halves, in whole numbers there."""
    return code in FIXED_COSTS and run >= HALVES // 2 and card.capability >= 80


@cache
def gemv_tiles(n: int, k: int, code: str, card: Card, gated: bool = False, fixed: bool = False) -> tuple[Tile, ...]:
    """Candidates of `gemv.gemv_kernel`: {"rows", "chunks", "warps"}, the best expected first.

    n, k    rows of W (gate and up together) and columns
    fixed   those in whole numbers, which have "fixed": 1 as well; none for most codes
    """
    if fixed and code not in FIXED_COSTS:
        return ()
    chunks = -(-k // CODES[code].chunk)
    options = []
    for rows in (4, 8) if fixed else (2, 4, 8) if gated else (1, 2, 4, 8):
        for warps, wide in ((1, 32), (2, 64), (4, 128), (8, 256)):
            if wide > max(ceil_power(chunks), 32) or _gemv_registers(rows, code, fixed) > 200:
                continue
            tile = {"rows": rows, "chunks": wide, "warps": warps} | ({"fixed": 1} if fixed else {})
            options.append((_gemv_us(n, k, code, tile, card), tile))
    return _ordered(options)


def _gemv_registers(rows: int, code: str, fixed: bool) -> int:
    return 40 + rows * FIXED_COSTS[code][1] if fixed else 28 + rows * COSTS[code].row_registers


def _gemv_us(n: int, k: int, code: str, tile: Tile, card: Card) -> float:
    kind, rows, threads, fixed = CODES[code], tile["rows"], 32 * tile["warps"], "fixed" in tile
    chunks = -(-k // kind.chunk)
    of_row, of_x = (FIXED_COSTS[code][0], 9.0) if fixed else (COSTS[code].gemv, 2.5)
    load = Load(
        programs=-(-n // rows),
        program_bytes=rows * (chunks * 16 + k * kind.high // 8),
        in_flight=rows * min((1 if fixed else 2) * tile["chunks"], chunks) * 16,  # the next ones meanwhile, or not
        threads=threads,
        registers=_gemv_registers(rows, code, fixed),
        shared_bytes=0,
        instructions=rows * kind.chunk * chunks / threads * (of_row + of_x / rows) + 60 + 14 * rows,
    )
    return expected_us(load, card)


@cache
def gemm_tiles(n: int, k: int, code: str, tokens: int, card: Card, whole: bool = False) -> tuple[Tile, ...]:
    """Candidates of `gemm.gemm_kernel`: {"rows", "tokens", "halves", "split", "stages", "warps"}, the best first.

    tokens   rows of x, rounded up to 8, 16, 32, 64 or 128; a tile may take fewer
    whole    K is not split
    """
    kind = CODES[code]
    halves_in_row = -(-k // kind.chunk) * HALVES
    sums = TENSOR_MEMORY if card.capability == 100 else 1 << 30
    tokens = min(tokens, sums // (64 * kind.planes))
    shapes = ((16, 1), (32, 2), (64, 4)) if tokens <= SMALL_TOKENS else ((64, 4), (128, 4), (128, 8))
    options = []
    for rows, warps in shapes:
        if rows * tokens * kind.planes > sums:
            continue
        for halves in (16, 32, 64):
            if not STEP_ELEMENTS // 4 <= rows * halves * kind.planes // (32 * warps) <= STEP_ELEMENTS:
                continue
            for split in (1,) if whole else (1, 2, 4, 8):
                if halves * split > max(halves_in_row, 32) or (split > 1 and -(-n // rows) > 4 * card.num_sms):
                    continue
                stages = next(
                    (s for s in (4, 3, 2) if _shared(rows, tokens, halves, s, code) <= card.known.shared_bytes), 0
                )
                if stages == 0:
                    continue
                tile = {"rows": rows, "tokens": tokens, "halves": halves, "split": split, "stages": stages}
                tile["warps"] = warps
                options.append((expected_us(_gemm_load(n, k, code, tile), card), tile))
    return _ordered(options)


def _shared(rows: int, tokens: int, halves: int, stages: int, code: str) -> int:
    """Bytes of the steps under way, and of what scales pass through; the sums go out through the same memory."""
    kind = CODES[code]
    step = rows * halves * (2 + kind.high) + halves * kind.planes * tokens * 2
    return max(stages * step + rows * halves // 2, rows * tokens * 4)


def _gemm_load(n: int, k: int, code: str, tile: Tile) -> Load:
    kind = CODES[code]
    rows, tokens, halves, split = tile["rows"], tile["tokens"], tile["halves"], tile["split"]
    threads = 32 * tile["warps"]
    sums = rows * tokens // threads
    elements = rows * k / split / threads
    steps = k / (halves * kind.planes) / split
    return Load(
        programs=-(-n // rows) * split,
        program_bytes=rows * k * (kind.low + kind.high) // 8 // split + (8 * rows * tokens if split > 1 else 0),
        in_flight=(tile["stages"] - 1) * rows * halves * 2,
        threads=threads,
        registers=min(56 + 2 * sums + rows * halves * kind.planes // threads // 2, 255),
        shared_bytes=_shared(rows, tokens, halves, tile["stages"], code),
        # decoded once for the whole tile; every step waits, and moves x and the sums
        instructions=elements * COSTS[code].gemm + steps * (90 + 2 * sums) + 200,
        passes=2 if split > 1 else 0,
    )


def token_class(tokens: int) -> int:
    """Rows of x, rounded up to a tile: 8, 16, 32, 64 or 128."""
    return next((size for size in (8, 16, 32, 64) if tokens <= size), 128)
