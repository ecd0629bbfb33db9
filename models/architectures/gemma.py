"""Gemma 1 and CodeGemma: Llama's layers with GELU, norm weights stored minus 1, and a scaled, tied embedding."""

from __future__ import annotations

import math

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts
from .mixers import RopeFacts

ACT = "gelu_tanh"


class Gemma(Architecture):
    """Full attention in every layer; the 2B model has one KV head."""

    name = "gemma"
    label = "Gemma 1, CodeGemma"
    hf_types = {
        "gemma": {"vocab_size": 256_000, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}
        | {"hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28, "max_position_embeddings": 8192}
        | {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
    }
    hf_classes = ("GemmaForCausalLM",)
    gguf_types = ("gemma",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        # The first configs say "gelu", but the models were trained with the tanh approximation.
        act = ACT if config.keys.raw("hidden_act") == "gelu" else config.activation()
        return _facts(config, rope, context, act, norm_offset=1.0)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        return _facts(config, *config.rope(), ACT)


def _facts(config: Config, rope: RopeFacts, context: int, act: str, norm_offset: float = 0.0) -> ModelFacts:
    layer = LayerFacts(config.attention(rope), config.dense(act))
    scale = math.sqrt(config.hidden_size)
    return config.facts((layer,) * config.num_layers, context, norm_offset=norm_offset, embedding_scale=scale)
