"""Qwen3 (dense): Qwen2 with a norm over every query and key head before RoPE; biases only where the file has them."""

from __future__ import annotations

from .qwen2 import Qwen2


class Qwen3(Qwen2):
    """Its head size does not follow from the hidden size."""

    name = "qwen3"
    label = "Qwen3"
    hf_types = {"qwen3": {**Qwen2.hf_types["qwen2"], "head_dim": 128}}
    hf_classes = ("Qwen3ForCausalLM",)
    gguf_types = ("qwen3",)
    own = {"qk_norm": True}
