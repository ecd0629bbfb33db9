"""A stored layer on disk, detected and loaded as the program does it; and a packer that knows bits, not formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from localllm.checkpoint import stored_formats
from localllm.checkpoint.opening import open_checkpoint
from localllm.quant import Weight, load_weight

PREFIX = "model.layers.0.mlp.up_proj"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Weight]:
    """(tensors by suffix, (N, K), quantization_config, kind expected) -> Weight, by way of a safetensors file."""

    def _load(tensors: dict[str, Tensor], shape: tuple[int, int], config: dict[str, Any], kind: str) -> Weight:
        named = {PREFIX + (name if name.startswith("_") else f".{name}"): t.contiguous() for name, t in tensors.items()}
        save_file(named, tmp_path / "model.safetensors")
        settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": config}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        checkpoint = open_checkpoint(tmp_path)
        stored = stored_formats(checkpoint)[PREFIX]
        assert stored.kind == kind
        return load_weight(checkpoint, PREFIX, stored, shape)

    return _load


@pytest.fixture
def pack_stream() -> Callable[[Tensor, int], Tensor]:
    """(codes [..., C], bits) -> i32 words, one little-endian bit stream along the last dimension."""

    def _pack(codes: Tensor, bits: int) -> Tensor:
        ones = (codes.numpy()[..., None] >> np.arange(bits)) & 1
        stream = ones.astype(np.uint8).reshape(*codes.shape[:-1], -1)
        stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)])
        return torch.from_numpy(np.packbits(stream, axis=-1, bitorder="little").view("<i4").copy())

    return _pack
