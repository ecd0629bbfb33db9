"""MiniCPM 1, 2, 4 and 4.1: Llama whose multipliers, for muP, follow from depth and width."""

from __future__ import annotations

from typing import ClassVar

from .facts import ModelFacts
from .gguf import GgufConfig
from .granite import GGUF_SCALES, Granite, folded, multiplied
from .hf import HfConfig
from .layers import LayerFacts

# defaults for keys that configurations may omit
DEFAULTS = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
BASE = 256  # `dim_model_base` of the published models; old GGUF files state no multipliers


class MiniCpm(Granite):
    """Attention reads all tokens; MiniCPM 4.1 was also trained to skip blocks of contexts beyond 8,192 tokens."""

    name = "minicpm"
    label = "MiniCPM"
    hf_types: ClassVar = {"minicpm": DEFAULTS}
    hf_wrappers: ClassVar = {}
    hf_classes = ("MiniCPMForCausalLM",)
    gguf_types = ("minicpm",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        if keys.integer("num_experts", 0, 1 << 16, 0):
            raise config.unsupported(f"{config.source} with experts")
        rope, context = config.rope()
        layers = (LayerFacts(config.attention(rope), config.dense(config.activation())),) * config.num_layers
        depth = keys.number("scale_depth", 1e-3, 1e3, 1.0)
        divisor = config.hidden_size / keys.number("dim_model_base", 1, 1e6, 1.0)
        embedding = keys.number("scale_emb", 1e-6, 1e6, 1.0)
        return config.facts(layers, context, **folded(config, embedding, depth * config.num_layers**-0.5, divisor))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        layers = (LayerFacts(config.attention(rope), config.dense()),) * config.num_layers
        usual = 12.0, 1.4 * config.num_layers**-0.5, config.hidden_size / BASE
        return config.facts(layers, context, **multiplied(config, GGUF_SCALES, usual))
