"""Kimi Linear and Ling 3.0: layers of Kimi Delta Attention (KDA) with some of latent attention (MLA) between them, and
experts as in DeepSeek V3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONV, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS

from .config import Config
from .deepseek import GGUF_LATENT, DeepseekV3, Glm4MoeLite
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Experts
from .mixers import KimiDelta, LatentAttention, RopeFacts
from .names import CHOICE_BIAS, NameMap, gguf_names, hf_names

FLASH = 42, 2560  # layers and hidden size of Ling 3.0 flash, whose last layers were trained with limits
OLD = (
    "the file lacks the limits of the experts in the last layers, so that wrong tokens occur now and then: it was "
    "converted before August 2026; download a newer one"
)
KINDS = ("linear_attention", "full_attention")
_DELTA = ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj", "f_a_proj", "f_b_proj", "g_proj", "g_a_proj", "g_b_proj")
_CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")
_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
GGUF_KIMI = GGUF_LATENT | {
    **{f"linear_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"linear_attn.{name}_conv1d": f"ssm_conv1d_{name}" for name in "qkv"},
    **{f"linear_attn.{name}_{part}_proj": f"ssm_{name}_{part}" for name in "fg" for part in "ab"},
    "linear_attn.f_proj": "ssm_f_a",
    "linear_attn.g_proj": "ssm_g_a",
    "linear_attn.b_proj": "ssm_beta",
    "linear_attn.out_proj": "attn_output",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "self_attn.gate_proj": "attn_gate",
}
# keys of both families; Ling's `head_dim` is that of its delta layers
_RENAMED = {
    "qk_rope_head_dim": "head_dim", "num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts", "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings", "moe_router_activation_func": "scoring_func",
    "score_function": "scoring_func", "num_local_experts": "n_routed_experts",
}  # fmt: skip


class KimiLinear(Glm4MoeLite):
    """No RoPE; decays and gates of the delta layers have a low rank."""

    name = "kimi_linear"
    label = "Kimi Linear"
    hf_types: ClassVar[dict[str, Mapping[str, Any]]] = {
        "kimi_linear": {
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-5,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "max_position_embeddings": 1_048_576,
            "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
        }
    }  # fmt: skip
    hf_renamed = _RENAMED
    hf_classes: ClassVar[tuple[str, ...]] = ("KimiLinearForCausalLM",)
    gguf_types: ClassVar[tuple[str, ...]] = ("kimi-linear",)

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Take the values of the delta layers out of `linear_attn_config`, which numbers layers from 1."""
        found, linear = super().hf_values(text), text.get("linear_attn_config")
        if not isinstance(linear, dict):
            return found
        names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
        names |= {"short_conv_kernel_size": "linear_conv_kernel_dim", "full_attn_layers": "full_attn_layers"}
        return found | {new: linear[key] for key, new in names.items() if key in linear}

    def rope(self, config: HfConfig) -> tuple[RopeFacts, int]:
        return RopeFacts(10_000.0, config.head_dim, "off"), config.context

    def mixers(self, config: HfConfig, attention: LatentAttention) -> list[LatentAttention | KimiDelta]:
        if not config.keys.flag("mla_use_nope", True):
            raise config.unsupported(f"{config.source} with RoPE (mla_use_nope is false)")
        full = config.layer_numbers("full_attn_layers") or range(5, config.num_layers + 1, 4)
        kinds = config.layer_types(KINDS, lambda layer: KINDS[layer + 1 in full])
        delta = self.delta(config)
        return [attention if kind == "full_attention" else delta for kind in kinds]

    def delta(self, config: HfConfig) -> KimiDelta:
        dim = config.keys.integer("linear_head_dim", 2, MAX_HEAD_DIM)
        heads = config.keys.integer("linear_num_heads", 1, MAX_HEADS)
        return _delta(config, heads, dim, "linear_conv_kernel_dim", rank=dim)

    def gguf_rope(self, config: GgufConfig) -> tuple[RopeFacts, int]:
        rope, context = super().gguf_rope(config)
        return RopeFacts(rope.theta, rope.dim, "off"), context

    def gguf_mixers(self, config: GgufConfig, attention: LatentAttention) -> list[LatentAttention | KimiDelta]:
        kept = config.each(config.KEYS["kv_heads"], 0, MAX_HEADS, 1)  # 0 in delta layers
        delta = self.gguf_delta(config)
        return [attention if heads else delta for heads in kept]

    def gguf_delta(self, config: GgufConfig) -> KimiDelta:
        dim = config.keys.integer("kda.head_dim", 2, MAX_HEAD_DIM)
        return _delta(config, config.num_heads, dim, "ssm.conv_kernel", rank=dim, log_decay=False)

    def gguf_experts(self, config: GgufConfig, dense: int) -> Experts:
        renormalise = config.keys.flag("expert_weights_norm", True)  # the converter does not write it
        return replace(super().gguf_experts(config, dense), renormalise=renormalise)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        if checkpoint.kind == "gguf":
            return gguf_names(GGUF_KIMI)
        mixture = "block_sparse_moe"
        inner = delta_names("self_attn", "o_proj") | {
            "mlp.gate": f"{mixture}.gate",
            CHOICE_BIAS: f"{mixture}.gate.e_score_correction_bias",
            **{f"mlp.experts.{{}}.{name}": f"{mixture}.experts.{{}}.{short}" for name, short in _EXPERT.items()},
            **{f"mlp.shared_expert.{name}": f"{mixture}.shared_experts.{name}" for name in _EXPERT},
        }
        if any(f".{mixture}.gate_proj." in name for name in checkpoint.tensors):  # as transformers saves dense layers
            inner |= {f"mlp.{name}": f"{mixture}.{name}" for name in _EXPERT}
        trained = {f"linear_attn.{name}": f"self_attn.forget_gate.{name}" for name in ("f_a_proj", "f_b_proj")}
        return replace(hf_names(checkpoint.tensors, inner), trained=trained)


class Ling3(KimiLinear):
    """RoPE, a gate per head of latent attention, decays with a lower bound, and clamped experts in the last layers.

    The layer after the last one is an MTP head.
    """

    name = "bailing_hybrid"
    label = "Ling 3.0"
    hf_types: ClassVar[dict[str, Mapping[str, Any]]] = {
        "bailing_hybrid": {
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "head_dim": 64, "v_head_dim": 128, "rope_theta": 6e6,
            "n_routed_experts": 512, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 768,
            "first_k_dense_replace": 2, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
            "max_position_embeddings": 262_144, "linear_head_dim": 128, "short_conv_kernel_size": 4,
            "kda_safe_gate": True, "kda_lower_bound": -5.0, "layer_group_size": 6,
        }
    }  # fmt: skip
    hf_renamed = {"head_dim": "linear_head_dim"} | _RENAMED
    hf_classes: ClassVar[tuple[str, ...]] = ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")
    gguf_types = ("bailingmoe3",)

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        # transformers' own files have `linear_head_dim` beside a `head_dim` that means something else
        stated = text.get("linear_head_dim")
        return super().hf_values(text) | ({} if stated is None else {"linear_head_dim": stated})

    def from_hf(self, config: HfConfig) -> ModelFacts:
        if config.source.startswith("BailingMoeV2"):  # Ling 2.5 and 2.6, with the same model_type
            raise config.unsupported(f"{config.source} (linear attention without a delta rule)")
        return super().from_hf(config)

    def rope(self, config: HfConfig) -> tuple[RopeFacts, int]:
        # `partial_rotary_factor` in its files repeats `qk_rope_head_dim` as a share of another head size
        return config.rope_from(config.rope_values | {"partial_rotary_factor": 1.0})

    def mixers(self, config: HfConfig, attention: LatentAttention) -> list[LatentAttention | KimiDelta]:
        for key, wanted in (("no_kda_lora", True), ("gated_attention_proj_granularity_type", "head_wise")):
            stated = config.keys.raw(key)
            if stated is not None and stated != wanted:
                raise config.unsupported(f"{config.source} with {key} {str(stated)[:60]}")
        every = config.keys.integer("layer_group_size", 1, MAX_LAYERS)
        whole = config.num_layers // every * every  # the layers of an incomplete last group have latent attention
        kinds = config.layer_types(KINDS, lambda layer: KINDS[(layer + 1) % every == 0 or layer >= whole])
        delta = self.delta(config)
        return [attention if kind == "full_attention" else delta for kind in kinds]

    def delta(self, config: HfConfig) -> KimiDelta:
        keys = config.keys
        dim = keys.integer("linear_head_dim", 2, MAX_HEAD_DIM)
        floor = keys.number("kda_lower_bound", -100.0, -1e-3) if keys.flag("kda_safe_gate") else None
        return _delta(config, config.num_heads, dim, "short_conv_kernel_size", floor=floor)

    def attention(self, config: Config, rope: RopeFacts, rank: int, **values: Any) -> LatentAttention:
        return replace(super().attention(config, rope, rank, **values), gated=True)

    def experts(self, config: HfConfig, act: str) -> Experts:
        found, keys = super().experts(config, act), config.keys
        inner = keys.integer("moe_shared_expert_intermediate_size", 1, MAX_HIDDEN * 4, found.inner)
        return replace(found, shared_inner=inner * keys.integer("n_shared_experts", 1, MAX_EXPERTS))

    def limits(self, config: Config) -> list[tuple[float | None, float | None]]:
        keys = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
        if isinstance(config, GgufConfig):
            keys = "swiglu_clamp_exp", "swiglu_clamp_shexp"
        return list(zip(*(limits_of(config, key) for key in keys), strict=True))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        facts = super().from_gguf(config)
        limited = config.keys.raw("swiglu_clamp_exp") is not None
        return facts if limited or (config.num_layers, config.hidden_size) != FLASH else replace(facts, flaw=OLD)

    def gguf_rope(self, config: GgufConfig) -> tuple[RopeFacts, int]:
        return DeepseekV3.gguf_rope(self, config)

    def gguf_delta(self, config: GgufConfig) -> KimiDelta:
        keys = config.keys
        if not keys.flag("kda.safe_gate", True):
            raise config.unsupported(f"{config.source} with decays without a lower bound")
        floor = keys.number("kda.gate_lower_bound", -100.0, -1e-3)
        return replace(super().gguf_delta(config), rank=0, floor=floor)

    def gguf_experts(self, config: GgufConfig, dense: int) -> Experts:
        found, keys = super().gguf_experts(config, dense), config.keys
        inner = keys.integer("expert_shared_feed_forward_length", 0, MAX_HIDDEN * 4, 0) or found.inner
        return replace(found, shared_inner=inner * keys.integer("expert_shared_count", 1, MAX_EXPERTS))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        if checkpoint.kind == "gguf":
            return gguf_names(GGUF_KIMI | {"shared_head.norm": "layer_output_norm"})
        tensors = checkpoint.tensors
        apart = any(name.endswith(".attention.o_proj.weight") for name in tensors)
        own = ("q_a_proj", "q_a_layernorm", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
        inner = delta_names("attention", "o_proj" if apart else "dense") | {
            **{f"self_attn.{name}": f"attention.{name}" for name in own},
            "self_attn.o_proj": "attention.dense",
            "self_attn.gate_proj": "attention.g_proj",
            CHOICE_BIAS: "mlp.gate.expert_bias",
            **{f"mlp.shared_expert.{name}": f"mlp.shared_experts.{name}" for name in _EXPERT},
            "shared_head.norm": "final_layernorm",
        }
        trained = {f"linear_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkvbg"}
        trained |= {"linear_attn.f_proj": "self_attn.forget_gate.f_proj", "linear_attn.out_proj": "self_attn.o_proj"}
        trained["self_attn.gate_proj"] = "self_attn.g_proj"
        found = hf_names(tensors, inner)
        return replace(found, top={**found.top, "model.embed_tokens": "model.word_embeddings"}, trained=trained)


def _delta(config: Config, heads: int, dim: int, width: str, **values: Any) -> KimiDelta:
    """The delta layers; `width` is the key of the convolutions' kernel size."""
    return KimiDelta(heads, heads, dim, dim, config.keys.integer(width, 2, MAX_CONV), **values)


def delta_names(start: str, output: str) -> dict[str, str]:
    """The modules of a delta layer -> their names below `start`, the last one `output`."""
    names = {f"linear_attn.{name}": f"{start}.{name}" for name in (*_DELTA, *_CONVS, "A_log", "dt_bias")}
    return names | {"linear_attn.norm": f"{start}.o_norm", "linear_attn.out_proj": f"{start}.{output}"}


def limits_of(config: Config, key: str) -> list[float | None]:
    """A limit for each layer and for the MTP head; None where the file has none, null or 0."""
    count, values = config.num_layers + 1, config.keys.raw(key)
    listed = [] if values is None else [values] * count if type(values) in (int, float) else values
    listed = listed.tolist() if isinstance(listed, np.ndarray) else listed
    if not isinstance(listed, list) or not all(value is None or _is_limit(value) for value in listed):
        raise config.keys.fail(key, "must list a limit of at least 0 for each layer")
    return [value or None for value in (listed + [None] * count)[:count]]


def _is_limit(value: Any) -> bool:
    return type(value) in (int, float) and 0.0 <= value <= 1e6
