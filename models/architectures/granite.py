"""Granite 3, dense and MoE: Llama with multipliers on embedding, scores, residual stream and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HIDDEN

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Dense, Experts, LayerFacts, Norms

# names of the experts in checkpoints
BLOCK = {"mlp.gate": "block_sparse_moe.router"} | {
    f"mlp.experts.{{}}.{kind}_proj": f"block_sparse_moe.experts.{{}}.{kind}_proj" for kind in ("gate", "up", "down")
}
# keys of the multipliers of embedding and residual stream, and of the divisor of the logits
HF_SCALES = "embedding_multiplier", "residual_multiplier", "logits_scaling"
GGUF_SCALES = "embedding_scale", "residual_scale", "logit_scale"
# defaults for keys that configurations may omit
DEFAULTS = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "attention_multiplier": 1.0,
}  # fmt: skip
DOCLING = {
    "vocab_size": 133_800, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
    "attention_multiplier": 1 / 64, "embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.263,
    "tie_word_embeddings": True,
}  # fmt: skip
HF_MOE = {
    "max_position_embeddings": 2048,
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_LINEARS = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}
SHARED = {f"mlp.shared_expert.{ours}": f"shared_mlp.{theirs}" for ours, theirs in _LINEARS.items()}
ALONE = {f"mlp.{ours}": f"shared_mlp.{theirs}" for ours, theirs in _LINEARS.items()}  # where no expert is routed to


class Granite(Architecture):
    """Block outputs are multiplied by a constant before they are added."""

    name = "granite"
    label = "Granite 3 (dense)"
    hf_types = {"granite": DEFAULTS, "granite4_vision_text": DEFAULTS, "granite_docling_text": DOCLING}
    hf_wrappers: ClassVar[Mapping[str, str]] = {
        "granite4_vision": "granite4_vision_text",
        "granite_docling": "granite_docling_text",
    }
    hf_classes: ClassVar[tuple[str, ...]] = ("GraniteForCausalLM",)
    gguf_types: ClassVar[tuple[str, ...]] = ("granite",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        attention = config.attention(rope, scale=config.keys.number("attention_multiplier", 1e-6, 1e3))
        layers = (LayerFacts(attention, self.ffn_from_hf(config)),) * config.num_layers
        return config.facts(layers, context, **multiplied(config, HF_SCALES))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        layers = (LayerFacts(config.attention(rope), self.ffn_from_gguf(config)),) * config.num_layers
        return config.facts(layers, context, **multiplied(config, GGUF_SCALES))

    def ffn_from_hf(self, config: HfConfig) -> Dense | Experts:
        return config.dense(config.activation())

    def ffn_from_gguf(self, config: GgufConfig) -> Dense | Experts:
        return config.dense()


class HyperClovaX(Granite):
    """Blocks' outputs have norms, whose epsilon the residual multiplier does not change; logits are multiplied."""

    name = "hyperclovax"
    label = "HyperCLOVA X SEED Think"
    hf_types = {"hyperclovax": {key: value for key, value in DEFAULTS.items() if key != "attention_multiplier"}}
    hf_wrappers = {}
    hf_classes = ("HyperCLOVAXForCausalLM",)
    gguf_types = ()

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        attention = config.attention(rope)
        scale = config.keys.number("attention_multiplier", 1e-6, 1e3, attention.head_dim**-0.5)
        scales = multiplied(config, HF_SCALES)
        norms = Norms()
        if config.keys.flag("use_post_norm", True):
            eps = scales["rms_norm_eps"] * scales["residual_scale"] ** 2
            norms = Norms(after_mixer="post_norm1", after_ffn="post_norm2", after_eps=eps)
        layer = LayerFacts(replace(attention, scale=scale), self.ffn_from_hf(config), norms)
        layers = (layer,) * config.num_layers
        return config.facts(layers, context, **scales | {"logit_scale": 1 / scales["logit_scale"]})


class GraniteMoe(Granite):
    """The router's softmax is over the chosen experts. A shared expert is optional."""

    name = "granitemoe"
    label = "Granite 3 MoE"
    hf_types = {"granitemoe": HF_MOE, "granitemoeshared": HF_MOE}
    hf_wrappers = {}
    hf_classes = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
    gguf_types = ("granitemoe",)
    hf_inner = BLOCK | SHARED

    def ffn_from_hf(self, config: HfConfig) -> Experts:
        return experts_of_hf(config)

    def ffn_from_gguf(self, config: GgufConfig) -> Experts:
        shared = config.keys.integer("expert_shared_feed_forward_length", 0, MAX_HIDDEN * 4, 0)
        return config.mixture(router="softmax_topk", shared_inner=shared)

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        return {**super().inner_names(checkpoint), **old_router(checkpoint)}


def experts_of_hf(config: HfConfig) -> Experts:
    """A mixture, with a shared expert where the file states its size."""
    shared = config.keys.integer("shared_intermediate_size", 0, MAX_HIDDEN * 4, 0)
    given = "num_local_experts", "intermediate_size", config.activation()
    return config.mixture(*given, router="softmax_topk", shared_inner=shared, shared_fused=True)


def old_router(checkpoint: Checkpoint) -> dict[str, str]:
    """The router's name in older safetensors, which wrap it; {} in others."""
    name = "block_sparse_moe.router.layer"
    return {"mlp.gate": name} if any(one.endswith(f"{name}.weight") for one in checkpoint.tensors) else {}


def multiplied(
    config: Config, names: tuple[str, str, str], defaults: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> dict[str, Any]:
    """The multipliers as fields of `ModelFacts`; `names` are their keys."""
    lowest = 1e-6, 1e-3, 1e-6
    stated = zip(names, lowest, (1e6, 1e3, 1e6), defaults, strict=True)
    return folded(config, *(config.keys.number(*one) for one in stated))


def folded(config: Config, embedding: float, residual: float, divisor: float) -> dict[str, Any]:
    """Multipliers of embedding and residual stream, and the divisor of the logits, as fields of `ModelFacts`.

    A residual multiplier r is folded away: x + r · f(norm(x)) is r times y + f(norm(y)) with y = x / r, because norms
    ignore the scale of their input once epsilon is divided by r².
    """
    eps = config.keys.number(config.KEYS["eps"], 1e-12, 0.1, config.DEFAULT_EPS)
    return {
        "embedding_scale": embedding / residual,
        "rms_norm_eps": eps / residual**2,
        "residual_scale": residual,
        "logit_scale": 1 / divisor,
    }
