"""The table of n-gram embeddings: tens of gigabytes, of which a token reads a few rows. It stays in the file.

Rows are read with `pread`, not through a mapping: a file that is truncated meanwhile then raises an error instead of
killing the process. All rows of a step are announced before the first is read, so that a disk serves them together, and
without read-ahead, which would fetch 128 KiB for each. The system's page cache holds the rows that were read lately.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from localllm.checkpoint.mapped_file import bad
from localllm.errors import BadModelFile
from localllm.kernels.gguf_blocks import dequantize_blocks
from localllm.kernels.hyper import ngram_rows
from localllm.kernels.state_slots import StateSlots
from localllm.quant import read_dense

from .architectures import OpenModel
from .architectures.facts import ModelFacts
from .architectures.layers import NGramTable
from .inputs import ForwardBatch
from .kv_cache import KVCache

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


class _Shard(NamedTuple):
    path: Path
    offset: int  # of the first row, in bytes
    end: int  # number of the row after the last


class NGramRows:
    """Reads the n-gram embeddings of a step's tokens. Keeps its files open, each once: a table may have 512 parts."""

    def __init__(self, facts: NGramTable, layer: int, shards: list[_Shard], dtype: str, scale: float) -> None:
        """`dtype` is that of the file, a GGUF block type among others; `scale` multiplies FP8 rows."""
        self.facts = facts
        self.layer = layer
        self._shards = shards
        self._ends = np.array([shard.end for shard in shards])
        self._dtype = dtype
        self._scale = scale
        self._row_bytes = facts.nbytes // facts.rows
        self._numbers = tuple(torch.tensor(each) for each in (facts.multipliers, facts.sizes, facts.offsets))
        self._files: dict[Path, int] = {}
        for path in dict.fromkeys(shard.path for shard in shards):
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(self._files[path], 0, 0, os.POSIX_FADV_RANDOM)

    def __call__(self, batch: ForwardBatch, cache: KVCache, dtype: torch.dtype) -> Tensor:
        """The rows of each token side by side: [num_tokens, heads * dim]. Updates the sequences' last tokens."""
        kept = cache.layers[self.layer]
        assert isinstance(kept, StateSlots) and kept.ngrams is not None and batch.slots is not None
        assert kept.ngrams.state is not None
        starts = batch.cu_query_lens if batch.state_starts is None else batch.state_starts
        multipliers, sizes, offsets = self._numbers
        last = kept.ngrams.state
        ids = ngram_rows(batch.token_ids, last, batch.slots, starts, multipliers, sizes, offsets, self.facts.end)
        return self.read(ids).to(batch.token_ids.device, dtype)

    def read(self, ids: Tensor) -> Tensor:
        """Row numbers int64 [n, heads] -> float32 [n, heads * dim]."""
        flat, size = ids.flatten().numpy(), self._row_bytes
        data = np.empty((len(flat), size), np.uint8)
        owners = np.searchsorted(self._ends, flat, side="right")
        firsts = np.concatenate([[0], self._ends[:-1]])[owners]
        places = [
            (self._shards[owner], self._shards[owner].offset + row * size)
            for owner, row in zip(owners.tolist(), (flat - firsts).tolist(), strict=True)
        ]
        for shard, offset in places:
            os.posix_fadvise(self._files[shard.path], offset, size, os.POSIX_FADV_WILLNEED)
        for number, (shard, offset) in enumerate(places):
            row = os.pread(self._files[shard.path], size, offset)
            if len(row) < size:
                what = f"{shard.path.name}: ends before row {flat[number]:,} of the n-gram table: it has changed"
                raise BadModelFile(what, "restart, or download the model again (localllm pull)")
            data[number] = np.frombuffer(row, np.uint8)
        raw = torch.from_numpy(data)
        plain = _DTYPES.get(self._dtype)
        rows = dequantize_blocks(raw, self._dtype) if plain is None else raw.view(plain).float()
        return rows.mul_(self._scale).view(ids.shape[0], -1)

    def __del__(self) -> None:
        for file in self.__dict__.get("_files", {}).values():
            os.close(file)


def open_ngrams(checkpoint: OpenModel, facts: ModelFacts) -> NGramRows:
    """Open the table of a checkpoint, which may be closed afterwards."""
    table = facts.ngrams
    assert table is not None
    layer = next(index for index, one in enumerate(facts.layers) if one.ngrams is not None)
    shards, end = [], 0
    for name in table.shards:
        info = checkpoint.tensors[name]
        end += info.shape[0]
        shards.append(_Shard(info.file, info.offset, end))
    scale = float(read_dense(checkpoint, table.scale).float()) if table.scale else 1.0
    if not math.isfinite(scale):
        raise bad(checkpoint.path, f"the scale of the n-gram table is {scale}", key=table.scale)
    return NGramRows(table, layer, shards, checkpoint.tensors[table.shards[0]].dtype, scale)
