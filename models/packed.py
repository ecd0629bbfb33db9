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

from localllm.checkpoint.packed_file import PackedFile, PackedWriter, Unusable, padded, remove
from localllm.kernels import LinearFacts, Weight
from localllm.kernels.cpu import layout
from localllm.kernels.cpu.build import layout_name
from localllm.kernels.verify.selftest import OPTIONAL

log = logging.getLogger(__name__)
SPARED_S = 7 * 86400.0  # two models that are larger than the limit together would replace each other at every start


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

    path      where it lies, or will: its name says which files it was made from, and how
    files     those files
    limit     bytes that all such files may have together
    ahead     the file, where somebody reads it already
    is_asked  somebody wants a file: what is in its way is said, and other files go for it. Else that is only logged,
              and files that were used within `SPARED_S` stay
    """

    def __init__(
        self, path: Path, files: Sequence[Path], limit: int, ahead: PackedFile | None = None, is_asked: bool = True
    ) -> None:
        self.note = ""  # what is wrong, for people
        self.read_bytes = 0  # of weights that are in memory of this process
        self._path = path
        self._files = [str(file.absolute()) for file in files]
        self._data: np.ndarray | None = None
        self._found: PackedFile | None = None
        self._entries: dict[str, Any] = {}
        self._limit, self._is_asked = limit, is_asked
        self.writes = False  # whether the file is still to be written, with what is repacked
        self._writer: PackedWriter | None = None
        self._waiting: deque[tuple[str, dict[str, Any], layout.Prepared]] = deque()
        self._pieces: deque[memoryview] = deque()  # of a weight that is being written
        try:
            found = ahead or PackedFile(path)
            self._data, self._entries = found.check(layout_name()), found.entries
            self.read_bytes, self._found = found.copied, found
            return
        except FileNotFoundError:
            pass
        except Unusable as error:
            is_gone = error.is_damaged and remove(path)
            if is_gone or is_asked:
                self.note = f"the repacked weights in {path} are made anew: the file {error}"
        self.writes = True

    def _pass_over(self, error: Unusable) -> None:
        said = f"repacked weights are not kept, the next start takes longer: {self._path} {error}"
        log.info("%s", said)
        if self._is_asked:
            self.note = said

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
        """Write what is kept, one piece after another until `must_stop`; whether nothing is left to do.

        What goes wrong ends it: `note` says so.
        """
        if not self.writes:
            return True
        if must_stop():
            return False
        try:
            writer = self._writer = self._writer or self._new_writer()
            while self._waiting or self._pieces:
                if must_stop():
                    return False
                if self._pieces:
                    writer.append(self._pieces.popleft())
                    continue
                key, entry, prepared = self._waiting.popleft()
                entry["data"] = self._put(writer, prepared.data)
                entry["kept"] = {name: self._put(writer, part) for name, part in layout.kept_of(prepared).items()}
                self._entries.setdefault(key, []).append(entry)
            writer.finish({"layout": layout_name(), "files": self._files, "entries": self._entries})
        except Unusable as error:
            self._pass_over(error)
        self.close()
        return True

    def _new_writer(self) -> PackedWriter:
        """Raises Unusable. Not before there is something to write: it takes the place of other files."""
        weights = [prepared for _, _, prepared in self._waiting]
        parts = (part for one in weights for part in (one.data, *layout.kept_of(one).values()))
        num_bytes = sum(padded(part.nbytes) for part in parts)
        return PackedWriter(self._path, num_bytes, self._limit, 0.0 if self._is_asked else SPARED_S)

    def _put(self, writer: PackedWriter, part: Tensor) -> tuple[int, int]:
        """(where it will lie, its bytes)"""
        at, pieces = writer.pieces(part.view(torch.uint8).numpy())
        self._pieces.extend(pieces)
        return at, part.nbytes

    def close(self) -> None:
        """Leave nothing of a file that is not finished."""
        writer, self._writer, self.writes = self._writer, None, False
        self._waiting.clear()
        self._pieces.clear()
        if writer is not None:
            writer.close()
