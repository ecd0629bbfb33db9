"""GLM-4 (dense) and GLM-Edge: interleaved RoPE on half of each head, gate and up fused; from 0414 on four norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from .architecture import Architecture
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts, Norms

SIZES = {
    "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2,
}  # fmt: skip
NORMS = Norms(after_mixer="post_self_attn_layernorm", after_ffn="post_mlp_layernorm")
GGUF_NORMS = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
USUAL = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131_072}


class Glm(Architecture):
    """RoPE is interleaved in both containers, and rows are never permuted."""

    name = "glm"
    label = "GLM-4 9B, GLM-Edge"
    hf_types: ClassVar[Mapping[str, Mapping[str, Any]]] = {"glm": SIZES | USUAL}
    hf_classes: ClassVar[tuple[str, ...]] = ("GlmForCausalLM",)
    gguf_types: ClassVar[tuple[str, ...]] = ("chatglm",)
    gguf_inner: ClassVar[Mapping[str, str]] = {"mlp.gate_up_proj": "ffn_up"}
    norms: ClassVar[Norms] = Norms()

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        attention = config.attention(replace(rope, interleaved=True))
        layer = LayerFacts(attention, config.dense(config.activation()), self.norms)
        return config.facts((layer,) * config.num_layers, context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        if config.keys.raw("rope.dimension_sections") is not None:
            raise config.unsupported(f"{config.source} with positions in three dimensions (GLM-4V)")
        rope, context = config.rope(interleaved=True)
        layer = LayerFacts(config.attention(replace(rope, permuted=False)), config.dense(), self.norms)
        return config.facts((layer,) * config.num_layers, context)


class Glm4(Glm):
    """Blocks' outputs have norms, too."""

    name = "glm4"
    label = "GLM-4 0414 (dense)"
    hf_types: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "glm4": {"num_key_value_heads": 2} | USUAL,
        "glm4v_text": SIZES | {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5},
    }
    hf_wrappers: ClassVar[Mapping[str, str]] = {"glm4v": "glm4v_text", "glm46v": "glm4v_text"}
    hf_classes = ("Glm4ForCausalLM",)
    gguf_types = ("glm4",)
    gguf_inner = GGUF_NORMS | {"mlp.gate_up_proj": "ffn_up"}
    norms = NORMS
