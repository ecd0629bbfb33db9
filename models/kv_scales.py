"""FP8 KV cache scales from a checkpoint: one calibrated number per layer for keys and one for values."""

from __future__ import annotations

import math

from localllm.checkpoint import Checkpoint
from localllm.errors import BadModelFile
from localllm.quant.dense import read_dense

from .architectures.names import NameMap

# names below `self_attn` in files of different tools; {} is k or v
SUFFIXES = (
    "{}_scale", "{}_proj.{}_scale", "qkv_proj.{}_scale", "qkqkv_proj.{}_scale", "{}_proj.output_scale",
    "{}_cache.scale", "kv_scale",
)  # fmt: skip


def read_kv_scales(checkpoint: Checkpoint, names: NameMap, num_layers: int) -> dict[int, tuple[float, float]]:
    """Read layer -> (key scale, value scale), which multiply the codes. Empty if there are none.

    Scales that are 1.0 in every layer are placeholders and ignored; if only one of a pair is stored, it serves both.
    Per-head scales are ignored, because such layers get one scale per token and head, which is finer. Raises
    BadModelFile for a scale that is not a positive finite number.
    """
    if checkpoint.kind == "gguf":
        return {}
    found: dict[int, tuple[float, float]] = {}
    for layer in range(num_layers):
        base = names.source(f"model.layers.{layer}.self_attn")
        pair = [_first(checkpoint, base, part) for part in "kv"]
        k, v = (pair[0] or pair[1]), (pair[1] or pair[0])
        if k is not None and v is not None:
            found[layer] = (k, v)
    return {} if all(pair == (1.0, 1.0) for pair in found.values()) else found


def _first(checkpoint: Checkpoint, base: str, part: str) -> float | None:
    """The first stored scale that is a single number."""
    for suffix in SUFFIXES:
        name = f"{base}.{suffix.format(part, part)}"
        if name in checkpoint.tensors and math.prod(checkpoint.tensors[name].shape) == 1:
            scale = float(read_dense(checkpoint, name))
            if not (scale > 0 and math.isfinite(scale)):
                raise BadModelFile(f"{checkpoint.path.name}: {name} is {scale}, expected a positive finite number")
            return scale
    return None
