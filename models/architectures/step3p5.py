"""Step 3.5 and 3.7 Flash (196B-A11B): attention with a gate per head, a sigmoid router with a choice bias, a shared
expert, and limits on the activations of the last layers.

Windowed layers have RoPE and a number of query heads of their own. The layers after the last one are MTP heads, which
are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, Fields

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .glm4_moe import SHARED
from .hf import HfConfig, below, object_of
from .kimi_linear import limits_of
from .layers import Experts, LayerFacts
from .mixers import RopeFacts
from .names import CHOICE_BIAS

THETA = 10_000.0
# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 128_815, "hidden_size": 4096, "intermediate_size": 11_264, "num_hidden_layers": 45,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5, "num_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
    "shared_expert_intermediate_size": 1280,
}  # fmt: skip
KINDS = "sparse", "dense"
DENSE = 3  # layers without experts at the start
GATE = "self_attn.gate_proj"
_MOE = {f"mlp.experts.{{}}.{kind}_proj": f"moe.experts.{{}}.{kind}_proj" for kind in ("gate", "up", "down")}
_MOE |= {f"mlp.shared_expert.{kind}_proj": f"share_expert.{kind}_proj" for kind in ("gate", "up", "down")}
_MOE |= {"mlp.gate": "moe.gate", CHOICE_BIAS: "moe.router_bias"}
_RENAMED = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "num_experts", "n_routed_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok", "share_expert_dims": "shared_expert_intermediate_size",
    "share_expert_dim": "shared_expert_intermediate_size",
}  # fmt: skip
_OF_LAYERS: tuple[str, ...] = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")
_OF_LAYERS += ("rope_theta", "partial_rotary_factors")


class Step3p5(Architecture):
    """Lists in published files also cover the MTP heads."""

    name = "step3p5"
    label = "Step 3.5 and 3.7 Flash (text)"
    hf_types = {"step3p5": DEFAULTS}
    hf_renamed = _RENAMED
    hf_wrappers = {"step3p7": "step3p5"}
    hf_classes = ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")
    gguf_types = ("step35",)
    gguf_inner = {GATE: "attn_gate"}

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        values = super().hf_values(text)
        count = values.get("num_hidden_layers", DEFAULTS["num_hidden_layers"])
        for key in _OF_LAYERS:
            if isinstance(values.get(key), list) and type(count) is int:
                values[key] = values[key][:count]
        types, stated = values.get("layer_types"), values.get("rope_parameters")
        if not isinstance(stated, dict) or not any(isinstance(one, dict) for one in stated.values()):
            scaling = values.pop("rope_scaling", None) or stated
            thetas, shares = values.pop("rope_theta", None), values.get("partial_rotary_factors")
            kinds = types if isinstance(types, list) else ["full_attention"]
            values["rope_parameters"] = _nested(kinds, thetas, shares, scaling)
        return values

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        rope, local_rope, context = config.ropes(THETA, THETA)
        for key in ("attention_bias", "use_bidirectional_attention"):
            if keys.flag(key):
                raise config.unsupported(f"{config.source} with {key}")
        if not keys.flag("use_head_wise_attn_gate", True):
            raise config.unsupported(f"{config.source} without gates")
        windowed = below(keys, "attention_other_setting")
        if windowed.integer("num_attention_groups", 1, MAX_HEADS, config.num_kv_heads) != config.num_kv_heads:
            raise config.unsupported(f"{config.source} with other KV heads in windowed layers")
        scale = keys.number("query_pre_attn_scalar", 1e-3, 1e6, float(config.head_dim)) ** -0.5
        experts = config.mixture(
            "num_experts", "moe_intermediate_size",
            router="sigmoid",
            choice_bias=True,
            renormalise=keys.flag("norm_expert_weight", True),
            scale=keys.number("moe_router_scaling_factor", 1e-6, 1e6, 1.0),
            shared_inner=keys.integer("shared_expert_intermediate_size", 1, MAX_HIDDEN * 4),
        )  # fmt: skip
        windows = config.windows(lambda layer: False)
        return _facts(
            config, (rope, local_rope), context, windows, _heads(config, windowed, windows), _sparse(config), experts,
            (limits_of(config, "swiglu_limits"), limits_of(config, "swiglu_limits_shared")), scale=scale,
        )  # fmt: skip

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope()
        local_rope = RopeFacts(keys.number("rope.freq_base_swa", 1.0, 1e15, rope.theta), rope.dim)
        # the file states the rotated elements of windowed layers; others rotate half as many
        rope, turned = replace(rope, dim=rope.dim // 2), rope
        if turned.factors_tensor is not None:  # Llama 3's, for whole heads
            factors = config.numbers(turned.factors_tensor)[: rope.dim // 2]
            rope = config.longrope(RopeFacts(rope.theta, rope.dim), {"short": factors, "long": factors}, 1.0)
        shared = keys.integer("expert_shared_feed_forward_length", 1, MAX_HIDDEN * 4)
        experts = config.mixture(router="sigmoid", choice_bias=True, shared_inner=shared)
        heads = config.each(config.KEYS["heads"], 1, MAX_HEADS, config.num_heads)
        first = keys.integer("leading_dense_block_count", 0, MAX_LAYERS, 0)
        return _facts(
            config, (rope, local_rope), context, config.windows(), heads,
            [layer >= first for layer in range(config.num_layers)], experts,
            (limits_of(config, "swiglu_clamp_exp"), limits_of(config, "swiglu_clamp_shexp")),
        )  # fmt: skip

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        if checkpoint.kind == "gguf":
            return super().inner_names(checkpoint)
        own = _MOE if any(".moe." in name for name in checkpoint.tensors) else SHARED
        return own | {GATE: "self_attn.g_proj"}


def _nested(types: Sequence[Any], thetas: Any, shares: Any, scaling: Any) -> dict[str, Any]:
    """Rotations by kind of layer from values per layer; `scaling` is that of full attention."""
    found: dict[str, Any] = {}
    for layer, kind in enumerate(types):
        if kind in found or not isinstance(kind, str):
            continue
        found[kind] = {}
        for key, each in (("rope_theta", thetas), ("partial_rotary_factor", shares)):
            value = each[layer] if isinstance(each, list) and layer < len(each) else each
            found[kind] |= {} if value is None or isinstance(value, list) else {key: value}
        if isinstance(scaling, dict) and kind == "full_attention":
            found[kind] |= scaling
    return found


def _heads(config: HfConfig, windowed: Fields, windows: Sequence[int | None]) -> list[int]:
    """Query heads of each layer."""
    keys, own = config.keys, below(config.keys, "per_layer_config")
    if keys.raw("per_layer_config") is not None:  # as transformers saves it
        layers = [str(layer) for layer in range(config.num_layers)]
        for key, value in (pair for layer in layers for pair in object_of(own, layer).items()):
            if key != "num_attention_heads" and value != keys.raw(key):
                raise config.unsupported(f"{config.source} with another {key[:60]} in some layers")
        each = (below(own, layer) for layer in layers)
        return [of_layer.integer("num_attention_heads", 1, MAX_HEADS, config.num_heads) for of_layer in each]
    count = windowed.integer("num_attention_heads", 1, MAX_HEADS, config.num_heads)
    count = keys.integer("num_sliding_attention_heads", 1, MAX_HEADS, count)
    return [count if window else config.num_heads for window in windows]


def _sparse(config: HfConfig) -> list[bool]:
    """Which layers have experts."""
    listed = config.keys.raw("moe_layers_enum")
    if listed is None or config.keys.raw("mlp_layer_types") is not None:
        kinds = config.layer_types(KINDS, lambda layer: KINDS[layer < DENSE], key="mlp_layer_types")
        return [kind == "sparse" for kind in kinds]
    numbers = listed.split(",") if isinstance(listed, str) else listed
    numbers = [text for number in numbers if (text := str(number).strip())] if isinstance(numbers, list) else [""]
    if not all(number.isdecimal() for number in numbers):
        raise config.keys.fail("moe_layers_enum", "must list layer numbers")
    chosen = {int(number) for number in numbers}
    return [layer in chosen for layer in range(config.num_layers)]


def _facts(
    config: Config, ropes: tuple[RopeFacts, RopeFacts], context: int, windows: Sequence[int | None],
    heads: Sequence[int], sparse: Sequence[bool], experts: Experts, limits: tuple[Sequence[float | None], ...],
    **scale: float,
) -> ModelFacts:  # fmt: skip
    """`ropes`: of layers that see all positions, and of windowed ones; `limits`: of routed and of shared experts."""
    for count in heads:
        config.check_heads(count, config.num_kv_heads)
    options = {"qk_norm": True, "gate": "heads", "fused": False, **scale}
    mixers = {one: config.attention(ropes[one is not None], window=one, **options) for one in set(windows)}
    dense, layers = None if all(sparse) else config.dense(), []
    each = zip(windows, heads, sparse, *(one[: config.num_layers] for one in limits), strict=True)
    for window, count, has_experts, limit, shared_limit in each:
        if not has_experts and shared_limit is not None:
            raise config.unsupported(f"{config.source} with limits in dense layers")
        ffn = replace(experts, limit=limit, shared_limit=shared_limit) if has_experts else dense
        layers.append(LayerFacts(replace(mixers[window], num_heads=count), ffn))
    offset = 0.0 if isinstance(config, GgufConfig) else 1.0
    return config.facts(layers, context, norm_offset=offset)
