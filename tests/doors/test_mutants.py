"""Mutants that the reader accepts are loaded and generate a token, or are refused: no crash, no hang."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import test_fuzz as fuzz
from tiny_models import tiny_gguf_bytes

from localllm.errors import LocalLLMError

CHILD = Path(__file__).with_name("run_mutants.py")
SEEDS = {quant: tiny_gguf_bytes(quant, layers=1) for quant in ("Q8_0", "Q4_K", "F32", "Q4_1")}


def accepted(count: int, folder: Path) -> list[Path]:
    """`count` mutants of each seed whose facts can be read; a third of them differ in the weights."""
    paths = []
    for number, (name, seed) in enumerate(SEEDS.items()):
        draw = random.Random(f"{name}{count}")
        path = folder / f"{name}-0.gguf"
        path.write_bytes(seed)
        header = min((info.offset for info in fuzz.read_gguf(fuzz.MappedFile(path))[0].values()), default=len(seed))
        other = list(SEEDS.values())[number - 1]
        for index in range(count):
            path = folder / f"{name}-{index}.gguf"
            while True:
                path.write_bytes(fuzz.mutant(seed, other, header if draw.random() < 0.67 else len(seed), draw))
                try:
                    fuzz.read_model(path)
                except LocalLLMError:
                    continue
                break
            paths.append(path)
    return paths


def run(paths: list[Path]) -> list[dict]:
    """Every file's outcome, from one child process."""
    done = subprocess.run(
        [sys.executable, "-P", str(CHILD)],
        input="".join(f"{path}\n" for path in paths),
        capture_output=True,
        text=True,
        timeout=60 + 10 * len(paths),
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (paths[len(results)].name, done.returncode, done.stderr[-2000:])
    return results


def check(count: int, folder: Path) -> None:
    paths = accepted(count, folder)
    results = run(paths)
    assert len(results) == len(paths)
    for path, result in zip(paths, results, strict=True):
        outcome = result["outcome"]
        named = path.name in outcome or "the model's output is not a number" in outcome
        assert outcome == "ok" or (", exit 12: " in outcome and named), (path.name, result)
        assert result["seconds"] < 10
    assert sum(result["outcome"] == "ok" for result in results) > len(results) // 3


@pytest.mark.slow
def test_accepted_mutants_generate(tmp_path: Path) -> None:
    check(8, tmp_path)


@pytest.mark.slow
def test_five_hundred_accepted_mutants_generate(tmp_path: Path) -> None:
    check(125, tmp_path)
