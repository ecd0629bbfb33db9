"""Qwen2 MoE (Qwen1.5-MoE A2.7B, Qwen2 57B-A14B): Qwen2's attention, small experts, and a gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from localllm.checkpoint.fields import MAX_HIDDEN

from .architecture import Architecture
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts

# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32_768, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "sliding_window": 4096,
}  # fmt: skip


class Qwen2Moe(Architecture):
    """Layers may be dense. Routing weights do not add up to 1 unless the file says so."""

    name = "qwen2_moe"
    label = "Qwen2 MoE"
    hf_types = {"qwen2_moe": DEFAULTS}
    hf_classes = ("Qwen2MoeForCausalLM",)
    gguf_types = ("qwen2moe",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, act, (rope, context) = config.keys, config.activation(), config.rope()
        if keys.flag("use_sliding_window") and config.window is not None:
            raise config.unsupported(f"{config.source} with use_sliding_window")
        experts = config.mixture(
            "num_experts", "moe_intermediate_size", act, renormalise=keys.flag("norm_topk_prob"),
            shared_inner=keys.integer("shared_expert_intermediate_size", 1, MAX_HIDDEN * 4), shared_gate=True,
        )  # fmt: skip
        sparse, dense = LayerFacts(config.attention(rope), experts), config.dense_layers()
        plain = replace(sparse, ffn=config.dense(act))
        return config.facts(tuple(plain if layer in dense else sparse for layer in range(config.num_layers)), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        inner = config.size("inner", 1, MAX_HIDDEN * 4)
        shared = config.keys.integer("expert_shared_feed_forward_length", 1, MAX_HIDDEN * 4, inner)
        experts = config.mixture(renormalise=False, shared_inner=shared, shared_gate=True)
        return config.facts((LayerFacts(config.attention(rope), experts),) * config.num_layers, context)
