"""OLMo 2 and OLMo 3: norms only after attention and feed-forward layer, and query and key norms over all heads."""

from __future__ import annotations

from typing import ClassVar

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts, Norms
from .mixers import RopeFacts

FULL_EVERY, THETA = 4, 500_000.0  # OLMo 3: three windowed layers, then one of full attention
NORMS = Norms(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}  # in GGUF


class Olmo2(Architecture):
    """OLMo 3 adds windows; RoPE scaling applies only to full-attention layers."""

    name = "olmo2"
    label = "OLMo 2 and 3"
    hf_types = {
        "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        "olmo3": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    }
    hf_classes: ClassVar[tuple[str, ...]] = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
    gguf_types: ClassVar[tuple[str, ...]] = ("olmo2",)
    gguf_inner = AFTER

    def from_hf(self, config: HfConfig) -> ModelFacts:
        has_windows = config.model_type == "olmo3"
        rope, local_rope, context = config.ropes(THETA if has_windows else 10_000.0)
        attention = config.attention(rope, qk_norm=True, whole_norms=True)
        layer = LayerFacts(attention, config.dense(config.activation()), NORMS)
        windows = config.windows(lambda layer: (layer + 1) % FULL_EVERY != 0, enabled=has_windows)
        return config.facts(repeated(layer, windows, local_rope), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        attention = config.attention(rope, qk_norm=True, whole_norms=True)
        layer = LayerFacts(attention, config.dense(), NORMS)
        return config.facts(repeated(layer, config.windows(FULL_EVERY), RopeFacts(rope.theta, rope.dim)), context)
