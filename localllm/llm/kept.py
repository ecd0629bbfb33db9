"""What kept pages of keys and values depend on, beside their tokens: the model's files, its formats, this version."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from localllm._version import __version__
from localllm.models.architectures import ModelFacts
from localllm.plan.plan import Plan

SAMPLES, SAMPLE_BYTES = 64, 4096


def model_digest(files: Iterable[Path]) -> bytes:
    """Of a model's files: their sizes, when they were written, and samples of their bytes.

    Reading all of them would take as long as loading the model; a file that is written again has another time.
    """
    digest = blake2b(digest_size=16)
    for path in sorted(files):
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            digest.update(f"{facts.st_size} {facts.st_mtime_ns} ".encode())
            for number in range(SAMPLES):
                file.seek(number * facts.st_size // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def identity(model: bytes, facts: ModelFacts, plan: Plan, page_bytes: Iterable[int], weight_format: str) -> bytes:
    """16 bytes that differ where the same tokens could have other keys and values."""
    by_context = any(rope.scaling == "longrope" for rope in facts.ropes)  # short and long contexts turn differently
    parts = (
        __version__, model.hex(), repr(facts), weight_format, plan.device.partition(":")[0],
        plan.dtype, plan.activations, plan.deterministic, plan.kv, plan.page_size, tuple(page_bytes),
        plan.ctx if by_context else 0,
    )  # fmt: skip
    return blake2b(repr(parts).encode(), digest_size=16).digest()
