"""The weights of one model as the CPU's kernels read them, kept in a file: found there, or written while nobody waits.

What is read is what was repacked, bit by bit; it lies in memory once. Whatever is wrong with the file or its folder,
the model loads without it, and `note` says so.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localllm.checkpoint.packed_file import PackedFile, PackedWriter, Unusable, remove
from localllm.kernels import LinearFacts, Weight
from localllm.kernels.cpu import layout
from localllm.kernels.cpu.build import layout_name
from localllm.kernels.verify.selftest import OPTIONAL

log = logging.getLogger(__name__)


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
    ahead   the file, where somebody reads it already
    """

    def __init__(
        self, path: Path, files: Sequence[Path], nbytes: int, limit: int, ahead: PackedFile | None = None
    ) -> None:
        self.note = ""  # what is wrong, for people
        self.read_bytes = 0  # of weights that are in memory of this process
        self._path = path
        self._files = [str(file.absolute()) for file in files]
        self._data: np.ndarray | None = None
        self._found: PackedFile | None = None
        self._entries: dict[str, Any] = {}
        self._writer: PackedWriter | None = None
        self._waiting: deque[tuple[str, dict[str, Any], layout.Prepared]] = deque()
        try:
            found = ahead or PackedFile(path)
            self._data, self._entries = found.check(layout_name()), found.entries
            self.read_bytes, self._found = found.copied, found
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
            self._pass_over(error)

    def _pass_over(self, error: Unusable) -> None:
        self.close()
        self.note = f"repacked weights are not kept, the next start takes longer: {self._path} {error}"
        log.info("%s", self.note)

    @property
    def writes(self) -> bool:
        """Whether the file is still to be written, with what is repacked."""
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

    def settle(self, must_stop: Callable[[], bool]) -> bool:
        """Have what was found in memory of this process, which nobody can take away; whether nothing is left to do."""
        return self._found is None or self._found.settle(must_stop)

    def keep(self, key: str, facts: LinearFacts, weight: Weight, prepared: layout.Prepared) -> None:
        """What `write` writes; several under one name in the order of the calls."""
        entry = {
            "form": facts.form, "shape": facts.shape, "group": facts.group_size, "type": facts.block_type,
            "has": [name for name in OPTIONAL if getattr(weight, name) is not None],
            "struct": layout.stored_struct(prepared).hex(),
        }  # fmt: skip
        self._waiting.append((key, entry, prepared))

    def write(self, must_stop: Callable[[], bool] = lambda: False) -> bool:
        """Write what is kept, one weight after another until `must_stop`; whether nothing is left to do.

        What goes wrong ends it: `note` says so.
        """
        writer = self._writer
        if writer is None:
            return True
        try:
            while self._waiting:
                if must_stop():
                    return False
                key, entry, prepared = self._waiting.popleft()
                entry["data"] = writer.write(prepared.data.numpy())
                kept = layout.kept_of(prepared).items()
                entry["kept"] = {name: writer.write(part.view(torch.uint8).numpy()) for name, part in kept}
                self._entries.setdefault(key, []).append(entry)
            writer.finish({"layout": layout_name(), "files": self._files, "entries": self._entries})
        except Unusable as error:
            self._pass_over(error)
        self.close()
        return True

    def close(self) -> None:
        """Leave nothing of a file that is not finished."""
        writer, self._writer = self._writer, None
        self._waiting.clear()
        if writer is not None:
            writer.close()
