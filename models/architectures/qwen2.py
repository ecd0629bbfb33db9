"""Qwen2 and Qwen2.5: Llama with biases on q, k and v where the file has them; configurations do not mention them."""

from __future__ import annotations

from typing import Any

from localllm.checkpoint.fields import MAX_LAYERS

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts


class Qwen2(Architecture):
    """Windowed layers, if any, are the last ones."""

    name = "qwen2"
    label = "Qwen2, Qwen2.5"
    hf_types = {"qwen2": {"max_window_layers": 28, "sliding_window": 4096}}
    hf_classes = ("Qwen2ForCausalLM",)
    gguf_types = ("qwen2",)
    own: dict[str, Any] = {}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope, **self.own), config.dense(config.activation()))
        first = config.keys.integer("max_window_layers", 0, MAX_LAYERS)
        enabled = config.keys.flag("use_sliding_window") and config.window is not None
        windows = config.windows(lambda layer: layer >= first, enabled=enabled)
        return config.facts(repeated(layer, windows), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope, **self.own), config.dense())
        return config.facts(repeated(layer, config.windows()), context)
