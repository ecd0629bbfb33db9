"""gpt-oss (20b, 120b): attention sinks, a window in every second layer, YaRN, biases, experts with a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Experts, LayerFacts

SLOPE, LIMIT = 1.702, 7.0  # defaults of swiglu_oai
DEFAULTS = {
    "num_hidden_layers": 36, "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 4,
    "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


class GptOss(Architecture):
    """The router's softmax is over the chosen experts."""

    name = "gpt_oss"
    label = "gpt-oss"
    hf_types = {"gpt_oss": DEFAULTS}
    hf_classes = ("GptOssForCausalLM",)
    gguf_types = ("gpt-oss",)
    hf_inner = {"mlp.gate": "mlp.router"}
    gguf_inner = {"post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks.weight"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        slope = config.keys.number("swiglu_alpha", 1e-3, 1e3, SLOPE)
        if abs(slope - SLOPE) > 1e-6:
            raise config.unsupported(f"{config.source} with swiglu_alpha {slope:g}")
        limit = config.keys.number("swiglu_limit", 1e-3, 1e6, LIMIT)
        experts = config.mixture("num_local_experts", "intermediate_size")
        layer = LayerFacts(config.attention(rope, sinks=True), _with_router(experts, limit))
        return config.facts(repeated(layer, config.windows(lambda layer: layer % 2 == 0)), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        # llama.cpp rounds the ends of YaRN's ramp, but the model was trained without rounding.
        attention = config.attention(replace(rope, truncate=False), sinks=True)
        layer = LayerFacts(attention, _with_router(config.mixture(), LIMIT))
        return config.facts(repeated(layer, config.windows(full_every=2)), context)


def _with_router(experts: Experts, limit: float) -> Experts:
    return replace(experts, act="swiglu_oai", router="softmax_topk", bias=True, limit=limit)
