"""Apertus: Llama with norms of queries and keys, and xIELU, an activation with learned numbers, instead of a gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.mapped_file import bad, shown

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Curve, LayerFacts
from .mixers import RopeFacts

# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
ACTIVATION = "xielu"
UNTRAINED = Curve(0.8, 0.8, 0.5, -1e-6)  # where only the configuration is known
NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")
WIDTHS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Apertus(Architecture):
    """Safetensors hold the numbers of the activation as tensors, GGUF files in their metadata."""

    name = "apertus"
    label = "Apertus"
    hf_types = {"apertus": DEFAULTS}
    hf_classes = ("ApertusForCausalLM",)
    gguf_types = ("apertus",)
    hf_inner = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        stated = config.keys.text("hidden_act", ACTIVATION)
        if stated != ACTIVATION:
            raise config.keys.fail("hidden_act", f"is {stated[:60]!r}; {ACTIVATION} is supported")
        if config.keys.flag("post_norm") or not config.keys.flag("qk_norm", True):
            raise config.unsupported(f"{config.source} with norms in other places")
        if not config.checkpoint.tensors:
            return _facts(config, *config.rope(), [UNTRAINED] * config.num_layers)
        curves = []
        for layer in range(config.num_layers):
            start = config.names.source(f"model.layers.{layer}.mlp.act_fn")
            curves.append(_curve(config, [_stored(config.checkpoint, f"{start}.{name}") for name in NUMBERS]))
        return _facts(config, *config.rope(), curves)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        columns = []
        for name in NUMBERS:
            values = config.general.raw(f"xielu.{name}")
            values = values if isinstance(values, np.ndarray) else np.full(config.num_layers, values or np.nan)
            if values.dtype.kind != "f" or len(values) < config.num_layers or not np.isfinite(values).all():
                raise config.general.fail(f"xielu.{name}", f"must hold {config.num_layers} numbers")
            columns.append(values.tolist())
        curves = [_curve(config, numbers) for numbers in zip(*columns, strict=False)]
        return _facts(config, *config.rope(), curves[: config.num_layers])


def _facts(config: Config, rope: RopeFacts, context: int, curves: Sequence[Curve]) -> ModelFacts:
    attention, dense = config.attention(rope, qk_norm=True), replace(config.dense(ACTIVATION), gated=False)
    return config.facts([LayerFacts(attention, replace(dense, curve=curve)) for curve in curves], context)


def _curve(config: Config, numbers: Sequence[float]) -> Curve:
    """The activation of a layer, whose factors are stored as the inverse of softplus."""
    rising, falling, beta, eps = numbers
    if max(map(abs, numbers)) > 1e3:
        raise bad(config.checkpoint.path, f"must be within ±1,000, not {shown(list(numbers))}", key="xielu")
    return Curve(_softplus(rising), beta + _softplus(falling), beta, eps)


def _softplus(value: float) -> float:
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))


def _stored(checkpoint: Checkpoint, name: str) -> float:
    """The only number of a tensor."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise bad(checkpoint.path, "the tensor is missing", key=name)
    if info.dtype not in WIDTHS or math.prod(info.shape) != 1:
        raise bad(info.file, f"is {info.dtype} of shape {list(info.shape)}, expected one number", key=name)
    value = np.frombuffer(checkpoint.read(name).tobytes(), WIDTHS[info.dtype])
    value = (value.astype(np.uint32) << 16).view(np.float32) if info.dtype == "BF16" else value
    if not np.isfinite(value).all():
        raise bad(info.file, "is not a finite number", key=name)
    return float(value[0])
