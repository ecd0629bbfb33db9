"""Qwen3.5 to 3.8 (dense and MoE) and Qwen3-Next: three gated delta rule layers for each gated attention layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONV, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, Fields
from localllm.checkpoint.mapped_file import bad

from .architecture import Architecture
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Dense, Experts, Fusion, LayerFacts
from .mixers import Attention, GatedDelta, RopeFacts
from .names import NameMap, predictor_names
from .qwen_vision import grid_parts, grid_vision, hf_axes

FULL_EVERY = 4  # the last of every four layers has attention
# defaults for keys that configurations may omit
DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
GGUF_HYBRID = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}


class Qwen3_5(Architecture):
    """Attention with RoPE on a quarter of each head, query and key norms, and a gate after every query."""

    name = "qwen3_5"
    label = "Qwen3.5, 3.6 and 3.8 (dense)"
    hf_types = {"qwen3_5_text": DEFAULTS}
    hf_wrappers = dict.fromkeys(("qwen3_5", "minicpmv4_6", "minicpmv4_7", "minicpm_ocr"), "qwen3_5_text")
    hf_classes: ClassVar[tuple[str, ...]] = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    gguf_types = ("qwen35",)
    gguf_inner = GGUF_HYBRID
    grouped = False  # whether checkpoints group the projections by key head

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        keys = config.keys
        delta = GatedDelta(
            grouped=self.grouped,
            grouped_rates=self.grouped,
            num_k_heads=keys.integer("linear_num_key_heads", 1, MAX_HEADS),
            num_v_heads=keys.integer("linear_num_value_heads", 1, MAX_HEADS),
            k_dim=keys.integer("linear_key_head_dim", 2, MAX_HEAD_DIM),
            v_dim=keys.integer("linear_value_head_dim", 2, MAX_HEAD_DIM),
            conv_width=keys.integer("linear_conv_kernel_dim", 2, MAX_CONV),
        )
        check_heads(keys, "linear_num_value_heads", delta)
        attention = _attention(config, rope, biased=keys.flag("attention_bias"))
        kinds: dict[str, Attention | GatedDelta] = {"linear_attention": delta, "full_attention": attention}
        ffn = self.feed_forward(config)
        of_kind = {kind: LayerFacts(mixer, ffn) for kind, mixer in kinds.items()}
        layers = tuple(of_kind[kind] for kind in _layer_types(config))
        return config.facts(
            self.with_dense(config, layers), context, norm_offset=1.0,
            vision=grid_vision(config.tower, hf_axes(config, rope.dim // 2)),
            predictor=LayerFacts(attention, ffn, fusion=Fusion()),
        )  # fmt: skip

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        keys = config.keys
        num_v_heads = keys.integer("ssm.time_step_rank", 1, MAX_HEADS)
        inner = keys.integer("ssm.inner_size", 2, MAX_HEADS * MAX_HEAD_DIM)
        if inner % num_v_heads:
            raise keys.fail("ssm.inner_size", f"is {inner:,}, not a multiple of {num_v_heads} heads")
        delta = GatedDelta(
            grouped=self.grouped and any(name.endswith(".ssm_in.weight") for name in config.checkpoint.tensors),
            grouped_rates=self.grouped,
            num_k_heads=keys.integer("ssm.group_count", 1, MAX_HEADS),
            num_v_heads=num_v_heads,
            k_dim=keys.integer("ssm.state_size", 2, MAX_HEAD_DIM),
            v_dim=inner // num_v_heads,
            conv_width=keys.integer("ssm.conv_kernel", 2, MAX_CONV),
            tiled=not self.grouped,
            log_decay=False,
        )
        check_heads(keys, "ssm.time_step_rank", delta)
        every = keys.integer("full_attention_interval", 1, MAX_LAYERS, FULL_EVERY)
        ffn = self.feed_forward_of_gguf(config)
        kinds = [LayerFacts(mixer, ffn) for mixer in (_attention(config, rope), delta)]
        layers = tuple(kinds[(layer + 1) % every > 0] for layer in range(config.num_layers))
        return config.facts(layers, context, predictor=replace(kinds[0], fusion=Fusion()))

    def feed_forward(self, config: HfConfig) -> Dense | Experts:
        return config.dense(config.activation())

    def feed_forward_of_gguf(self, config: GgufConfig) -> Dense | Experts:
        return config.dense()

    def with_dense(self, config: HfConfig, layers: tuple[LayerFacts, ...]) -> tuple[LayerFacts, ...]:
        """The layers, with dense feed-forward layers where the file asks for them."""
        return layers

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        if checkpoint.kind == "gguf":
            return found
        text = checkpoint.config.get("text_config")
        number = (text if isinstance(text, dict) else checkpoint.config).get("num_hidden_layers")
        return replace(found, parts=grid_parts(checkpoint) | predictor_names(number))


class Qwen3_5Moe(Qwen3_5):
    """Qwen3.5 with a mixture of experts in every layer and a gated shared expert."""

    name = "qwen3_5_moe"
    label = "Qwen3.5 and 3.6 MoE"
    hf_types = {
        "qwen3_5_moe_text": DEFAULTS
        | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "intermediate_size": 512}
    }
    hf_wrappers = {"qwen3_5_moe": "qwen3_5_moe_text"}
    hf_classes: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
    gguf_types = ("qwen35moe",)

    def feed_forward(self, config: HfConfig) -> Experts:
        shared = config.keys.integer("shared_expert_intermediate_size", 1, MAX_HIDDEN * 4)
        args = "num_experts", "moe_intermediate_size", config.activation()
        return config.mixture(*args, shared_inner=shared, shared_gate=True)

    def feed_forward_of_gguf(self, config: GgufConfig) -> Experts:
        shared = config.keys.integer("expert_shared_feed_forward_length", 1, MAX_HIDDEN * 4)
        return config.mixture(shared_inner=shared, shared_gate=True)


class Qwen3Next(Qwen3_5Moe):
    """Projections are grouped by key head; newer GGUF files store queries, keys and values apart from the gates."""

    name = "qwen3_next"
    label = "Qwen3-Next"
    hf_types = {
        "qwen3_next": DEFAULTS
        | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "intermediate_size": 5632, "norm_topk_prob": True}
    }
    hf_wrappers = {}
    hf_classes: ClassVar[tuple[str, ...]] = ("Qwen3NextForCausalLM",)
    gguf_types = ("qwen3next",)
    grouped = True

    def feed_forward(self, config: HfConfig) -> Experts:
        return replace(super().feed_forward(config), renormalise=config.keys.flag("norm_topk_prob"))

    def with_dense(self, config: HfConfig, layers: tuple[LayerFacts, ...]) -> tuple[LayerFacts, ...]:
        dense = config.dense_layers()
        if not dense:
            return layers
        ffn = config.dense(config.activation())
        return tuple(replace(layer, ffn=ffn) if index in dense else layer for index, layer in enumerate(layers))


def _attention(config: HfConfig | GgufConfig, rope: RopeFacts, biased: bool = False) -> Attention:
    return config.attention(rope, qk_norm=True, gate="queries", qkv_bias=biased, o_bias=biased, fused=False)


def check_heads(keys: Fields, key: str, delta: GatedDelta) -> None:
    """Raise BadModelFile, for the value of `key`, if value heads cannot share key heads evenly."""
    if delta.num_v_heads % delta.num_k_heads:
        what = f"{delta.num_v_heads} value heads cannot share {delta.num_k_heads} key heads evenly"
        raise bad(keys.path, what, key=key)


def _layer_types(config: HfConfig) -> list[str]:
    every = config.keys.integer("full_attention_interval", 1, MAX_LAYERS, FULL_EVERY)
    kinds = "linear_attention", "full_attention"
    return config.layer_types(kinds, lambda layer: kinds[(layer + 1) % every == 0])
