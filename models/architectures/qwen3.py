"""Qwen3 (dense): no biases, but a norm over every query and key head before RoPE."""

from __future__ import annotations

from localllm.checkpoint.facts import ModelFacts

from .layers import LayerSpec


def layer_spec(facts: ModelFacts) -> LayerSpec:
    """Norms over heads are part of the architecture."""
    return LayerSpec(qk_norm=True, qkv_bias=facts.attention_bias, out_bias=facts.o_bias, mlp_bias=facts.mlp_bias)
