"""AFMoE (Trinity Nano and Mini): gated attention, four norms a layer, windowed layers with RoPE, a sigmoid router."""

from __future__ import annotations

import math
from dataclasses import replace

from localllm.checkpoint.fields import MAX_EXPERTS, MAX_LAYERS

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts, repeated
from .gemma3 import GGUF_NORMS, NORMS
from .gguf import GgufConfig
from .glm4_moe import SHARED
from .hf import HfConfig
from .layers import Dense, Experts, LayerFacts
from .mixers import RopeFacts
from .names import CHOICE_BIAS

FULL_EVERY = 4  # one of so many layers, the last of each group, sees all positions and has no RoPE
# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 200_192, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32,
    "num_attention_heads": 16, "head_dim": 128, "max_position_embeddings": 16_384, "rms_norm_eps": 1e-5,
    "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "num_dense_layers": 1,
    "num_shared_experts": 2, "sliding_window": 1024,
}  # fmt: skip


class Afmoe(Architecture):
    """The first layers are dense."""

    name = "afmoe"
    label = "AFMoE (Trinity)"
    hf_types = {"afmoe": DEFAULTS}
    hf_classes = ("AfmoeForCausalLM",)
    gguf_types = ("afmoe",)
    hf_inner = SHARED | {
        "mlp.gate": "mlp.router.gate",
        CHOICE_BIAS: "mlp.expert_bias",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    gguf_inner = GGUF_NORMS | {"self_attn.gate_proj": "attn_gate"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, act, (rope, context) = config.keys, config.activation(), config.rope()
        every = keys.integer("global_attn_every_n_layers", 1, MAX_LAYERS, FULL_EVERY)
        windows = config.windows(lambda layer: (layer + 1) % every != 0)
        experts = config.mixture(
            "num_experts", "moe_intermediate_size", act,
            router="sigmoid",
            choice_bias=True,
            scale=keys.number("route_scale", 1e-6, 1e6, 1.0),
            shared=keys.integer("num_shared_experts", 0, MAX_EXPERTS),
        )  # fmt: skip
        first = keys.integer("num_dense_layers", 0, MAX_LAYERS)
        layers = _layers(config, rope, windows, experts, config.dense(act), first)
        return config.facts(layers, context, embedding_scale=_embedding_scale(config, keys.flag("mup_enabled")))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope()
        shared = keys.integer("expert_shared_count", 0, MAX_EXPERTS, 0)
        experts = config.mixture(router="sigmoid", choice_bias=True, shared=shared)
        first = keys.integer("leading_dense_block_count", 0, MAX_LAYERS, 0)
        layers = _layers(config, rope, config.windows(FULL_EVERY), experts, config.dense(), first)
        return config.facts(layers, context, embedding_scale=_embedding_scale(config, True))


def _embedding_scale(config: Config, is_mup: bool) -> float:
    return math.sqrt(config.hidden_size) if is_mup else 1.0


def _layers(
    config: Config, rope: RopeFacts, windows: tuple[int | None, ...], experts: Experts, dense: Dense, first: int
) -> tuple[LayerFacts, ...]:
    """`first` dense layers, then mixtures; only windowed layers have RoPE."""
    attention = config.attention(RopeFacts(rope.theta, rope.dim, "off"), qk_norm=True, gate="apart", fused=False)
    layers = repeated(LayerFacts(attention, experts, NORMS), windows, rope)
    return tuple(replace(layer, ffn=dense) for layer in layers[:first]) + layers[first:]
