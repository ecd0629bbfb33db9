"""Kolibri 1 (78B-A3B): four norms a layer, windowed layers with RoPE, full-attention layers without, small experts.

The router chooses by logits with a bias, and weighs by the sigmoids of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HIDDEN

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .glm4 import GGUF_NORMS, NORMS
from .glm4_moe import SHARED
from .hf import HfConfig
from .layers import Experts, LayerFacts
from .mixers import RopeFacts
from .names import CHOICE_BIAS

FULL_EVERY = 5  # the last of so many layers sees all positions
# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 128_000, "hidden_size": 2560, "num_hidden_layers": 50, "num_attention_heads": 48,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 262_144, "sliding_window": 513,
    "num_local_experts": 384, "num_experts_per_tok": 6, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip


class Kolibri1(Architecture):
    """All layers have experts and a shared expert."""

    name = "kolibri1"
    label = "Kolibri 1"
    hf_types = {"kolibri1": DEFAULTS}
    hf_classes = ("Kolibri1ForCausalLM",)
    gguf_types = ("kolibri1",)
    hf_inner = SHARED
    gguf_inner = GGUF_NORMS

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        windows = config.windows(lambda layer: (layer + 1) % FULL_EVERY != 0)
        experts = config.mixture(
            "num_experts", "moe_intermediate_size", config.activation(),
            router="sigmoid_topk",
            choice_bias=True,
            renormalise=config.keys.flag("norm_topk_prob"),
            shared_inner=config.keys.integer("shared_expert_intermediate_size", 1, MAX_HIDDEN * 4),
        )  # fmt: skip
        return _facts(config, rope, context, windows, experts)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope()
        experts = config.mixture(
            router="sigmoid_topk",
            choice_bias=True,
            renormalise=keys.flag("expert_weights_norm"),
            shared_inner=keys.integer("expert_shared_feed_forward_length", 1, MAX_HIDDEN * 4),
        )
        return _facts(config, rope, context, config.windows(FULL_EVERY), experts)

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        if not any(name.endswith(".moe.router.expert_bias") for name in checkpoint.tensors):
            return super().inner_names(checkpoint)
        after = {"post_self_attn_layernorm": "post_attn_norm", "post_mlp_layernorm": "post_ffn_norm"}
        return SHARED | after | {CHOICE_BIAS: "moe.router.expert_bias"}


def _facts(
    config: Config, rope: RopeFacts, context: int, windows: tuple[int | None, ...], experts: Experts
) -> ModelFacts:
    attention = config.attention(RopeFacts(rope.theta, rope.dim, "off"), qk_norm=True)
    return config.facts(repeated(LayerFacts(attention, experts, NORMS), windows, rope), context)
