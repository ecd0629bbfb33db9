"""Qwen3 MoE (30B-A3B, Coder, 235B-A22B): Qwen3's attention with many small experts."""

from __future__ import annotations

from typing import ClassVar

from localllm.checkpoint import Checkpoint

from .architecture import Architecture
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts
from .names import NameMap
from .qwen_vision import DEEP_TOWER, VL_SECTIONS, grid_vision, hf_axes, with_grid


class Qwen3Moe(Architecture):
    """Some layers may have a dense feed-forward layer instead."""

    name = "qwen3_moe"
    label = "Qwen3 MoE, Qwen3-VL MoE"
    hf_types = {
        "qwen3_moe": {
            "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "sliding_window": 4096,
            "num_key_value_heads": 4,
        },
        "qwen3_vl_moe_text": {
            "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
            "num_attention_heads": 16, "num_key_value_heads": 16, "num_local_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "norm_topk_prob": True, "max_position_embeddings": 128_000,
            "rope_theta": 500_000.0, "tie_word_embeddings": True,
        },
    }  # fmt: skip
    hf_wrappers: ClassVar[dict[str, str]] = {"qwen3_vl_moe": "qwen3_vl_moe_text"}
    hf_classes: ClassVar[tuple[str, ...]] = ("Qwen3MoeForCausalLM",)
    gguf_types: ClassVar[tuple[str, ...]] = ("qwen3moe", "qwen3vlmoe")

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        attention, act = config.attention(rope, qk_norm=True), config.activation()
        if config.keys.flag("use_sliding_window") and config.window is not None:
            raise config.unsupported(f"{config.source} with use_sliding_window")
        experts = config.mixture(
            "num_experts", "moe_intermediate_size", act, renormalise=config.keys.flag("norm_topk_prob")
        )
        dense = config.dense_layers()
        kinds = LayerFacts(attention, experts), LayerFacts(attention, config.dense(act))
        layers = tuple(kinds[layer in dense] for layer in range(config.num_layers))
        axes = hf_axes(config, rope.dim // 2, VL_SECTIONS)
        return config.facts(layers, context, vision=grid_vision(config.tower, axes, DEEP_TOWER))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        return with_grid(super().names(checkpoint), checkpoint)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope, qk_norm=True), config.mixture())
        return config.facts((layer,) * config.num_layers, context)
