"""Granite 3 (dense): Llama with multipliers on embedding, scores, residual stream and logits."""

from __future__ import annotations

from typing import Any

from .architecture import Architecture
from .config import Config
from .facts import LayerFacts, ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig


class Granite(Architecture):
    """What a layer gives is multiplied before it is added."""

    name = "granite"
    label = "Granite 3 (dense)"
    hf_types = {"granite": {"max_position_embeddings": 2048, "attention_multiplier": 1.0}}
    hf_classes = ("GraniteForCausalLM",)
    gguf_types = ("granite",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        attention = config.attention(rope, scale=config.keys.number("attention_multiplier", 1e-6, 1e3))
        layer = LayerFacts(attention, config.dense(config.activation()))
        layers = repeated(layer, (None,) * config.num_layers)
        multiplied = _multiplied(config, "embedding_multiplier", "residual_multiplier", "logits_scaling")
        return config.facts(layers, context, **multiplied)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        layer = LayerFacts(config.attention(rope), config.dense())
        layers = repeated(layer, (None,) * config.num_layers)
        return config.facts(layers, context, **_multiplied(config, "embedding_scale", "residual_scale", "logit_scale"))


def _multiplied(config: Config, embedding: str, residual: str, logits: str) -> dict[str, Any]:
    """The multipliers as fields of `ModelFacts`, by the names of their keys.

    A stream x to which r · f(norm(x)) is added is r times the stream y = x / r to which f(norm(y)) is added: norms do
    not see its size, once their epsilon is divided by r².
    """
    r = config.keys.number(residual, 1e-3, 1e3, 1.0)
    eps = config.keys.number(config.KEYS["eps"], 1e-12, 0.1, config.DEFAULT_EPS)
    return {
        "embedding_scale": config.keys.number(embedding, 1e-6, 1e6, 1.0) / r,
        "rms_norm_eps": eps / r**2,
        "logit_scale": 1 / config.keys.number(logits, 1e-6, 1e6, 1.0),
    }
