"""Data kept on disk for the next start, keyed by everything it depends on: KV pages and repacked weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localllm._version import __version__
from localllm.checkpoint.packed_file import PackedFile, packed_dir, read_ahead
from localllm.device.disk import disk_facts
from localllm.request import LoadProgress, OnProgress

if TYPE_CHECKING:  # read-ahead starts before torch is imported
    from localllm.engine.page_files import PageFiles
    from localllm.models.architectures import ModelFacts, OpenModel
    from localllm.models.kv_cache import KVCache
    from localllm.models.packed import Packed
    from localllm.plan.plan import Plan

SAMPLES, SAMPLE_BYTES = 64, 4096
LEAST_BYTES = 256 << 20  # repacking a smaller model is too fast to be worth a file
AUTO_SHARE = 0.1  # of the disk space that would be free without these files
NOT_BY_ITSELF = ("memory", "network")  # kinds of disk on which a file costs more than it saves
TOLD_AFTER_S = 0.5  # closing reports that it waits for the file after this time


def model_digest(files: Iterable[Path]) -> bytes:
    """Digest of a model's files: sizes, modification times, and samples of their bytes.

    Hashing everything would take as long as loading the model; a rewritten file has a different modification time.
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
    """16 bytes that differ whenever the same tokens could have different keys and values."""
    by_context = any(rope.scaling == "longrope" for rope in facts.ropes)  # its angles depend on the context length
    parts = (
        __version__, model.hex(), repr(facts), weight_format, plan.device.partition(":")[0],
        plan.dtype, plan.activations, plan.deterministic, plan.kv, plan.page_size, tuple(page_bytes),
        plan.ctx if by_context else 0,
    )  # fmt: skip
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def page_files(
    files: Iterable[Path], facts: ModelFacts, plan: Plan, cache: KVCache, weight_format: str, limit: int
) -> PageFiles:
    """The store on disk for KV pages that this cache can load."""
    from localllm.engine.page_files import PageFiles, store_dir

    sizes = [*(cache.page_bytes(group) for group in range(len(cache.groups))), cache.slot_bytes()]
    return PageFiles(store_dir(), identity(model_digest(files), facts, plan, sizes, weight_format), limit)


def automatic_limit() -> int:
    """Default limit for repacked weights on disk, in bytes.

    0 if the folder is in memory, on a network disk, or in a container's own layer, which is deleted with the container.
    """
    disk = disk_facts(packed_dir())
    if disk.kind in NOT_BY_ITSELF or disk.filesystem == "overlay":
        return 0
    try:
        kept = sum(path.stat().st_size for path in packed_dir().glob("*.packed"))
    except OSError:  # another process may have just removed a file
        return 0
    return int(AUTO_SHARE * (disk.free_bytes + kept))


class KeptWeights:
    """A model's repacked weights on disk: read while torch is imported, written after the first answer."""

    def __init__(self, checkpoint: OpenModel, plan: Plan, limit: int | Literal["auto"]) -> None:
        """Models that are small, split across ranks, or on a GPU are not kept.

        limit   total bytes of all files; "auto" uses `automatic_limit` and only logs why a file cannot be kept
        """
        self._checkpoint, self._is_asked = checkpoint, limit != "auto"
        self._limit = automatic_limit() if limit == "auto" else limit
        self._path: Path | None = None
        self._ahead: PackedFile | None = None
        self._packed: Packed | None = None
        if plan.device == "cpu" and not plan.ranks and self._limit and checkpoint.nbytes >= LEAST_BYTES:
            is_too_large = plan.weight_bytes > self._limit and not self._is_asked
            if is_too_large and not any(packed_dir().glob("*.packed")):
                return  # no need to compute the digest
            name = blake2b(model_digest(checkpoint.files) + plan.quant.encode(), digest_size=16).hexdigest()
            self._path = packed_dir() / f"{name}.packed"
            self._ahead = read_ahead(self._path)

    def open(self) -> Packed | None:
        """Open the file for the loader; None if nothing is kept or the CPU kernels cannot be built."""
        from localllm.kernels.cpu.build import library
        from localllm.models.packed import Packed

        if self._path is not None and library().lib is not None:
            parts = self._path, tuple(self._checkpoint.files), self._limit, self._ahead, self._is_asked
            self._packed, self._ahead = Packed(*parts), None
        return self._packed

    @property
    def note(self) -> str:
        """The problem to report, or ""."""
        return "" if self._packed is None else self._packed.note

    def settle(self, must_stop: Callable[[], bool]) -> bool:
        """Idle job that runs `Packed.settle`, before the plan is profiled."""
        return self._packed is None or self._packed.settle(must_stop)

    def write(self, must_stop: Callable[[], bool]) -> bool:
        """Idle job (`Engine.when_idle`) that writes the file."""
        return self._packed is None or self._packed.write(must_stop)

    def close(self, is_wanted: Callable[[], bool], on_progress: OnProgress) -> None:
        """Close the file. If idle time did not suffice to write it (as after a single answer), write it if wanted."""
        ahead, self._ahead = self._ahead, None
        packed, self._packed = self._packed, None
        if ahead is not None:
            ahead.close()
        if packed is None:
            return
        try:
            told_at, before = time.monotonic() + TOLD_AFTER_S, packed.note
            if not packed.write(lambda: not is_wanted() or time.monotonic() >= told_at) and is_wanted():
                on_progress(LoadProgress("keep"))
                packed.write(lambda: not is_wanted())
            if packed.note != before:
                on_progress(LoadProgress("keep", detail=packed.note))
        finally:
            packed.close()
