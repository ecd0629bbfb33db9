"""Llama 2 and 3.x, SmolLM2, and Mistral, whose layers may see a window only (`facts.windows`)."""

from __future__ import annotations

from localllm.checkpoint.facts import ModelFacts

from .layers import LayerSpec


def layer_spec(facts: ModelFacts) -> LayerSpec:
    """Two norms, no norm on heads; biases where the configuration asks for them."""
    return LayerSpec(qkv_bias=facts.attention_bias, out_bias=facts.o_bias, mlp_bias=facts.mlp_bias)
