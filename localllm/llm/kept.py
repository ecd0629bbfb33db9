"""What is kept on the disk for the next start, by what it depends on: pages of keys and values, repacked weights."""

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

if TYPE_CHECKING:  # what is read ahead is found before torch is imported
    from localllm.engine.page_files import PageFiles
    from localllm.models.architectures import ModelFacts, OpenModel
    from localllm.models.kv_cache import KVCache
    from localllm.models.packed import Packed
    from localllm.plan.plan import Plan

SAMPLES, SAMPLE_BYTES = 64, 4096
LEAST_BYTES = 256 << 20  # A smaller model is repacked in less time than a file of it is worth.
AUTO_SHARE = 0.1  # of what would be free on the disk without the files
NOT_BY_ITSELF = ("memory", "network")  # kinds of disks where a file costs more than it gives
TOLD_AFTER_S = 0.5  # that an end has waited for the file


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
    from localllm.engine.page_files import PageFiles, store_dir

    sizes = [*(cache.page_bytes(group) for group in range(len(cache.groups))), cache.slot_bytes()]
    return PageFiles(store_dir(), identity(model_digest(files), facts, plan, sizes, weight_format), limit)


def automatic_limit() -> int:
    """Bytes of repacked weights that are kept where nobody says how many.

    0 where the folder lies in memory or on another machine, or in a container's own layer, which goes with it.
    """
    disk = disk_facts(packed_dir())
    if disk.kind in NOT_BY_ITSELF or disk.filesystem == "overlay":
        return 0
    try:
        kept = sum(path.stat().st_size for path in packed_dir().glob("*.packed"))
    except OSError:  # also of a file that another process removes
        return 0
    return int(AUTO_SHARE * (disk.free_bytes + kept))


class KeptWeights:
    """A model's repacked weights on the disk: read while torch is imported, written behind the first answer."""

    def __init__(self, checkpoint: OpenModel, plan: Plan, limit: int | Literal["auto"]) -> None:
        """Nothing is kept of small models, and of those that are divided or on a card.

        limit   bytes of all files; with "auto", `automatic_limit`, and what is in the way of a file is only logged
        """
        self._checkpoint, self._is_asked = checkpoint, limit != "auto"
        self._limit = automatic_limit() if limit == "auto" else limit
        self._path: Path | None = None
        self._ahead: PackedFile | None = None
        self._packed: Packed | None = None
        if plan.device == "cpu" and not plan.ranks and self._limit and checkpoint.nbytes >= LEAST_BYTES:
            is_too_large = plan.weight_bytes > self._limit and not self._is_asked
            if is_too_large and not any(packed_dir().glob("*.packed")):
                return  # the digest would be for nothing
            name = blake2b(model_digest(checkpoint.files) + plan.quant.encode(), digest_size=16).hexdigest()
            self._path = packed_dir() / f"{name}.packed"
            self._ahead = read_ahead(self._path)

    def open(self) -> Packed | None:
        """For the loader; None where nothing is kept, or the CPU's kernels cannot be built."""
        from localllm.kernels.cpu.build import library
        from localllm.models.packed import Packed

        if self._path is not None and library().lib is not None:
            parts = self._path, tuple(self._checkpoint.files), self._limit, self._ahead, self._is_asked
            self._packed, self._ahead = Packed(*parts), None
        return self._packed

    @property
    def note(self) -> str:
        """What is wrong, for people."""
        return "" if self._packed is None else self._packed.note

    def settle(self, must_stop: Callable[[], bool]) -> bool:
        """An idle job, before the plan is profiled: `Packed.settle`."""
        return self._packed is None or self._packed.settle(must_stop)

    def write(self, must_stop: Callable[[], bool]) -> bool:
        """An idle job (`Engine.when_idle`)."""
        return self._packed is None or self._packed.write(must_stop)

    def close(self, is_wanted: Callable[[], bool], on_progress: OnProgress) -> None:
        """Write what no idle moment was left for, as after a single answer, as long as it is wanted."""
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
