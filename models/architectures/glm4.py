"""GLM-4 0414 (dense): interleaved RoPE on half of each head, four norms per layer, gate and up fused."""

from __future__ import annotations

from dataclasses import replace

from localllm.checkpoint import Checkpoint

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts, Norms
from .names import GGUF_LAYER, NameMap, gguf_names

NORMS = Norms(after_mixer="post_self_attn_layernorm", after_ffn="post_mlp_layernorm")


class Glm4(Architecture):
    """RoPE is interleaved in both containers, and rows are never permuted."""

    name = "glm4"
    label = "GLM-4 (dense)"
    hf_types = {
        "glm4": {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}
        | {"max_position_embeddings": 131_072, "num_key_value_heads": 2},
        "glm4v_text": {
            "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
        },
    }  # fmt: skip
    hf_wrappers = {"glm4v": "glm4v_text", "glm46v": "glm4v_text"}
    hf_classes = ("Glm4ForCausalLM",)
    gguf_types = ("glm4",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        attention = config.attention(replace(rope, interleaved=True))
        layer = LayerFacts(attention, config.dense(config.activation()), NORMS)
        return config.facts(repeated(layer, (None,) * config.num_layers), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        if config.keys.raw("rope.dimension_sections") is not None:
            raise config.unsupported(f"{config.source} with positions in three dimensions (GLM-4V)")
        rope, context = config.rope(interleaved=True)
        layer = LayerFacts(config.attention(replace(rope, permuted=False)), config.dense(), NORMS)
        return config.facts(repeated(layer, (None,) * config.num_layers), context)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        if checkpoint.kind != "gguf":
            return super().names(checkpoint)
        after = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
        return gguf_names(GGUF_LAYER | after | {"mlp.gate_up_proj": "ffn_up"})
