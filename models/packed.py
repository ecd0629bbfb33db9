"""The weights of one model as the CPU's kernels read them, kept in a file: found there, or written while they load.

What is read is what was repacked, bit by bit; it lies in memory once. Whatever is wrong with the file or its folder,
the model loads without it, and `note` says so.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localllm.checkpoint.packed_file import PackedFile, PackedWriter, Unusable, remove
from localllm.kernels import LinearFacts, Weight
from localllm.kernels.cpu import layout
from localllm.kernels.cpu.build import layout_name, lib
from localllm.kernels.verify.selftest import OPTIONAL

log = logging.getLogger(__name__)

LEAST_BYTES = 256 << 20  # A smaller model is repacked in less time than a file of it is worth.
STAGE_BYTES = 64 << 20


class PackFailed(Exception):
    """The file could not be written to its end: what was repacked into it has to be repacked again."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A weight from the file, and what of its canonical form chooses its kernel."""

    form: str
    shape: tuple[int, int]
    group_size: int
    block_type: str
    has: tuple[str, ...]  # optional tensors of the canonical form
    prepared: layout.Prepared


class Packed:
    """One model's file.

    path    where it lies, or will: its name says which files it was made from, and how
    files   those files
    nbytes  about how large it becomes
    limit   bytes that all such files may have together
    """

    def __init__(self, path: Path, files: Sequence[Path], nbytes: int, limit: int) -> None:
        self.note = ""  # what is wrong, for people
        self.read_bytes = 0  # of weights that came out of the file
        self._files = [str(file.absolute()) for file in files]
        self._data: np.ndarray | None = None
        self._entries: dict[str, Any] = {}
        self._writer: PackedWriter | None = None
        self._written: list[tuple[layout.Prepared, int]] = []
        self._stage = torch.empty(0, dtype=torch.uint8)
        try:
            found = PackedFile(path, layout_name(), checksums)
            self._data, self._entries = found.data, found.entries
            self.read_bytes = found.size
            return
        except FileNotFoundError:
            pass
        except Unusable as error:
            self.note = f"the repacked weights in {path} are made anew: the file {error}"
            if error.is_damaged:
                remove(path)
        try:
            self._writer = PackedWriter(path, nbytes, limit)
        except Unusable as error:
            self._pass_over(path, error)

    def _pass_over(self, path: Path, error: Unusable) -> None:
        self.note = f"repacked weights are not kept, every start takes longer: {path} {error}"
        log.info("%s", self.note)

    @property
    def writes(self) -> bool:
        """Whether what is repacked now goes into the file."""
        return self._writer is not None

    def parts(self, key: str) -> tuple[PackedPart, ...] | None:
        """What `keep` was given under a name, in order; None where the file does not have it."""
        found = None if self._data is None else self._entries.get(key)
        return None if found is None else tuple(map(self._part, found))

    def _part(self, entry: dict[str, Any]) -> PackedPart:
        kept = {name: self._view(at, nbytes).view(layout.KEPT[name]) for name, (at, nbytes) in entry["kept"].items()}
        prepared = layout.revived(bytes.fromhex(entry["struct"]), self._view(*entry["data"]), kept)
        n, k = entry["shape"]
        return PackedPart(entry["form"], (n, k), entry["group"], entry["type"], tuple(entry["has"]), prepared)

    def _view(self, at: int, nbytes: int) -> Tensor:
        """uint8 [nbytes], a view of what was read: it is never written to, and keeps that alive."""
        data = self._data
        assert data is not None and 0 <= at <= at + nbytes <= data.nbytes, (at, nbytes)
        # torch.from_numpy warns about read-only memory; a ctypes array is the same memory without a flag
        memory = (ctypes.c_uint8 * nbytes).from_address(data.ctypes.data + at)
        memory.owner = data  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def prepare(self, weight: Weight) -> layout.Prepared:
        """As `layout.prepare`, in memory that the next call uses again: to be given to `keep` before."""
        return layout.prepare(weight, self._take)

    def _take(self, count: int) -> Tensor:
        if count > self._stage.numel():
            self._stage = torch.empty(0, dtype=torch.uint8)  # the smaller one goes first
            self._stage = layout.Arena(max(count, STAGE_BYTES)).take(max(count, STAGE_BYTES))
        return self._stage[:count]

    def keep(self, key: str, facts: LinearFacts, weight: Weight, prepared: layout.Prepared) -> None:
        """Write one weight; several under one name in the order of the calls. Raises PackFailed."""
        assert self._writer is not None
        try:
            at = self._writer.write(memoryview(prepared.data.numpy()))
            kept = {
                name: (self._writer.write(memoryview(part.view(torch.uint8).numpy())), part.nbytes)
                for name, part in layout.kept_of(prepared).items()
            }
        except Unusable as error:
            raise PackFailed(str(error)) from error
        self._written.append((prepared, at))
        self._entries.setdefault(key, []).append({
            "form": facts.form, "shape": facts.shape, "group": facts.group_size, "type": facts.block_type,
            "has": [name for name in OPTIONAL if getattr(weight, name) is not None],
            "struct": layout.stored_struct(prepared).hex(), "data": (at, prepared.data.numel()), "kept": kept,
        })  # fmt: skip

    def finish(self) -> None:
        """The file is whole: all that was written is read from it from here on. Raises PackFailed."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        self._stage = torch.empty(0, dtype=torch.uint8)
        try:
            header = {"layout": layout_name(), "files": self._files, "entries": self._entries}
            self._data = writer.finish(header, checksums)
        except Unusable as error:
            raise PackFailed(str(error)) from error
        finally:
            writer.close()
        for prepared, at in self._written:
            prepared.move(self._view(at, prepared.data.numel()))
        self.read_bytes = self._data.nbytes
        self._written = []

    def close(self) -> None:
        """Leave nothing of a file that is not finished."""
        writer, self._writer = self._writer, None
        self._stage = torch.empty(0, dtype=torch.uint8)
        if writer is not None:
            writer.close()

    def give_up(self, reason: str) -> None:
        """Read and write nothing from here on."""
        self.close()
        self._data, self._entries, self._written = None, {}, []
        self.note = f"repacked weights are not kept, every start takes longer: the file {reason}"


def checksums(address: int, nbytes: int) -> bytes:
    """Eight bytes for each MiB, which differ when it does."""
    out = np.empty(-(-nbytes // (1 << 20)), np.uint64)
    lib().ll_checksums(address, nbytes, out.ctypes.data)
    return out.tobytes()
