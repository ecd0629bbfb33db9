"""A cache file with the weights of one model repacked for the CPU kernels: read at load, or written in idle time.

The file holds exactly the repacked bytes, which are in memory only once. If the file or its folder is unusable, the
model loads without it and `note` says why.
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
SPARED_S = 7 * 86400.0  # keeps two models that exceed the limit together from evicting each other at every start


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A weight from the file, and the facts of its canonical form that choose its kernel."""

    form: str
    shape: tuple[int, int]
    group_size: int
    block_type: str
    has: tuple[str, ...]  # optional tensors that the canonical form had
    prepared: layout.Prepared


class Packed:
    """One model's file.

    path      path of the file; its name identifies the source files and the layout
    files     the source files
    limit     bytes allowed for all such files together
    ahead     the file, if it is already being read
    is_asked  whether the user requested a file: problems go to `note`, and other files are evicted for it. Otherwise
              problems are only logged, and files used within `SPARED_S` are kept
    """

    def __init__(
        self, path: Path, files: Sequence[Path], limit: int, ahead: PackedFile | None = None, is_asked: bool = True
    ) -> None:
        self.note = ""  # what went wrong, for the user
        self.read_bytes = 0  # bytes of weights in this process's own memory
        self._path = path
        self._files = [str(file.absolute()) for file in files]
        self._data: np.ndarray | None = None
        self._found: PackedFile | None = None
        self._entries: dict[str, Any] = {}
        self._limit, self._is_asked = limit, is_asked
        self.writes = False  # whether repacked weights are still to be written
        self._writer: PackedWriter | None = None
        self._waiting: deque[tuple[str, dict[str, Any], layout.Prepared]] = deque()
        self._pieces: deque[memoryview] = deque()  # remaining pieces of the weight being written
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
                self.note = f"the repacked weights in {path} are rebuilt: the file {error}"
        self.writes = True

    def _give_up(self, error: Unusable) -> None:
        said = f"the repacked weights are not saved, so the next start takes longer: {self._path} {error}"
        log.info("%s", said)
        if self._is_asked:
            self.note = said

    def parts(self, key: str) -> tuple[PackedPart, ...] | None:
        """The weights kept under a name, in order; None if the file does not have it."""
        found = None if self._data is None else self._entries.get(key)
        return None if found is None else tuple(map(self._part, found))

    def _part(self, entry: dict[str, Any]) -> PackedPart:
        kept = {name: self._view(at, nbytes).view(layout.KEPT[name]) for name, (at, nbytes) in entry["kept"].items()}
        prepared = layout.revived(bytes.fromhex(entry["struct"]), self._view(*entry["data"]), kept)
        n, k = entry["shape"]
        return PackedPart(entry["form"], (n, k), entry["group"], entry["type"], tuple(entry["has"]), prepared)

    def _view(self, at: int, nbytes: int) -> Tensor:
        """uint8 [nbytes], a view of the file's data that keeps it alive; never written to."""
        data = self._data
        assert data is not None and 0 <= at <= at + nbytes <= data.nbytes, (at, nbytes)
        # torch.from_numpy warns about read-only memory; a ctypes array is the same memory without the flag
        memory = (ctypes.c_uint8 * nbytes).from_address(data.ctypes.data + at)
        memory.owner = data  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def settle(self, must_stop: Callable[[], bool]) -> bool:
        """Copy the mapped data into this process's own memory, until `must_stop`. Returns whether it is done."""
        return self._found is None or self._found.settle(must_stop)

    def keep(self, key: str, facts: LinearFacts, weight: Weight, prepared: layout.Prepared) -> None:
        """Queue a weight for `write`; several under one name keep the order of the calls."""
        entry = {
            "form": facts.form, "shape": facts.shape, "group": facts.group_size, "type": facts.block_type,
            "has": [name for name in OPTIONAL if getattr(weight, name) is not None],
            "struct": layout.stored_struct(prepared).hex(),
        }  # fmt: skip
        self._waiting.append((key, entry, prepared))

    def write(self, must_stop: Callable[[], bool] = lambda: False) -> bool:
        """Write the queued weights piece by piece until `must_stop`. Returns whether it is done.

        An error ends writing; `note` or the log says why.
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
            self._give_up(error)
        self.close()
        return True

    def _new_writer(self) -> PackedWriter:
        """Create the writer, which may evict other files: call it only when there is something to write. Raises
        Unusable.
        """
        weights = [prepared for _, _, prepared in self._waiting]
        parts = (part for one in weights for part in (one.data, *layout.kept_of(one).values()))
        num_bytes = sum(padded(part.nbytes) for part in parts)
        return PackedWriter(self._path, num_bytes, self._limit, 0.0 if self._is_asked else SPARED_S)

    def _put(self, writer: PackedWriter, part: Tensor) -> tuple[int, int]:
        """Queue a tensor's pieces: (its offset in the file, its bytes)."""
        at, pieces = writer.pieces(part.view(torch.uint8).numpy())
        self._pieces.extend(pieces)
        return at, part.nbytes

    def close(self) -> None:
        """Stop writing and remove an unfinished file."""
        writer, self._writer, self.writes = self._writer, None, False
        self._waiting.clear()
        self._pieces.clear()
        if writer is not None:
            writer.close()
