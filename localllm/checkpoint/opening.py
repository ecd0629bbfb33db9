"""From a path to an open `Checkpoint`: which files belong to it, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

from .checkpoint import Checkpoint
from .gguf_file import read_gguf


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open the .gguf file at `path`."""
    path = Path(path)
    gguf = read_gguf(path)
    return Checkpoint(path, "gguf", gguf.tensors, {path: gguf.file}, metadata=gguf.metadata)
