"""Mellum 2 (12B-A2.5B): Qwen3's mixtures with windowed layers, whose RoPE has a base of its own."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts
from .mixers import RopeFacts

FULL_EVERY, THETA, LOCAL_THETA = 4, 500_000.0, 10_000.0
# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 98_304, "hidden_size": 2304, "intermediate_size": 7168, "num_hidden_layers": 28,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131_072,
    "num_local_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896, "sliding_window": 1024,
}  # fmt: skip
KINDS = "sparse", "dense"


class Mellum(Architecture):
    """Scaling of positions is for layers that see all of them. Layers may be dense. The MTP layer is not read."""

    name = "mellum"
    label = "Mellum 2"
    hf_types = {"mellum": DEFAULTS}
    hf_classes = ("MellumForCausalLM",)
    gguf_types = ("mellum",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, act, (rope, local_rope, context) = config.keys, config.activation(), config.ropes(THETA, LOCAL_THETA)
        experts = config.mixture(
            "num_experts", "moe_intermediate_size", act, renormalise=keys.flag("norm_topk_prob", True)
        )
        sparse, ffns = LayerFacts(config.attention(rope, qk_norm=True), experts), (experts, config.dense(act))
        layers = repeated(sparse, config.windows(lambda layer: False), local_rope)
        kinds = config.layer_types(KINDS, lambda _: KINDS[0], key="mlp_layer_types")
        each = zip(layers, kinds, strict=True)
        return config.facts([replace(layer, ffn=ffns[KINDS.index(kind)]) for layer, kind in each], context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        local_rope = RopeFacts(config.keys.number("rope.freq_base_swa", 1.0, 1e15, rope.theta), rope.dim)
        layer = LayerFacts(config.attention(rope, qk_norm=True), config.mixture())
        return config.facts(repeated(layer, config.windows(FULL_EVERY), local_rope), context)
