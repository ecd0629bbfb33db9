"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from localllm.checkpoint.facts import ModelFacts

from .layers import LayerSpec


def layer_spec(facts: ModelFacts) -> LayerSpec:
    """The biases are part of the architecture; configurations do not mention them."""
    return LayerSpec(qkv_bias=True, out_bias=facts.o_bias, mlp_bias=facts.mlp_bias)
