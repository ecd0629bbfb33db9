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
from types import MappingProxyType

from .cards import Card
from .layout_codes import CODES, HALVES

Tile = Mapping[str, int]

LATENCY_US = 1.2  # of a load from memory under traffic
REGISTERS = 65_536
LANES_PER_US = 128 * 1_700 * 0.8  # lanes of a multiprocessor that issue, at 1.7 GHz and four fifths of the peak
# instructions a weight, counted in the machine code for sm_90
DECODE = MappingProxyType(
    {
        "bf16": 2.2, "f16": 3.2, "e4m3": 4.0, "int8": 2.6, "int4": 3.0, "e2m1": 4.6, "iq4": 10.0,
        "int5": 5.5, "int6": 6.0, "int2": 4.0, "int3": 6.0,
    }
)  # fmt: skip
# the same where `vector_kernel` multiplies in whole numbers, besides 9 for each element of x
FIXED_DECODE = MappingProxyType({"int4": 1.5, "e2m1": 2.5})
# the same of `tile_kernel`, which decodes most codes in pairs (`pairs.py`)
TILE_DECODE = MappingProxyType(
    {
        "bf16": 0.5, "f16": 2.5, "e4m3": 3.0, "int8": 2.5, "int4": 2.2, "e2m1": 3.2, "iq4": 15.0,
        "int5": 10.0, "int6": 9.0, "int2": 6.0, "int3": 9.0,
    }
)  # fmt: skip
# of `vector_kernel`, as compiled
REGISTERS_A_ROW = MappingProxyType(
    {
        "bf16": 9, "f16": 9, "e4m3": 12, "int8": 13, "int4": 16, "e2m1": 15, "iq4": 34,
        "int5": 26, "int6": 28, "int2": 37, "int3": 52,
    }
)  # fmt: skip
FIXED_REGISTERS_A_ROW = MappingProxyType({"int4": 10, "e2m1": 15})  # of the same in whole numbers, besides 40
# most weights a thread of `tile_kernel` decodes in a step: with more the compiler runs out of registers
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


def _power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


@cache
def one_row_tiles(
    n: int, k: int, code: str, card: Card, gated: bool, either: bool, fixed: bool = False
) -> tuple[Tile, ...]:
    """Candidates for one row of x, the best expected first: of `vector_tiles` six, and two of `tile_tiles`.

    n, k     rows of W (gate and up together) and columns
    either   `gemm.tile_kernel` can do it as well
    fixed    `gemv.vector_kernel` can do it in whole numbers as well: half of its candidates do
    """
    most = MOST - 2 * either
    tiles = [*vector_tiles(n, k, code, card, gated)[: most // 2 if fixed else most]]
    if fixed:
        tiles += vector_tiles(n, k, code, card, gated, fixed=True)[: most - most // 2]
    options = [(_vector_us(n, k, code, tile, card), tile) for tile in tiles]
    if either:
        found = tile_tiles(n, k, code, MIN_TOKENS, card)[:2]
        options += [(expected_us(_tile_load(n, k, code, tile), card), tile) for tile in found]
    return _ordered(options)


def may_be_fixed(code: str, run: int, card: Card) -> bool:
    """Whether `gemv.vector_kernel` can multiply such codes, in runs of so many halves, in whole numbers there."""
    return code in FIXED_DECODE and run >= HALVES // 2 and card.capability >= 80


@cache
def vector_tiles(n: int, k: int, code: str, card: Card, gated: bool = False, fixed: bool = False) -> tuple[Tile, ...]:
    """Candidates of `gemv.vector_kernel`: {"rows", "chunks", "warps"}, the best expected first.

    n, k    rows of W (gate and up together) and columns
    fixed   those in whole numbers, which have "fixed": 1 as well; none for most codes
    """
    if fixed and code not in FIXED_DECODE:
        return ()
    chunks = -(-k // CODES[code].chunk)
    options = []
    for rows in (4, 8) if fixed else (2, 4, 8) if gated else (1, 2, 4, 8):
        for warps, wide in ((1, 32), (2, 64), (4, 128), (8, 256)):
            if wide > max(_power(chunks), 32) or _vector_registers(rows, code, fixed) > 200:
                continue
            tile = {"rows": rows, "chunks": wide, "warps": warps} | ({"fixed": 1} if fixed else {})
            options.append((_vector_us(n, k, code, tile, card), tile))
    return _ordered(options)


def _vector_registers(rows: int, code: str, fixed: bool) -> int:
    return 40 + rows * FIXED_REGISTERS_A_ROW[code] if fixed else 28 + rows * REGISTERS_A_ROW[code]


def _vector_us(n: int, k: int, code: str, tile: Tile, card: Card) -> float:
    kind, rows, threads, fixed = CODES[code], tile["rows"], 32 * tile["warps"], "fixed" in tile
    chunks = -(-k // kind.chunk)
    of_row, of_x = (FIXED_DECODE[code], 9.0) if fixed else (DECODE[code], 2.5)
    load = Load(
        programs=-(-n // rows),
        program_bytes=rows * (chunks * 16 + k * kind.high // 8),
        in_flight=rows * min((1 if fixed else 2) * tile["chunks"], chunks) * 16,  # the next ones meanwhile, or not
        threads=threads,
        registers=_vector_registers(rows, code, fixed),
        shared_bytes=0,
        instructions=rows * kind.chunk * chunks / threads * (of_row + of_x / rows) + 60 + 14 * rows,
    )
    return expected_us(load, card)


@cache
def tile_tiles(n: int, k: int, code: str, tokens: int, card: Card, whole: bool = False) -> tuple[Tile, ...]:
    """Candidates of `gemm.tile_kernel`: {"rows", "tokens", "halves", "split", "stages", "warps"}, the best first.

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
                options.append((expected_us(_tile_load(n, k, code, tile), card), tile))
    return _ordered(options)


def _shared(rows: int, tokens: int, halves: int, stages: int, code: str) -> int:
    """Bytes of the steps under way, and of what scales pass through; the sums go out through the same memory."""
    kind = CODES[code]
    step = rows * halves * (2 + kind.high) + halves * kind.planes * tokens * 2
    return max(stages * step + rows * halves // 2, rows * tokens * 4)


def _tile_load(n: int, k: int, code: str, tile: Tile) -> Load:
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
        instructions=elements * TILE_DECODE[code] + steps * (90 + 2 * sums) + 200,
        passes=2 if split > 1 else 0,
    )


def token_class(tokens: int) -> int:
    """Rows of x, rounded up to a tile: 8, 16, 32, 64 or 128."""
    return next((size for size in (8, 16, 32, 64) if tokens <= size), 128)
