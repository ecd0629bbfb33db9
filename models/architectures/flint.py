"""Flint (40B-A3B): attention sinks, windowed layers with RoPE, full-attention layers without, a sigmoid router.

Two dense layers come first; every other layer has small experts and a shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HIDDEN

from .facts import ModelFacts, repeated
from .hf import HfConfig
from .layers import LayerFacts
from .mixers import RopeFacts
from .qwen3_moe import Qwen3Moe

FULL_EVERY, DENSE = 4, 2  # of which the second sees all positions; the number of dense layers at the start
SINKS, PUBLISHED_SINKS = "self_attn.sinks", "self_attn.softmax_offset"
# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 150_144, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 49,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 262_144,
    "sliding_window": 513, "num_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 1024, "norm_topk_prob": True, "mlp_only_layers": list(range(DENSE)),
}  # fmt: skip


class Flint(Qwen3Moe):
    """The router has no choice bias. llama.cpp has no GGUF files of it."""

    name = "flint"
    label = "Flint"
    hf_types = {"flint": DEFAULTS}
    hf_wrappers: ClassVar[dict[str, str]] = {}
    hf_classes: ClassVar[tuple[str, ...]] = ("FlintForCausalLM",)
    gguf_types: ClassVar[tuple[str, ...]] = ()

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope_from(config.rope_values | {"partial_rotary_factor": 1.0})
        if config.window is None:
            raise config.keys.fail("sliding_window", "is 0 or null, but three of four layers are windowed")
        act, last = config.activation(), config.num_layers - 1
        windows = config.windows(lambda layer: layer >= DENSE and layer % FULL_EVERY != 1 and layer != last)
        attention = config.attention(RopeFacts(rope.theta, rope.dim, "off"), qk_norm=True, sinks=True)
        experts = config.mixture(
            "num_experts", "moe_intermediate_size", act,
            router="sigmoid",
            renormalise=config.keys.flag("norm_topk_prob"),
            shared_inner=config.keys.integer("shared_expert_intermediate_size", 1, MAX_HIDDEN * 4),
        )  # fmt: skip
        layers, plain = list(repeated(LayerFacts(attention, experts), windows, rope)), config.dense(act)
        for layer in config.dense_layers():
            layers[layer] = replace(layers[layer], ffn=plain)
        return config.facts(layers, context)

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        published = any(name.endswith(f".{PUBLISHED_SINKS}") for name in checkpoint.tensors)
        return {SINKS: PUBLISHED_SINKS} if published else {}
