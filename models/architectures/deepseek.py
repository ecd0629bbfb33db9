"""DeepSeek V2 and V3, GLM-4.7 Flash, Mistral Small 4: latent attention (MLA), dense layers, then MoE layers with a
shared expert. Youtu-LLM has only dense layers.

V2 and Mistral have a softmax router, the others a sigmoid router with a choice bias. RoPE rows are not permuted: pairs
are interleaved in both containers. The layer after the last one is an MTP head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_EXPERTS, MAX_HEAD_DIM, MAX_HIDDEN, MAX_LAYERS

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .glm4_moe import SHARED
from .hf import HfConfig
from .layers import Dense, Experts, Fusion, LayerFacts
from .mistral3 import gguf_temperature, hf_temperature
from .mixers import KimiDelta, LatentAttention, RopeFacts
from .names import CHOICE_BIAS, NameMap
from .pixtral_vision import row_vision, with_rows

GGUF_LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj.{}": "attn_k_b.{}",
    "self_attn.v_b_proj.{}": "attn_v_b.{}",
}
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
# defaults for keys that configurations may omit
LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "head_dim": 64, "v_head_dim": 128,
    "n_shared_experts": 1,
}  # fmt: skip
MISTRAL4_ROPE = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


class DeepseekV2(Architecture):
    """A softmax router, optionally with group-limited choice."""

    name = "deepseek_v2"
    label = "DeepSeek V2"
    hf_types = {
        "deepseek_v2": LATENT
        | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0}
    }
    hf_renamed = {"qk_rope_head_dim": "head_dim"}  # the rotated part of a head
    hf_classes: ClassVar[tuple[str, ...]] = ("DeepseekV2ForCausalLM",)
    gguf_types: ClassVar[tuple[str, ...]] = ("deepseek2",)
    hf_inner = SHARED
    gguf_inner = GGUF_LATENT

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = self.rope(config)
        keys, act = config.keys, config.activation()
        if keys.integer("moe_layer_freq", 1, MAX_LAYERS, 1) != 1:
            raise config.unsupported(f"{config.source} with moe_layer_freq other than 1")
        if rope.dim != config.head_dim or rope.dim % 2:
            what = f"is {config.head_dim}, with {rope.dim} elements rotated; both must be the same even number"
            raise keys.fail("qk_rope_head_dim", what)
        interleaved = keys.flag("rope_interleave", True)
        whole = config.is_null("q_lora_rank") or keys.raw("q_lora_rank") is None
        query_rank = 0 if whole else keys.integer("q_lora_rank", 1, MAX_HIDDEN)
        still_dim = keys.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM)
        attention = self.attention(
            config, replace(rope, interleaved=interleaved), keys.integer("kv_lora_rank", 2, MAX_HIDDEN),
            still_dim=still_dim,
            value_dim=keys.integer("v_head_dim", 1, MAX_HEAD_DIM),
            query_rank=query_rank,
            scale=_hf_scale(config, still_dim + rope.dim),
            temperature=hf_temperature(config, rope),
        )  # fmt: skip
        mixers, dense = self.mixers(config, attention), self.dense_layers(config)
        experts = None if all(dense) else self.experts(config, act)
        layers, predictor = self.layers(config, mixers, dense, experts, config.dense(act))
        return config.facts(layers, context, predictor=predictor)

    def attention(self, config: Config, rope: RopeFacts, rank: int, **values: Any) -> LatentAttention:
        """Latent attention with the stored biases; `rank` is the size of a latent."""
        if not config.causal:
            raise config.unsupported(f"{config.source} with bidirectional attention (an embedding model)")
        bias, o_bias = (config.stores_anywhere(f"self_attn.{name}.bias") for name in ("kv_a_proj_with_mqa", "o_proj"))
        return LatentAttention(config.num_heads, rank, rope=rope, bias=bias, o_bias=o_bias, **values)

    def mixers(self, config: HfConfig, attention: LatentAttention) -> Sequence[LatentAttention | KimiDelta]:
        """The mixer of each layer."""
        return (attention,) * config.num_layers

    def experts(self, config: HfConfig, act: str) -> Experts:
        """The experts of a layer that is not dense."""
        router, shared = self.router(config), config.keys.integer("n_shared_experts", 1, MAX_EXPERTS)
        return config.mixture("n_routed_experts", "moe_intermediate_size", act, shared=shared, **router)

    def limits(self, config: Config) -> Sequence[tuple[float | None, float | None]]:
        """The limits of routed and of shared experts, for each layer and for the MTP head."""
        return ((None, None),) * (config.num_layers + 1)

    def layers(
        self,
        config: Config,
        mixers: Sequence[LatentAttention | KimiDelta],
        dense: Sequence[bool],
        experts: Experts | None,
        plain: Dense,
    ) -> tuple[list[LayerFacts], LayerFacts]:
        """The layers, and the MTP head, which has latent attention. `experts` is None if all layers are dense."""
        limits = self.limits(config)
        limited = [replace(experts, limit=one, shared_limit=shared) if experts else plain for one, shared in limits]
        for_layer = zip(mixers, dense, limited[: config.num_layers], strict=True)
        layers = [LayerFacts(mixer, plain if is_dense else mixture) for mixer, is_dense, mixture in for_layer]
        attention = next((mixer for mixer in mixers if isinstance(mixer, LatentAttention)), None)
        return layers, LayerFacts(attention, limited[-1], fusion=Fusion())

    def rope(self, config: HfConfig) -> tuple[RopeFacts, int]:
        """The rotation of the rotated part of a head, and the context length."""
        return config.rope()

    def router(self, config: HfConfig) -> dict[str, Any]:
        """The fields of `Experts` that describe the router."""
        keys = config.keys
        method, scoring = keys.text("topk_method", "greedy"), keys.text("scoring_func", "softmax")
        if method not in ("greedy", "group_limited_greedy") or scoring != "softmax":
            raise config.unsupported(f"{config.source} with a router of type {method[:60]} over {scoring[:60]}")
        if keys.flag("norm_topk_prob"):
            raise config.unsupported(f"{config.source} with norm_topk_prob (renormalized softmax weights)")
        return config.router(groups=method != "greedy") | {"renormalise": False}

    def dense_layers(self, config: HfConfig) -> list[bool]:
        """Whether each layer is dense."""
        dense = config.keys.integer("first_k_dense_replace", 0, MAX_LAYERS)
        return [layer < dense for layer in range(config.num_layers)]

    def gguf_rope(self, config: GgufConfig) -> tuple[RopeFacts, int]:
        """As `rope`, from GGUF metadata."""
        return config.rope(interleaved=True)

    def gguf_mixers(self, config: GgufConfig, attention: LatentAttention) -> Sequence[LatentAttention | KimiDelta]:
        """As `mixers`, from GGUF metadata."""
        return (attention,) * config.num_layers

    def gguf_experts(self, config: GgufConfig, dense: int) -> Experts:
        """As `experts`, from GGUF metadata; `dense` is the number of dense layers, which come first.

        Older files do not state the kind of router: with a choice bias it is a sigmoid router.
        """
        keys = config.keys
        biased = config.names.tensor(f"model.layers.{dense}.{CHOICE_BIAS}") in config.checkpoint.tensors
        kind = keys.integer("expert_gating_func", SOFTMAX, 4, SIGMOID if biased else SOFTMAX)
        if kind not in (SOFTMAX, SIGMOID):
            raise config.unsupported(f"{config.source} with expert_gating_func {kind}")
        return config.mixture(
            grouped=True,
            router="softmax" if kind == SOFTMAX else "sigmoid",
            choice_bias=biased,
            renormalise=keys.flag("expert_weights_norm"),
            shared=keys.integer("expert_shared_count", 1, MAX_EXPERTS),
        )

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = self.gguf_rope(config)
        rope, grown = _gguf_yarn(config, rope)
        keys = config.keys
        key_dim = keys.integer("attention.key_length_mla", 2, MAX_HEAD_DIM, config.head_dim)
        if rope.dim >= key_dim or rope.dim % 2:
            what = f"must be even and less than the key size {key_dim}, not {rope.dim}"
            raise keys.fail("rope.dimension_count", what)
        value_dim = keys.integer("attention.value_length", 1, MAX_HEAD_DIM, config.head_dim)
        attention = self.attention(
            config, rope, keys.integer("attention.kv_lora_rank", 2, MAX_HIDDEN),
            still_dim=key_dim - rope.dim,
            value_dim=keys.integer("attention.value_length_mla", 1, MAX_HEAD_DIM, value_dim),
            query_rank=keys.integer("attention.q_lora_rank", 0, MAX_HIDDEN, 0),
            scale=grown**2 / math.sqrt(key_dim),
            by_head=self.stores_by_head(config),
            temperature=gguf_temperature(config, rope, context),
        )  # fmt: skip
        dense = keys.integer("leading_dense_block_count", 0, MAX_LAYERS, 0)
        mixers, first = self.gguf_mixers(config, attention), [layer < dense for layer in range(config.num_layers)]
        experts = None if all(first) else self.gguf_experts(config, dense)
        layers, predictor = self.layers(config, mixers, first, experts, config.dense())
        return config.facts(layers, context, predictor=predictor)

    def stores_by_head(self, config: GgufConfig) -> bool:
        """Whether the up projections of latents are stored per head."""
        return any(".attn_k_b." in name for name in config.checkpoint.tensors)


class DeepseekV3(DeepseekV2):
    """A sigmoid router with a choice bias; Moonlight and others have the same architecture."""

    name = "deepseek_v3"
    label = "DeepSeek V3"
    hf_types = {
        "deepseek_v3": LATENT
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8}
        | {"topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    }
    hf_classes: ClassVar[tuple[str, ...]] = ("DeepseekV3ForCausalLM",)

    def router(self, config: HfConfig) -> dict[str, Any]:
        keys = config.keys
        method, scoring = keys.text("topk_method", "noaux_tc"), keys.text("scoring_func", "sigmoid")
        if method != "noaux_tc" or scoring != "sigmoid":
            raise config.unsupported(f"{config.source} with a router of type {method[:60]} over {scoring[:60]}")
        return config.router() | {"router": "sigmoid", "choice_bias": True}


class Glm4MoeLite(DeepseekV3):
    """DeepSeek V3 without groups; the kinds of layers may be listed one by one."""

    name = "glm4_moe_lite"
    label = "GLM-4.7 Flash"
    hf_types = {
        "glm4_moe_lite": LATENT
        | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5}
        | {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.8}
    }
    hf_classes: ClassVar[tuple[str, ...]] = ("Glm4MoeLiteForCausalLM",)

    def dense_layers(self, config: HfConfig) -> list[bool]:
        kinds = config.keys.raw("mlp_layer_types")
        if kinds is None:
            return super().dense_layers(config)
        if not isinstance(kinds, list) or len(kinds) != config.num_layers:
            raise config.keys.fail("mlp_layer_types", f"must list {config.num_layers} layers")
        unknown = [str(kind) for kind in kinds if kind not in ("dense", "sparse")]
        if unknown:
            raise config.unsupported(f"{config.source} with layers of type {unknown[0][:60]}")
        return [kind == "dense" for kind in kinds]


class Youtu(DeepseekV3):
    """DeepSeek V3 with dense layers only."""

    name = "youtu"
    label = "Youtu-LLM"
    hf_types = {"youtu": LATENT | {"intermediate_size": 6144, "tie_word_embeddings": True}}
    hf_classes: ClassVar[tuple[str, ...]] = ("YoutuForCausalLM",)

    def dense_layers(self, config: HfConfig) -> list[bool]:
        return [True] * config.num_layers


class Mistral4(DeepseekV2):
    """All layers have experts; queries are scaled by position; Pixtral's tower reads images."""

    name = "mistral4"
    label = "Mistral Small 4"
    hf_types = {
        "mistral4": LATENT
        | {"vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}
        | {"num_attention_heads": 32, "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
        | {"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048}
        | {"first_k_dense_replace": 0, "norm_topk_prob": True, "max_position_embeddings": 1_048_576}
        | {"rope_parameters": MISTRAL4_ROPE}
    }
    hf_classes: ClassVar[tuple[str, ...]] = ("Mistral4ForCausalLM",)
    gguf_types = ("mistral4",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        return replace(super().from_hf(config), vision=row_vision(config))

    def rope(self, config: HfConfig) -> tuple[RopeFacts, int]:
        # `partial_rotary_factor` in its files repeats `qk_rope_head_dim` as a share of the whole head
        return config.rope_from(config.rope_values | {"partial_rotary_factor": 1.0})

    def router(self, config: HfConfig) -> dict[str, Any]:
        if config.keys.integer("n_group", 1, MAX_EXPERTS, 1) > 1:
            raise config.unsupported(f"{config.source} with expert groups")
        return config.router(groups=False)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        return with_rows(super().names(checkpoint), checkpoint)


def _hf_scale(config: HfConfig, key_dim: int) -> float:
    """The scale of q·k, increased by `mscale_all_dim` if RoPE is scaled."""
    values = config.rope_values
    stated = values.get("mscale_all_dim") or 0.0
    factor = values.get("factor") or 1.0
    if not all(type(value) in (int, float) and 0 <= value <= 1e6 for value in (stated, factor)):
        raise config.given.fail("rope_parameters.mscale_all_dim", f"is {stated!r:.60}, expected a number")
    scaled = values.get("rope_type", values.get("type", "default")) != "default"
    grown = 0.1 * stated * math.log(factor) + 1.0 if scaled and factor > 1 else 1.0
    return grown**2 / math.sqrt(key_dim)


def _gguf_yarn(config: GgufConfig, rope: RopeFacts) -> tuple[RopeFacts, float]:
    """The rotation, and the factor on keys and queries. The converter stores a tenth of `mscale_all_dim` and assumes
    that `mscale` equals it, so cosines and sines are not scaled.
    """
    stated = config.keys.optional_number("rope.scaling.yarn_log_multiplier", 0.0, 1e3)
    if not stated or rope.scaling != "yarn":
        return rope, 1.0
    stretched = math.log(max(rope.factor, 1.0))
    attention = rope.attention_factor / (0.1 * stretched + 1.0)
    return replace(rope, attention_factor=attention), stated * stretched + 1.0
