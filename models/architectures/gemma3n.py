"""Gemma 3n (text): several residual streams (AltUp), low-rank products in parallel to attention (LAuReL), activation
sparsity in the first layers, and as in Gemma 4 E2B per-layer inputs and a KV cache shared by the last layers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HIDDEN, MAX_VOCAB

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gemma3 import FULL_THETA, GGUF_NORMS, LOCAL_THETA
from .gemma4 import ACT, GGUF_INNER, GGUF_TOP, Stack
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Dense, InputTable, Streams
from .mixers import Attention, RopeFacts
from .names import NameMap

FULL_EVERY, LOGIT_CAP = 5, 30.0
MOST_STREAMS = 16  # published models have four
# defaults: layers with activation sparsity in a deep model, their share of zero gates, layers with their own KV cache
THINNED, SPARSITY, KEEPING = 10, 0.95, 20
DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": LOGIT_CAP,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "altup_correct_scale": True,
    "laurel_rank": 64,
}
GGUF_STREAMS = {
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
_OUTER = {"model.altup_projections": "altup_proj", "model.altup_unembed_projections": "altup_unembd_proj"}
GGUF_OUTER = {f"{ours}.{n}": f"{theirs}.{n}" for ours, theirs in _OUTER.items() for n in range(MOST_STREAMS - 1)}


class Gemma3n(Architecture):
    """The per-layer embedding may have fewer rows than the vocabulary; image and audio tokens use the first row."""

    name = "gemma3n"
    label = "Gemma 3n (text)"
    hf_types = {"gemma3n_text": DEFAULTS}
    hf_wrappers = {"gemma3n": "gemma3n_text"}
    hf_classes = ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")
    gguf_types = ("gemma3n",)
    gguf_inner = GGUF_NORMS | GGUF_INNER | GGUF_STREAMS

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, num_layers = config.keys, config.num_layers
        rope, local, context = config.ropes(FULL_THETA, LOCAL_THETA)
        shares = _per_layer(config, "activation_sparsity_pattern", (int, float), 0.0, 1.0 - 1e-6)
        sizes = _per_layer(config, "intermediate_size", (int,), 1, MAX_HIDDEN * 4)
        rows = keys.integer("vocab_size_per_layer_input", 1, MAX_VOCAB)
        stack = Stack(
            **_mixers(config, rope, local, keys.integer("altup_active_idx", 0, MOST_STREAMS, 0)),
            ffn=Dense(1, config.activation("hidden_activation")),
            windows=config.windows(lambda layer: (layer + 1) % FULL_EVERY != 0),
            inners=sizes or [config.dense().inner] * num_layers,
            keeping=num_layers - keys.integer("num_kv_shared_layers", 0, num_layers - 1),
            inputs=InputTable(rows, keys.integer("hidden_size_per_layer_input", 1, MAX_HIDDEN), num_layers),
            cuts=[NormalDist().inv_cdf(share) if share else None for share in shares or _sparsity(num_layers)],
            streams=Streams(
                keys.integer("altup_num_inputs", 2, MOST_STREAMS),
                keys.integer("laurel_rank", 1, MAX_HIDDEN),
                keys.flag("altup_correct_scale"),
            ),
        )
        return stack.facts(config, context, logit_softcap=config.capped("final_logit_softcapping"))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys, num_layers = config.keys, config.num_layers
        rope, context = config.rope()
        local = RopeFacts(keys.number("rope.freq_base_swa", 1.0, 1e15, LOCAL_THETA), config.head_dim)
        left = config.checkpoint.tensors.get(f"{config.names.source('model.layers.0.laurel.linear_left')}.weight")
        rank = left.shape[0] if left is not None and len(left.shape) == 2 else 1
        size = keys.integer("embedding_length_per_layer_input", 1, MAX_HIDDEN)
        shared = keys.integer("attention.shared_kv_layers", 0, num_layers - 1, max(0, num_layers - KEEPING))
        stack = Stack(
            **_mixers(config, rope, local, keys.integer("altup.active_idx", 0, MOST_STREAMS, 0)),
            ffn=Dense(1, ACT),
            windows=config.windows(FULL_EVERY),
            inners=config.each("feed_forward_length", 1, MAX_HIDDEN * 4, 0),
            keeping=num_layers - shared,
            inputs=InputTable(config.vocab_size, size, num_layers),
            cuts=_gguf_cuts(config),
            streams=Streams(keys.integer("altup.num_inputs", 2, MOST_STREAMS, 4), rank),
        )
        cap = keys.number("final_logit_softcapping", 1e-3, 1e6, LOGIT_CAP)
        return stack.facts(config, context, logit_softcap=cap)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        if checkpoint.kind == "gguf":
            return replace(found, top={**found.top, **GGUF_TOP, **GGUF_OUTER})
        start = found.top["model.norm"].removesuffix("norm")
        outer = {name: start + name.removeprefix("model.") for name in (*GGUF_TOP, *GGUF_OUTER)}
        return replace(found, top={**found.top, **outer})


def _mixers(config: Config, rope: RopeFacts, local: RopeFacts, computed: int) -> dict[str, Attention]:
    """Attention of full and of windowed layers; `computed` is the index of the active stream."""
    if computed:
        raise config.unsupported(f"{config.source} with active AltUp stream {computed} instead of 0")
    full = config.attention(rope, scale=1.0, qk_norm=True, v_norm=True)
    return {"full": full, "narrow": replace(full, rope=local)}


def _per_layer(config: HfConfig, key: str, kinds: tuple[type, ...], low: float, high: float) -> list[Any]:
    """Read a list with one number per layer; [] if the file has none."""
    values, count = config.keys.raw(key), config.num_layers
    if values is None or (type(values) is int and key == "intermediate_size"):
        return []
    fits = isinstance(values, list) and len(values) == count and all(type(value) in kinds for value in values)
    if not fits or not all(low <= value <= high for value in values):
        raise config.keys.fail(key, f"must list {count} numbers from {low:g} to {high:g}")
    return list(values)


def _sparsity(num_layers: int) -> list[float]:
    """The default share of zero gates in each layer."""
    thinned = THINNED if num_layers > THINNED else 0
    return [SPARSITY] * thinned + [0.0] * (num_layers - thinned)


def _gguf_cuts(config: GgufConfig) -> list[float | None]:
    """The threshold of each layer in deviations above the mean; the file stores -inf for layers without one."""
    key, count = "activation_sparsity_scale", config.num_layers
    values = config.keys.raw(key)
    if values is None:
        return [NormalDist().inv_cdf(share) if share else None for share in _sparsity(count)]
    fits = isinstance(values, np.ndarray) and values.dtype.kind == "f" and len(values) == count
    if not fits or not all(value < 10 for value in values.tolist()):  # False for NaN
        raise config.keys.fail(key, f"must hold {count} numbers below 10")
    return [value if math.isfinite(value) else None for value in values.tolist()]
