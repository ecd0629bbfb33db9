"""Granite 4 (h-micro, h-tiny, h-small, and models without Mamba layers): Mamba-2 and a few attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HEAD_DIM, MAX_HIDDEN

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .granite import ALONE, BLOCK, GGUF_SCALES, HF_SCALES, SHARED, experts_of_hf, multiplied, old_router
from .hf import HfConfig
from .layers import Dense, Experts, LayerFacts
from .mamba2 import ATTENTION, GGUF_MAMBA, MAMBA, mamba_of_gguf, mamba_of_hf, no_rope
from .mixers import Attention, Mamba2

_KEYS = {
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "num_groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "conv_width": "mamba_d_conv",
}


class GraniteHybrid(Architecture):
    """Granite's multipliers; usually no RoPE; a shared expert with the routed ones, or alone."""

    name = "granitemoehybrid"
    label = "Granite 4"
    hf_types = {
        "granitemoehybrid": {
            "max_position_embeddings": 2048, "attention_multiplier": 1.0, "shared_intermediate_size": 1024,
            "num_local_experts": 8, "num_experts_per_tok": 2, "mamba_n_heads": 128, "mamba_n_groups": 1,
            "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        }
    }  # fmt: skip
    hf_classes = ("GraniteMoeHybridForCausalLM",)
    gguf_types = ("granitehybrid",)
    hf_inner = BLOCK | SHARED | ALONE
    gguf_inner = GGUF_MAMBA

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        rope, context = no_rope(config), config.context
        if keys.text("position_embedding_type", "nope") == "rope":
            rope, context = config.rope()
        attention = config.attention(rope, scale=keys.number("attention_multiplier", 1e-6, 1e3))
        attends = [kind in ATTENTION for kind in config.layer_types(MAMBA + ATTENTION)]
        inner = keys.integer("mamba_expand", 1, 64) * config.hidden_size
        mamba = None if all(attends) else mamba_of_granite(config, inner)
        layers = _layers(config, attends, attention, mamba, _ffn_of_hf(config))
        return config.facts(layers, context, **multiplied(config, HF_SCALES))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys = config.keys
        rope, context = config.rope(interleaved=True)
        if not keys.flag("rope.scaling.finetuned", True):
            rope = no_rope(config)
        attention = config.attention(rope)
        shared = keys.integer("expert_shared_feed_forward_length", 0, MAX_HIDDEN * 4, 0)
        ffn: Dense | Experts = config.dense()
        if config.num_experts:
            ffn = config.mixture(router="softmax_topk", shared_inner=shared)
        attends = [count > 0 for count in config.each(config.KEYS["kv_heads"], 0, MAX_HEAD_DIM, 0)]
        mamba = None if all(attends) else mamba_of_gguf(config)
        return config.facts(_layers(config, attends, attention, mamba, ffn), context, **multiplied(config, GGUF_SCALES))

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        return {**super().inner_names(checkpoint), **old_router(checkpoint)}


def mamba_of_granite(config: HfConfig, inner: int, **changes: Any) -> Mamba2:
    """Read the facts; `inner` is the number of values of all heads."""
    keys, names = config.keys, dict(_KEYS)
    if keys.raw("mamba_d_head") in (None, "auto"):
        heads = keys.integer("mamba_n_heads", 1, inner)
        if inner % heads:
            raise keys.fail("mamba_n_heads", f"is {heads:,}, which does not divide {inner:,} values evenly")
        del names["head_dim"]
        changes["head_dim"] = inner // heads
    biases = {"bias": keys.flag("mamba_proj_bias"), "conv_bias": keys.flag("mamba_conv_bias", True)}
    return mamba_of_hf(config, names, inner, **biases, **changes)


def _ffn_of_hf(config: HfConfig) -> Dense | Experts:
    if config.keys.integer("num_local_experts", 0, 1 << 16) == 0:
        shared = config.keys.integer("shared_intermediate_size", 1, MAX_HIDDEN * 4)
        return Dense(shared, config.activation(), fused=True)
    return experts_of_hf(config)


def _layers(
    config: Config, attends: list[bool], attention: Attention, mamba: Mamba2 | None, ffn: Dense | Experts
) -> tuple[LayerFacts, ...]:
    if not any(attends):
        raise config.unsupported(f"{config.source} without an attention layer")
    kinds = LayerFacts(mamba, ffn), LayerFacts(attention, ffn)
    return tuple(kinds[one] for one in attends)
