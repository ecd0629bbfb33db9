"""Gemma 3 (text): four norms a layer, norms over heads, windowed layers with a RoPE of their own, GELU.

Scaled embeddings, soft-caps and the +1 of norm weights come from the facts.
"""

from __future__ import annotations

from localllm.checkpoint.facts import ModelFacts

from .layers import LayerSpec


def layer_spec(facts: ModelFacts) -> LayerSpec:
    """What attention and the feed-forward layer give is normed once more before it is added."""
    return LayerSpec(
        mlp_norm="pre_feedforward_layernorm",
        post_attn_norm="post_attention_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
        qk_norm=True,
        qkv_bias=facts.attention_bias,
        out_bias=facts.o_bias,
        mlp_bias=facts.mlp_bias,
    )
