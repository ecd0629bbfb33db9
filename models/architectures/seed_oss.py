"""Seed-OSS: Llama with biases on q, k and v, and a head size independent of the hidden size."""

from __future__ import annotations

from .architecture import Architecture
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts


class SeedOss(Architecture):
    """GGUF files do not permute rows, and name the second norm like Hugging Face does."""

    name = "seed_oss"
    label = "Seed-OSS"
    hf_types = {"seed_oss": {"head_dim": 128, "max_position_embeddings": 524_288, "num_key_value_heads": 8}}
    hf_classes = ("SeedOssForCausalLM",)
    gguf_types = ("seed_oss",)
    gguf_inner = {"post_attention_layernorm": "post_attention_norm"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope), config.dense(config.activation()))
        return config.facts((layer,) * config.num_layers, context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope), config.dense())
        return config.facts((layer,) * config.num_layers, context)
