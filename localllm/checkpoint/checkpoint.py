"""`Checkpoint`: a model's tensors and raw fields, independent of the container. Made by `opening.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from .mapped_file import MappedFile, TensorInfo
from .text_modules import TextModules


@dataclass(eq=False)
class Checkpoint:
    """A model on disk; mapped, with nothing read yet. Close it, or use it in a `with`."""

    path: Path
    kind: str  # "gguf" or "safetensors"
    tensors: dict[str, TensorInfo]
    files: Mapping[Path, MappedFile]  # all files that hold `tensors`
    # GGUF key-values; arrays of strings are lists of bytes, numeric arrays are numpy arrays
    metadata: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    # from wherever the checkpoint keeps it; {} when there is none
    quantization_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_files: dict[str, Path] = field(default_factory=dict)  # by name, also chat templates
    license: str = ""
    text_modules: TextModules = TextModules()  # from sentence-transformers' files

    def read(self, name: str) -> np.ndarray:
        """A tensor's stored bytes as flat uint8: a read-only view of the file, or a copy if they are not contiguous.

        Raises KeyError for an unknown name.
        """
        info, file = self.tensors[name], self.files[self.tensors[name].file]
        if info.pieces:
            return np.concatenate([file.view(*piece) for piece in info.pieces])
        if info.strides is None:
            return file.view(info.offset, info.nbytes)
        item = info.nbytes // math.prod(info.shape)
        span = sum((count - 1) * step for count, step in zip(info.shape, info.strides, strict=True)) + item
        data = file.view(info.offset, span)
        return np.ndarray(info.shape, f"u{item}", data, strides=info.strides).copy().view(np.uint8).reshape(-1)

    def maps(self, address: int) -> bool:
        return any(file.holds(address) for file in self.files.values())

    def forget(self, name: str, *, cached: bool = True) -> None:
        """Release a tensor's mapped pages; with `cached` the system may also drop them from its page cache, in which
        case the next read comes from disk.
        """
        info = self.tensors[name]
        for offset, nbytes in info.pieces or ((info.offset, info.nbytes),):
            self.files[info.file].forget(offset, nbytes, cached=cached)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def close(self) -> None:
        """Unmap the files once the last view from `read` is gone."""
        for file in self.files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
