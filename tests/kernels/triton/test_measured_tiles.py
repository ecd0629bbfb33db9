"""The first candidates of the product kernels against what an H100 measured of every candidate."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from localllm.kernels.triton.cards import Card
from localllm.kernels.triton.product_tiles import SMALL_TOKENS, TOKEN_CLASSES, Tile, gemm_tiles, gemv_tiles

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu-h100-kernels.json"
H100 = Card(90, 132)
CODES = {"bf16": ("bf16", 0), "int4": ("int4", 128), "nvfp4": ("e2m1", 16)}  # code, group
# the products of an 8B model: rows (gate and up together), columns, gated, normed
SHAPES = {
    "qkv": (6144, 4096, False, True),
    "o": (4096, 4096, False, False),
    "gate_up": (24576, 4096, True, True),
    "down": (4096, 12288, False, False),
}


def measured() -> dict[tuple[str, int, str], dict[str, float]]:
    """(format, rows of x, product) -> tile -> microseconds."""
    found: dict[tuple[str, int, str], dict[str, float]] = {}
    for row in json.loads(RESULTS.read_text())["rows"]:
        if named := re.fullmatch(r"products:(\w+):(\d+) (\w+) (\{.*\})", f"{row['job']} {row['name']}"):
            name, tokens, product, tile = named.groups()
            found.setdefault((name, int(tokens), product), {})[_key(json.loads(tile))] = row["us"]
    return found


def _key(tile: Tile) -> str:
    return json.dumps(dict(tile), sort_keys=True)


TIMES = measured()


@pytest.mark.parametrize(("name", "tokens", "product"), TIMES, ids=lambda value: str(value))
def test_the_first_candidate_is_about_as_fast_as_any(name: str, tokens: int, product: str) -> None:
    """A new card runs it until it is tuned. What INT4 gains by reading x as it is, is a launch (`SMALL_WEIGHT`)."""
    (code, group), (n, k, gated, normed) = CODES[name], SHAPES[product]
    if tokens == 1:
        candidates = gemv_tiles(n, k, code, H100, gated, code != "bf16", not normed)
    else:
        rows = next(size for size in TOKEN_CLASSES if tokens <= size)
        candidates = gemm_tiles(n, k, code, rows, H100, group=group)
    times = TIMES[name, tokens, product]
    known = [times[_key(tile)] for tile in candidates if _key(tile) in times]
    assert _key(candidates[0]) in times and len(known) >= 2
    assert times[_key(candidates[0])] <= 1.14 * min(known), (times, candidates[0])
    assert tokens > SMALL_TOKENS or times[_key(candidates[0])] <= 1.14 * min(times.values())
