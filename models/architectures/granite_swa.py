"""Granite with sliding windows, dense and mixtures of experts: a sink for every head; some layers have no RoPE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HIDDEN

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .granite import BLOCK, DEFAULTS, GGUF_SCALES, HF_MOE, HF_SCALES, SHARED, experts_of_hf, multiplied, old_router
from .hf import HfConfig
from .layers import Dense, Experts, LayerFacts
from .mixers import Attention

FULL_EVERY = 4  # the first of every four layers has no window


class GraniteSwa(Architecture):
    """Layers may differ in the base of RoPE; a base of 0 means none."""

    name = "granite_swa"
    label = "Granite SWA"
    hf_types = {
        "granite_swa": DEFAULTS
        | {"vocab_size": 100_352, "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24}
        | {"num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 8192}
        | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128},
        "granitemoe_swa": DEFAULTS | HF_MOE | {"sliding_window": 128},
    }
    hf_classes = ("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM")
    gguf_types = ("granite_swa",)
    hf_inner = BLOCK | SHARED
    gguf_inner = {"self_attn.sinks": "attn_sinks.weight", "mlp.shared_expert.gate_up_proj": "ffn_up_shexp"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        scale = config.keys.number("attention_multiplier", 1e-6, 1e3)
        ffn = experts_of_hf(config) if config.model_type == "granitemoe_swa" else config.dense(config.activation())
        layer = LayerFacts(config.attention(rope, scale=scale, sinks=True), ffn)
        layers = repeated(layer, config.windows(lambda layer: layer % FULL_EVERY != 0))
        return config.facts(_turned(layers, _thetas(config)), context, **multiplied(config, HF_SCALES))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        shared = config.keys.integer("expert_shared_feed_forward_length", 0, MAX_HIDDEN * 4, 0)
        ffn: Dense | Experts = config.dense()
        if config.num_experts:
            ffn = config.mixture(router="softmax_topk", shared_inner=shared, shared_fused=True)
        layers = repeated(LayerFacts(config.attention(rope, sinks=True), ffn), config.windows(FULL_EVERY))
        thetas = [rope.theta * turns for turns in config.flags("attention.rope_pattern")]
        return config.facts(_turned(layers, thetas), context, **multiplied(config, GGUF_SCALES))

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        return {**super().inner_names(checkpoint), **old_router(checkpoint)}


def _thetas(config: HfConfig) -> Sequence[float]:
    """The base of RoPE of each layer, 0 where a layer has none; empty: all have the model's."""
    thetas = config.keys.raw("layer_rope_theta")
    if thetas is None:
        return ()
    if not isinstance(thetas, list) or len(thetas) != config.num_layers:
        raise config.keys.fail("layer_rope_theta", f"must list {config.num_layers} layers")
    if not all(type(theta) in (int, float) and (theta == 0 or 1 <= theta <= 1e15) for theta in thetas):
        raise config.keys.fail("layer_rope_theta", "must hold 0 or numbers from 1 to 1e15")
    return thetas


def _turned(layers: Sequence[LayerFacts], thetas: Sequence[float]) -> Sequence[LayerFacts]:
    """The layers with bases of RoPE of their own."""
    found = []
    for layer, theta in zip(layers, thetas, strict=True) if thetas else ():
        mixer = layer.mixer
        assert isinstance(mixer, Attention)
        rope = replace(mixer.rope, theta=float(theta)) if theta else replace(mixer.rope, scaling="off")
        found.append(replace(layer, mixer=replace(mixer, rope=rope)))
    return found or layers
