"""What is kept on the disk for the next start, by what it depends on: pages of keys and values, repacked weights."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from localllm._version import __version__
from localllm.checkpoint.packed_file import packed_dir
from localllm.engine.page_files import PageFiles, store_dir
from localllm.kernels.cpu.build import library
from localllm.models.architectures import ModelFacts, OpenModel
from localllm.models.kv_cache import KVCache
from localllm.models.packed import LEAST_BYTES, Packed
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


def page_files(
    files: Iterable[Path], facts: ModelFacts, plan: Plan, cache: KVCache, weight_format: str, limit: int
) -> PageFiles:
    """Where pages of keys and values are kept that such a cache can take."""
    sizes = [*(cache.page_bytes(group) for group in range(len(cache.groups))), cache.slot_bytes()]
    return PageFiles(store_dir(), identity(model_digest(files), facts, plan, sizes, weight_format), limit)


def packed_weights(checkpoint: OpenModel, plan: Plan, limit: int) -> Packed | None:
    """Where the weights of a model lie as the CPU reads them; None where no file is worth it, or none is wanted."""
    if plan.device != "cpu" or plan.ranks or not limit or checkpoint.nbytes < LEAST_BYTES or library().lib is None:
        return None
    name = blake2b(model_digest(checkpoint.files) + plan.quant.encode(), digest_size=16).hexdigest()
    return Packed(packed_dir() / f"{name}.packed", tuple(checkpoint.files), checkpoint.nbytes, limit)
