"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, if the file has them; configurations do not mention them."""

from __future__ import annotations

from typing import Any, ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_LAYERS

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts
from .names import NameMap
from .qwen_vision import GATED_SECTIONS, GATED_TOWER, grid_vision, hf_axes, with_grid
from .vision import ImageFacts

# defaults for keys that configurations may omit
DEFAULTS = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 32_768, "max_window_layers": 28, "sliding_window": 4096,
}  # fmt: skip
VL = {
    "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0, "max_window_layers": 80, "sliding_window": 4096,
}  # fmt: skip


class Qwen2(Architecture):
    """Windowed layers, if any, are the last ones."""

    name = "qwen2"
    label = "Qwen2, Qwen2.5, Qwen2.5-VL"
    hf_types = {"qwen2": DEFAULTS, "qwen2_vl_text": VL, "qwen2_5_vl_text": VL}
    hf_wrappers = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"} | dict.fromkeys(
        ("internvl", "llava_onevision", "got_ocr2", "fast_vlm", "ovis2", "video_llama_3", "qwen2_audio"), "qwen2"
    )
    hf_classes = ("Qwen2ForCausalLM",)
    # in text, the three positions of M-RoPE are equal; the last name is Ollama's
    gguf_types: ClassVar[tuple[str, ...]] = ("qwen2", "qwen2vl", "qwen25vl")
    own: dict[str, Any] = {}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope, **self.own), config.dense(config.activation()))
        first = config.keys.integer("max_window_layers", 0, MAX_LAYERS)
        enabled = config.keys.flag("use_sliding_window") and config.window is not None
        windows = config.windows(lambda layer: layer >= first, enabled=enabled)
        return config.facts(repeated(layer, windows), context, vision=self.vision(config, rope.dim // 2))

    def vision(self, config: HfConfig, half: int) -> ImageFacts | None:
        """The vision tower, if the model has a supported one; `half` is the number of rotated pairs of a head."""
        if config.model_type != "qwen2_5_vl_text":
            return None
        axes = hf_axes(config, half, GATED_SECTIONS, in_turn=False)
        return grid_vision(config.tower, axes, GATED_TOWER, gated=True)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        return with_grid(super().names(checkpoint), checkpoint)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope, **self.own), config.dense())
        return config.facts(repeated(layer, config.windows()), context)
