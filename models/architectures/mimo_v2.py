"""MiMo-V2 Flash, V2.5 and V2.6 Flash (309B-A15B): values shorter than keys, windowed layers with sinks and more KV
heads than the others, a rotation of a third of each head, a sigmoid router with a choice bias.

The first of the MTP heads after the last layer is used: a windowed layer without experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONTEXT, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS
from localllm.checkpoint.shards import NUM_LAYERS, SIZES, is_windowed

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Experts, Fusion, LayerFacts
from .mixers import RopeFacts
from .names import NameMap

THETA, LOCAL_THETA = 5_000_000.0, 10_000.0
SINKS, PUBLISHED_SINKS = "self_attn.sinks", "self_attn.attention_sink_bias"
# What configurations may leave out.
DEFAULTS = SIZES | {
    "vocab_size": 152_576, "hidden_size": 4096, "intermediate_size": 16_384, "moe_intermediate_size": 2048,
    "num_hidden_layers": NUM_LAYERS, "n_routed_experts": 256, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072, "sliding_window": 129, "attention_value_scale": 0.707,
    "partial_rotary_factor": 0.334,
}  # fmt: skip
# modules of an MTP head with other names
_HEAD = {"post_attention_layernorm": "pre_mlp_layernorm", "shared_head.norm": "final_layernorm", SINKS: PUBLISHED_SINKS}
KINDS = ("full_attention", "sliding_attention"), ("dense", "sparse")
_LISTS = {"hybrid_layer_pattern": "layer_types", "moe_layer_freq": "mlp_layer_types"}  # of 0 and 1 -> names of kinds


class MimoV2(Architecture):
    """Published files and GGUF state how many tokens a windowed layer sees before a token, which also sees itself."""

    name = "mimo_v2"
    label = "MiMo-V2 Flash, V2.5 and V2.6 Flash (text)"
    hf_types = {"mimo_v2_flash": DEFAULTS, "mimo_v2": DEFAULTS}
    hf_renamed = {"layernorm_epsilon": "rms_norm_eps", "swa_rope_theta": "rope_local_base_freq"}
    hf_classes = ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM")
    gguf_types = ("mimo2",)
    gguf_inner = {SINKS: "attn_sinks.weight"}

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        values = super().hf_values(text)
        for (old, new), kinds in zip(_LISTS.items(), KINDS, strict=True):
            listed = values.get(old)
            if isinstance(listed, list) and all(type(item) is int and item in (0, 1) for item in listed):
                del values[old]
                if values.get(new) is None:
                    values[new] = [kinds[item] for item in listed]
        return values

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        _check(config)
        rope, local_rope, context = config.ropes(THETA, LOCAL_THETA)
        experts = config.mixture(
            "n_routed_experts", "moe_intermediate_size", config.activation(),
            router="sigmoid",
            choice_bias=True,
            **config.router(),
        )  # fmt: skip
        values = keys.integer("v_head_dim", 1, config.head_dim)
        if keys.integer("swa_v_head_dim", 1, MAX_HEAD_DIM, values) != values:
            raise config.unsupported(f"{config.source} with other values in windowed layers")
        kinds = config.layer_types(KINDS[0], lambda layer: KINDS[0][is_windowed(layer)])
        sparse = config.layer_types(KINDS[1], lambda layer: KINDS[1][layer > 0], key="mlp_layer_types")
        if keys.raw("sliding_window_size") is None:
            window = keys.integer("sliding_window", 1, MAX_CONTEXT)
        else:
            window = keys.integer("sliding_window_size", 1, MAX_CONTEXT) + 1
        windowed = [kind == KINDS[0][1] for kind in kinds]
        heads = keys.integer("swa_num_key_value_heads", 1, MAX_HEADS, 2 * config.num_kv_heads)
        scale = 1.0 if config.is_null("attention_value_scale") else keys.number("attention_value_scale", 1e-6, 1e6)
        return _facts(
            config, (rope, local_rope), context, [window if one else None for one in windowed],
            [heads if one else config.num_kv_heads for one in windowed], [kind == KINDS[1][1] for kind in sparse],
            experts, values, scale,
        )  # fmt: skip

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope()
        local_rope = RopeFacts(keys.number("rope.freq_base_swa", 1.0, 1e15, LOCAL_THETA), rope.dim)
        windows = [None if window is None else window + 1 for window in config.windows()]
        values = keys.integer("attention.value_length", 1, config.head_dim, config.head_dim)
        scale = keys.number("attention.value_scale", 1e-6, 1e6, 1.0)
        routers = (config.names.source(f"model.layers.{layer}.mlp.gate") for layer in range(config.num_layers))
        sparse = [f"{router}.weight" in config.checkpoint.tensors for router in routers]
        heads = config.each(config.KEYS["kv_heads"], 1, MAX_HEADS, config.num_kv_heads)
        experts = config.mixture(router="sigmoid", choice_bias=True)
        return _facts(config, (rope, local_rope), context, windows, heads, sparse, experts, values, scale)

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        published = any(name.endswith(f".{PUBLISHED_SINKS}") for name in checkpoint.tensors)
        return {SINKS: PUBLISHED_SINKS} if published else super().inner_names(checkpoint)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        if checkpoint.kind == "gguf":
            return found
        start = found.top["model.norm"].removesuffix("norm")
        parts = ("embed_tokens.", "layers.", "norm.")  # not the MTP heads
        number, head = checkpoint.config.get("num_hidden_layers", NUM_LAYERS), f"{start}mtp.layers.0."
        names = {f"model.layers.{number}.{ours}": head + theirs for ours, theirs in (*_HEAD.items(), ("", ""))}
        return replace(found, parts=names, text=(*(start + part for part in parts), f"{found.top['lm_head']}."))


def _check(config: HfConfig) -> None:
    """Raise for what is not supported, as `from_hf` does."""
    keys, layers = config.keys, range(config.num_layers)
    starts = tuple(f"{config.names.source(f'model.layers.{layer}.self_attn.qkv_proj')}." for layer in layers)
    fused = (name for name in config.checkpoint.tensors if ".qkv_proj." in name)
    if any(name.startswith(starts) for name in fused):  # `checkpoint.shards` could not take it apart
        raise config.unsupported(f"{config.source} with fused QKV in this layout")
    for key in _LISTS:
        if keys.raw(key) is not None:
            raise keys.fail(key, "must list 0 or 1 for each layer")
    method, scoring = keys.text("topk_method", "noaux_tc"), keys.text("scoring_func", "sigmoid")
    if method != "noaux_tc" or scoring != "sigmoid":
        raise config.unsupported(f"{config.source} with a router of type {method[:60]} over {scoring[:60]}")
    for key, own in (("swa_head_dim", config.head_dim), ("swa_num_attention_heads", config.num_heads)):
        if keys.integer(key, 1, MAX_HEADS * MAX_HEAD_DIM, own) != own:
            raise config.unsupported(f"{config.source} with other query heads in windowed layers")
    if keys.integer("n_shared_experts", 0, MAX_EXPERTS, 0):
        raise config.unsupported(f"{config.source} with shared experts")
    for kind, wanted in (("full", False), ("swa", True)):
        if keys.flag(f"add_{kind}_attention_sink_bias", wanted) != wanted:
            raise config.unsupported(f"{config.source} with sinks in other layers than the windowed ones")


def _facts(
    config: Config, ropes: tuple[RopeFacts, RopeFacts], context: int, windows: Sequence[int | None],
    kv_heads: Sequence[int], sparse: Sequence[bool], experts: Experts, values: int, scale: float,
) -> ModelFacts:  # fmt: skip
    """`ropes`: of layers that see all positions, and of windowed ones; `values`: elements of a value head."""
    options = {"value_dim": 0 if values == config.head_dim else values, "value_scale": scale}
    for count in kv_heads:
        config.check_heads(config.num_heads, count)
    mixers = {}
    for window in set(windows):
        windowed = window is not None
        mixers[window] = config.attention(ropes[windowed], window=window, sinks=windowed, **options)
    ffns = experts if all(sparse) else config.dense(experts.act), experts
    each = zip(windows, kv_heads, sparse, strict=True)
    layers = [LayerFacts(replace(mixers[window], num_kv_heads=count), ffns[routed]) for window, count, routed in each]
    first = next((layer for layer, window in zip(layers, windows, strict=True) if window is not None), None)
    head = first and replace(first, ffn=config.dense(experts.act), fusion=Fusion())
    return config.facts(layers, context, predictor=head)
