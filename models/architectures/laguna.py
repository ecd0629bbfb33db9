"""Laguna (Poolside's XS.2 33B-A3B and M.1): attention with softplus gates, a sigmoid router, and a shared expert.

Windowed layers have RoPE and a number of query heads of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HEADS, MAX_HIDDEN, MAX_LAYERS

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .glm4_moe import SHARED
from .hf import HfConfig
from .layers import Dense, Experts, LayerFacts
from .mixers import RopeFacts
from .names import CHOICE_BIAS

FULL_EVERY, THETA, LOCAL_THETA = 4, 500_000.0, 10_000.0  # the first of four layers sees all positions
# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 100_352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "sliding_window": 512,
    "shared_expert_intermediate_size": 512, "gating": True,
    "rope_parameters": {
        "full_attention": {"rope_theta": THETA, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_theta": LOCAL_THETA},
    },
}  # fmt: skip
KINDS = "sparse", "dense"
GATE = "self_attn.gate_proj"


class Laguna(Architecture):
    """A gate is one number for each head, or one for each element of its output."""

    name = "laguna"
    label = "Laguna"
    hf_types = {"laguna": DEFAULTS}
    hf_classes = ("LagunaForCausalLM",)
    gguf_types = ("laguna",)
    gguf_inner = {GATE: "attn_gate"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, act, (rope, local_rope, context) = config.keys, config.activation(), config.ropes(THETA, LOCAL_THETA)
        for key in ("moe_router_logit_softcapping", "moe_apply_router_weight_on_input"):
            if keys.raw(key):
                raise config.unsupported(f"{config.source} with {key}")
        gating = keys.raw("gating")
        if gating not in (True, "per-head", "per-element"):
            raise keys.fail("gating", f"is {gating!r:.60}; true, per-head and per-element are supported")
        experts = config.mixture(
            "num_experts", "moe_intermediate_size", act,
            router="sigmoid",
            choice_bias=True,
            scale=keys.number("moe_routed_scaling_factor", 1e-6, 1e6, 1.0),
            shared_inner=keys.integer("shared_expert_intermediate_size", 1, MAX_HIDDEN * 4),
        )  # fmt: skip
        kinds = config.layer_types(KINDS, lambda layer: KINDS[layer == 0], key="mlp_layer_types")
        ffns: dict[str, Dense | Experts] = {KINDS[0]: experts, KINDS[1]: config.dense(act)}
        layers = _layers(
            config, (rope, local_rope), config.windows(lambda layer: False), _heads(config),
            [ffns[kind] for kind in kinds], "apart" if gating == "per-element" else "heads",
        )  # fmt: skip
        return config.facts(layers, context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope()
        theta = keys.number("rope.freq_base_swa", 1.0, 1e15, rope.theta)
        local_rope = RopeFacts(theta, keys.integer("rope.dimension_count_swa", 2, config.head_dim, config.head_dim))
        windows: Sequence[int | None] = config.windows(FULL_EVERY)
        if keys.raw("attention.sliding_window_pattern") is None:
            windows = [windows[0] if layer % FULL_EVERY else None for layer in range(config.num_layers)]
        shared = keys.integer("expert_shared_feed_forward_length", 1, MAX_HIDDEN * 4)
        experts = config.mixture(router="sigmoid", choice_bias=True, shared_inner=shared)
        first = keys.integer("leading_dense_block_count", 0, MAX_LAYERS)
        dense = config.dense() if first else experts
        ffns = [dense if layer < first else experts for layer in range(config.num_layers)]
        heads = config.each(config.KEYS["heads"], 1, MAX_HEADS, config.num_heads)
        gate = config.checkpoint.tensors.get(f"{config.names.source(f'model.layers.0.{GATE}')}.weight")
        kind = "apart" if gate is not None and gate.shape[0] == heads[0] * config.head_dim else "heads"
        return config.facts(_layers(config, (rope, local_rope), windows, heads, ffns, kind), context)

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        if checkpoint.kind == "gguf":
            return super().inner_names(checkpoint)
        published = any(name.endswith(".mlp.experts.e_score_correction_bias") for name in checkpoint.tensors)
        own = {CHOICE_BIAS: "mlp.experts.e_score_correction_bias"} if published else SHARED  # as transformers saves it
        return own | {GATE: "self_attn.g_proj"}


def _heads(config: HfConfig) -> Sequence[int]:
    """The number of query heads of each layer."""
    heads = config.keys.raw("num_attention_heads_per_layer")
    if heads is None:
        return [config.num_heads] * config.num_layers
    if not isinstance(heads, list) or len(heads) != config.num_layers:
        raise config.keys.fail("num_attention_heads_per_layer", f"must list {config.num_layers} layers")
    if not all(type(count) is int and 1 <= count <= MAX_HEADS for count in heads):
        raise config.keys.fail("num_attention_heads_per_layer", f"must hold integers from 1 to {MAX_HEADS:,}")
    return heads


def _layers(
    config: Config, ropes: tuple[RopeFacts, RopeFacts], windows: Sequence[int | None], heads: Sequence[int],
    ffns: Sequence[Dense | Experts], gate: str,
) -> list[LayerFacts]:  # fmt: skip
    """`ropes`: of layers that see all positions, and of windowed ones."""
    for count in heads:
        config.check_heads(count, config.num_kv_heads)
    options = {"qk_norm": True, "gate": gate, "softplus_gate": True, "fused": False}
    mixers = {one: config.attention(ropes[one is not None], window=one, **options) for one in set(windows)}
    each = zip(windows, heads, ffns, strict=True)
    return [LayerFacts(replace(mixers[window], num_heads=count), ffn) for window, count, ffn in each]
