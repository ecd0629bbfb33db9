"""Structured mutants of small valid files are read or refused, never anything else, and always in time."""

from __future__ import annotations

import json
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models as tiny

from localllm.checkpoint.gguf_file import read_gguf
from localllm.checkpoint.mapped_file import MappedFile
from localllm.checkpoint.safetensors_file import read_safetensors
from localllm.errors import LocalLLMError
from localllm.models.architectures import open_model

LENGTHS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
MAX_S = 2.0
MAX_GROWTH_KIB = 256 << 10


def gguf_seeds() -> dict[str, bytes]:
    """Vocabulary only; a tiny model in F32 norms and Q8_0; one in Q4_K."""
    return {
        "vocabulary": tiny.tiny_gguf_bytes(vocab_only=True),
        "q8_0": tiny.tiny_gguf_bytes("Q8_0", layers=1),
        "q4_k": tiny.tiny_gguf_bytes("Q4_K", layers=1),
    }


def safetensors_seeds() -> dict[str, bytes]:
    """The tiny model whole; with metadata; and a few tensors of other dtypes."""
    whole = tiny.tiny_hf_tensors(layers=1)
    several = {"a": ("F8_E4M3", [4, 8], b"\0" * 32), "b": ("I32", [2], b"\0" * 8), "c": ("BF16", [3], b"\0" * 6)}
    return {
        "whole": tiny.safetensors_bytes(whole),
        "metadata": tiny.safetensors_bytes(whole, {"format": "pt", "note": '{"x": [1, 2]} \\ "é"'}),
        "several": tiny.safetensors_bytes(several),
    }


def mutant(seed: bytes, other: bytes, header: int, draw: random.Random) -> bytes:
    """One change: bits, a length field, a cut, or a splice with another file; mostly in the header."""
    data = bytearray(seed)
    reach = header if draw.random() < 0.9 else len(data)
    kind = draw.randrange(5)
    if kind == 0:
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(reach)] ^= 1 << draw.randrange(8)
    elif kind == 1:
        at = draw.randrange(max(1, reach - 8))
        width = draw.choice((4, 8))
        data[at : at + width] = struct.pack("<Q", draw.choice(LENGTHS))[:width]
    elif kind == 2:
        return bytes(data[: draw.randrange(reach) & (-64 if draw.random() < 0.5 else -1)])
    elif kind == 3:
        cut = draw.randrange(reach)
        return bytes(data[:cut]) + other[draw.randrange(len(other)) :][: 1 << 16]
    else:
        at, span = draw.randrange(reach), draw.choice((1, 2, 8, 64))
        data[at : at + span] = draw.choice((b"", bytes(data[at : at + span]) * 2, draw.randbytes(span)))
    return bytes(data)


def targeted(seed: bytes, header: int, draw: random.Random) -> bytes:
    """One of the first fields replaced by one of the lengths."""
    at = draw.randrange(0, min(header - 8, 400), 4)
    return seed[:at] + struct.pack("<Q", draw.choice(LENGTHS)) + seed[at + 8 :]


def run(seeds: dict[str, bytes], count: int, path: Path, read: Callable[[Path], object]) -> dict[str, int]:
    """Read `count` mutants of each seed; returns how many were accepted and refused."""
    tally = {"accepted": 0, "refused": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, (name, seed) in enumerate(seeds.items()):
        draw = random.Random(f"{name}{count}")
        header = 8 + int.from_bytes(seed[:8], "little") if seed[:4] != b"GGUF" else _gguf_header(seed, path)
        other = list(seeds.values())[(number + 1) % len(seeds)]
        for index in range(count):
            if index % 4 == 0:
                path.write_bytes(targeted(seed, header, draw))
            else:
                path.write_bytes(mutant(seed, other, header, draw))
            begin = time.perf_counter()
            try:
                read(path)
                tally["accepted"] += 1
            except LocalLLMError:
                tally["refused"] += 1
            assert time.perf_counter() - begin < MAX_S, f"{name}, mutant {index}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB
    return tally


def _gguf_header(seed: bytes, path: Path) -> int:
    path.write_bytes(seed)
    return min((info.offset for info in read_gguf(MappedFile(path))[0].values()), default=len(seed))


def read_model(path: Path) -> None:
    with open_model(path) as checkpoint:
        _ = checkpoint.facts


def fuzz_gguf(count: int, tmp_path: Path) -> dict[str, int]:
    return run(gguf_seeds(), count, tmp_path / "mutant.gguf", read_model)


def fuzz_safetensors(count: int, tmp_path: Path) -> dict[str, int]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.tiny_config(layers=1)))
    path = folder / "model.safetensors"

    def read(path: Path) -> None:
        read_safetensors(MappedFile(path))
        read_model(path.parent)

    return run(safetensors_seeds(), count, path, read)


def test_gguf_mutants(tmp_path: Path) -> None:
    tally = fuzz_gguf(50, tmp_path)
    assert sum(tally.values()) == 150 and tally["refused"] > 50


def test_safetensors_mutants(tmp_path: Path) -> None:
    tally = fuzz_safetensors(50, tmp_path)
    assert sum(tally.values()) == 150 and tally["refused"] > 50


@pytest.mark.slow
def test_twenty_thousand_gguf_mutants_of_each(tmp_path: Path) -> None:
    assert sum(fuzz_gguf(20_000, tmp_path).values()) == 60_000


@pytest.mark.slow
def test_twenty_thousand_safetensors_mutants_of_each(tmp_path: Path) -> None:
    assert sum(fuzz_safetensors(20_000, tmp_path).values()) == 60_000


@pytest.mark.slow
def test_every_truncation(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for seed in gguf_seeds().values():
        for length in range(0, min(len(seed), 200_000), 64):
            path.write_bytes(seed[:length])
            with pytest.raises(LocalLLMError):
                read_model(path)
