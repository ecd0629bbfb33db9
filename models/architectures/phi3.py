"""Phi-3 and Phi-4: Llama with fused projections, partial RoPE, and LongRoPE."""

from __future__ import annotations

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts


class Phi3(Architecture):
    """Contexts up to the original length use LongRoPE's short factors, longer ones its long factors."""

    name = "phi3"
    label = "Phi-3 and Phi-4"
    hf_types = {"phi3": {"max_position_embeddings": 4096}}
    hf_classes = ("Phi3ForCausalLM",)
    gguf_types = ("phi3",)
    gguf_inner = {"mlp.gate_up_proj": "ffn_up"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope), config.dense(config.activation()))
        windows = [_seen(window, context) for window in config.windows(lambda layer: True)]
        return config.facts(repeated(layer, windows), context, eps=1e-5)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope), config.dense())
        return config.facts(repeated(layer, [_seen(window, context) for window in config.windows()]), context)


def _seen(window: int | None, context: int) -> int | None:
    """Drop a window that is not smaller than the context: Phi-4-mini states twice its context."""
    return None if window is None or window >= context else window
