"""Ministral 3, and GGUF files of Mistral 3: Llama with queries scaled by position beyond the trained context."""

from __future__ import annotations

import math
from dataclasses import replace

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONTEXT

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts
from .mixers import RopeFacts
from .names import NameMap
from .pixtral_vision import row_vision, with_rows


class Mistral3(Architecture):
    """Text and images."""

    name = "mistral3"
    label = "Ministral 3"
    hf_types = {
        "ministral3": {
            "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34,
            "num_attention_heads": 32, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16_384, "llama_4_scaling_beta": 0.1,
            },
        }
    }  # fmt: skip
    hf_classes = ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration")
    gguf_types = ("mistral3",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        attention = config.attention(rope, temperature=hf_temperature(config, rope))
        layer = LayerFacts(attention, config.dense(config.activation()))
        windows = config.windows(lambda layer: True)
        return config.facts(repeated(layer, windows), min(context, config.context), vision=row_vision(config))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        return with_rows(super().names(checkpoint), checkpoint)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        rope = _without_mscale(rope, config.keys.optional_number("rope.scaling.yarn_log_multiplier", 0.0, 1e3))
        attention = config.attention(rope, temperature=gguf_temperature(config, rope, context))
        return config.facts(repeated(LayerFacts(attention, config.dense()), config.windows()), context)


def hf_temperature(config: HfConfig, rope: RopeFacts) -> tuple[float, int] | None:
    """`Attention.temperature` from config.json; the step is the trained context."""
    grown = config.rope_values.get("llama_4_scaling_beta") or 0.0
    if type(grown) not in (int, float) or not 0 <= grown <= 100:
        what = f"is {grown!r:.60}, expected a number from 0 to 100"
        raise config.keys.fail("rope_parameters.llama_4_scaling_beta", what)
    return (float(grown), rope.original_context) if grown and rope.original_context else None


def gguf_temperature(config: GgufConfig, rope: RopeFacts, context: int) -> tuple[float, int] | None:
    """`Attention.temperature` from GGUF metadata."""
    grown = config.keys.number("attention.temperature_scale", 0.0, 100.0, 0.0)
    every = config.keys.integer("attention.temperature_length", 1, MAX_CONTEXT, rope.original_context or context)
    return (grown, every) if grown else None


def _without_mscale(rope: RopeFacts, mscale: float | None) -> RopeFacts:
    """`rope` with the attention factor that the converter implies: it stores `mscale_all_dim`, and `mscale` is 1."""
    if not mscale or rope.scaling != "yarn":
        return rope
    return replace(
        rope, attention_factor=rope.attention_factor / (0.1 * mscale * math.log(max(rope.factor, 1.0)) + 1.0)
    )
