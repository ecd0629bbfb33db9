"""Ling 2.0 and Ring 2.0 (mini, flash, 1T): partial RoPE, query and key norms, a sigmoid router over groups of experts
with a choice bias, a shared expert.

The layer after the last one is an MTP head.
"""

from __future__ import annotations

from dataclasses import replace

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_EXPERTS, MAX_HIDDEN, MAX_LAYERS

from .architecture import Architecture
from .deepseek import SIGMOID
from .facts import ModelFacts
from .gguf import GgufConfig
from .glm4_moe import SHARED, dense_first
from .hf import HfConfig
from .names import CHOICE_BIAS, NameMap

# defaults for keys that configurations may omit
DEFAULTS = {
    "vocab_size": 157_184, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 600_000.0,
    "partial_rotary_factor": 0.5, "max_position_embeddings": 32_768, "num_experts": 256, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "moe_intermediate_size": 512, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


class Ling2(Architecture):
    """The first layers are dense. Ling 1.5 has the same `model_type`, but another router and no norms."""

    name = "bailing_moe_v2"
    label = "Ling 2.0"
    hf_types = {"bailing_moe": DEFAULTS, "bailing_moe_v2": DEFAULTS}
    hf_classes = ("BailingMoeV2ForCausalLM",)
    gguf_types = ("bailingmoe2",)
    hf_inner = SHARED | {
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "self_attn.o_proj": "attention.dense",
        CHOICE_BIAS: "mlp.gate.expert_bias",
        "shared_head.norm": "final_layernorm",
    }
    gguf_inner = {"shared_head.norm": "layer_output_norm"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        keys, act = config.keys, config.activation()
        if config.source == "BailingMoeForCausalLM":
            raise config.unsupported(f"{config.source} (Ling 1.5 and older)")
        if keys.text("score_function", "sigmoid") != "sigmoid":
            raise config.unsupported(f"{config.source} with score_function {keys.text('score_function')[:60]}")
        experts = config.mixture(
            "num_experts", "moe_intermediate_size", act,
            router="sigmoid",
            choice_bias=keys.flag("moe_router_enable_expert_bias", True),
            shared=keys.integer("num_shared_experts", 1, MAX_EXPERTS),
            **config.router(),
        )  # fmt: skip
        dense = keys.integer("first_k_dense_replace", 0, MAX_LAYERS)
        attention = config.attention(rope, qk_norm=keys.flag("use_qk_norm", True), fused=True)
        layers, predictor = dense_first(config, attention, experts, dense, act)
        return config.facts(layers, context, predictor=predictor)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        keys = config.keys
        kind = keys.integer("expert_gating_func", 1, 4, SIGMOID)
        if kind != SIGMOID:
            raise config.unsupported(f"{config.source} with expert_gating_func {kind}")
        dense = keys.integer("leading_dense_block_count", 0, MAX_LAYERS, 0)
        name = config.names.tensor(f"model.layers.{dense}.{CHOICE_BIAS}")
        experts = config.mixture(grouped=True, router="sigmoid", choice_bias=name in config.checkpoint.tensors)
        shared = keys.integer("expert_shared_feed_forward_length", 1, MAX_HIDDEN * 4, experts.inner)
        attention = config.attention(rope, qk_norm=config.stores("self_attn.q_norm.weight"), fused=True)
        layers, predictor = dense_first(config, attention, replace(experts, shared_inner=shared), dense, "silu")
        return config.facts(layers, context, predictor=predictor)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        if checkpoint.kind == "gguf":
            return found
        return replace(found, top={**found.top, "model.embed_tokens": "model.word_embeddings"})
