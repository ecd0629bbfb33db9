"""GLM-4.5 to 4.7 (Air, 355B): partial RoPE, a sigmoid router with a choice bias, a shared expert. Solar Open and
dots.llm1 are alike, with RoPE on whole heads.

The layer after the last one is an MTP head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_EXPERTS, MAX_LAYERS

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Experts, Fusion, LayerFacts
from .mixers import Attention

SHARED = {f"mlp.shared_expert.{kind}_proj": f"mlp.shared_experts.{kind}_proj" for kind in ("gate", "up", "down")}

# defaults for keys that configurations may omit
DEFAULTS = {
    "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
    "num_key_value_heads": 8, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
}  # fmt: skip


class Glm4Moe(Architecture):
    """The first layers are dense."""

    name = "glm4_moe"
    label = "GLM-4.5 to 4.7, Solar Open, dots.llm1"
    hf_types = {
        "glm4_moe": DEFAULTS,
        "glm4v_moe_text": DEFAULTS
        | {"vocab_size": 151_424, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46}
        | {"num_attention_heads": 96, "max_position_embeddings": 65_536},
        "solar_open": DEFAULTS
        | {"vocab_size": 196_608, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 48}
        | {"num_attention_heads": 64, "head_dim": 128, "moe_intermediate_size": 1280, "first_k_dense_replace": 0}
        | {"max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "partial_rotary_factor": 1.0},
        "dots1": {
            "vocab_size": 152_064, "hidden_size": 4608, "intermediate_size": 10_944, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 0, "norm_topk_prob": False, "use_qk_norm": True,
            "sliding_window": 4096, "max_window_layers": 62,
        },
    }  # fmt: skip
    hf_wrappers = {"glm4v_moe": "glm4v_moe_text"}
    hf_classes = ("Glm4MoeForCausalLM", "SolarOpenForCausalLM", "Dots1ForCausalLM")
    gguf_types = ("glm4moe", "dots1")
    hf_inner = SHARED

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        values = super().hf_values(text)
        if "num_key_value_heads" in text and text["num_key_value_heads"] is None:  # as many as query heads
            values["num_key_value_heads"] = values.get("num_attention_heads")
        return values

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        keys, act = config.keys, config.activation()
        if config.model_type == "dots1" and any(config.windows(_beyond(config))):
            raise config.unsupported(f"{config.source} with windows")
        attention = config.attention(rope, qk_norm=keys.flag("use_qk_norm"))
        experts = config.mixture(
            "n_routed_experts", "moe_intermediate_size", act,
            router="sigmoid",
            choice_bias=True,
            shared=keys.integer("n_shared_experts", 1, MAX_EXPERTS),
            **config.router(),
        )  # fmt: skip
        dense = keys.integer("first_k_dense_replace", 0, MAX_LAYERS)
        layers, predictor = dense_first(config, attention, experts, dense, act)
        return config.facts(layers, context, predictor=predictor)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        keys = config.keys
        attention = config.attention(rope, qk_norm=config.stores("self_attn.q_norm.weight"))
        shared = keys.integer("expert_shared_count", 1, MAX_EXPERTS, 1)
        experts = config.mixture(router="sigmoid", choice_bias=True, shared=shared)
        dense = keys.integer("leading_dense_block_count", 0, MAX_LAYERS, 1)
        layers, predictor = dense_first(config, attention, experts, dense, "silu")
        return config.facts(layers, context, predictor=predictor)

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        if checkpoint.kind == "gguf" and checkpoint.metadata.get("general.architecture") != "dots1":
            return {"post_attention_layernorm": "post_attention_norm"}
        return super().inner_names(checkpoint)


def _beyond(config: HfConfig) -> Callable[[int], bool]:
    """Which layers have a window if the file does not list them."""
    most = config.keys.integer("max_window_layers", 0, MAX_LAYERS, config.num_layers)
    return lambda layer: layer >= most


def dense_first(
    config: Config, attention: Attention, experts: Experts, dense: int, act: str
) -> tuple[tuple[LayerFacts, ...], LayerFacts]:
    """The layers, of which the first `dense` have no experts, and that of the MTP head."""
    sparse, first = LayerFacts(attention, experts), min(dense, config.num_layers)
    plain = (LayerFacts(attention, config.dense(act)),) * first if first else ()
    return plain + (sparse,) * (config.num_layers - first), replace(sparse, fusion=Fusion())
