"""`Checkpoint`: one model's tensors, metadata and facts, whatever container they came in. `opening.py` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .check import checked_facts
from .facts import ModelFacts
from .mapped_file import MappedFile
from .tensor_info import TensorInfo


class Checkpoint:
    """One model on disk, mapped and not yet read. Close it, or use it in a `with`."""

    def __init__(
        self,
        path: Path,
        kind: str,
        tensors: dict[str, TensorInfo],
        files: Mapping[Path, MappedFile],
        *,
        metadata: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        generation_config: dict[str, Any] | None = None,
        quantization_config: dict[str, Any] | None = None,
        tokenizer_files: dict[str, Path] | None = None,
        licence: str = "",
    ) -> None:
        """Made by `open_checkpoint`; `files` holds every file that `tensors` lie in."""
        self.path = path
        self.kind = kind
        """"gguf" or "safetensors"."""
        self.tensors = tensors
        self.metadata = metadata or {}
        """GGUF key-values; arrays of strings as `StringArray` (a lazy list of bytes), numeric ones as numpy."""
        self.config = config or {}
        self.generation_config = generation_config or {}
        self.quantization_config = quantization_config or {}
        """Wherever the checkpoint keeps it; {} when there is none."""
        self.tokenizer_files = tokenizer_files or {}
        """File name -> path, of the tokenizer and chat template files that are there."""
        self.licence = licence
        self._files = dict(files)

    def read(self, name: str) -> np.ndarray:
        """A tensor's stored bytes: uint8, flat, read-only, a view of the file. KeyError for an unknown name."""
        info = self.tensors[name]
        return self._files[info.file].view(info.offset, info.nbytes)

    def maps(self, address: int) -> bool:
        """Whether a memory address lies in one of the mapped files."""
        return any(file.holds(address) for file in self._files.values())

    def forget(self, name: str) -> None:
        """Let the system drop a tensor's bytes from its page cache; who wants them again reads them from disk."""
        info = self.tensors[name]
        self._files[info.file].forget(info.offset, info.nbytes)

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def facts(self) -> ModelFacts:
        """The model's numbers, checked against limits and tensors. Raises BadModelFile or UnsupportedModel."""
        return checked_facts(self)

    @property
    def doubt(self) -> str:
        """Where the configuration contradicts the tensors, which are believed; "" where it does not."""
        said = self.quantization_config.get("quant_method") or self.quantization_config.get("quant_algo")
        stored = self.facts.stored_format
        if not said or stored not in ("bf16", "fp16", "f32"):
            return ""
        return f"the configuration says {str(said)[:40]}, the weights are stored as {stored}: they are read as stored"

    def close(self) -> None:
        """Unmap the files, as soon as the last view from `read` is gone."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
