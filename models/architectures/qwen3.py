"""Qwen3 (dense): Qwen2 with a norm over every query and key head before RoPE; biases only if the file has them."""

from __future__ import annotations

from .hf import HfConfig
from .qwen2 import DEFAULTS, Qwen2
from .qwen_vision import DEEP_TOWER, VL_SECTIONS, grid_vision, hf_axes
from .vision import ImageFacts


class Qwen3(Qwen2):
    """The head size is independent of the hidden size."""

    name = "qwen3"
    label = "Qwen3, Qwen3-VL"
    hf_types = {
        "qwen3": DEFAULTS | {"head_dim": 128},
        "qwen3_vl_text": DEFAULTS | {"head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 500_000.0},
    }
    hf_wrappers = {"qwen3_vl": "qwen3_vl_text", "lighton_ocr": "qwen3"}
    hf_classes = ("Qwen3ForCausalLM",)
    gguf_types = ("qwen3", "qwen3vl")
    own = {"qk_norm": True}

    def vision(self, config: HfConfig, half: int) -> ImageFacts | None:
        return grid_vision(config.tower, hf_axes(config, half, VL_SECTIONS), DEEP_TOWER)
