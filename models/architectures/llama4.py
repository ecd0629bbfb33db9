"""Llama 4 (Scout, Maverick), text: chunked attention, some full-attention layers without RoPE, one expert per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.checkpoint.fields import MAX_CONTEXT, MAX_HIDDEN, MAX_LAYERS

from .architecture import Architecture
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Dense, Experts, LayerFacts
from .mixers import Attention, RopeFacts

FULL, IN_CHUNKS = "full_attention", "chunked_attention"
# defaults for what GGUF files do not state and configurations may omit
STILL_EVERY = 4  # every fourth layer has full attention without RoPE
CHUNK = 8192
GROWTH = (0.1, 8192)  # attention temperature in layers without RoPE
UNNORMED = 128  # number of experts in Maverick, which has no query and key norms; its GGUF files do not state that
_PLACES = ("", "shared_expert.", "experts.{}.")  # prefixes of feed-forward layers
_MODULES = [f"{place}{kind}_proj" for place in _PLACES for kind in ("gate", "up", "down")]
DEFAULTS = {
    "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "num_experts_per_tok": 1,
    "num_local_experts": 16, "attention_chunk_size": CHUNK, "use_qk_norm": True, "attn_temperature_tuning": True,
    "attn_scale": GROWTH[0], "floor_scale": GROWTH[1],
}  # fmt: skip


class Llama4(Architecture):
    """Routing weights multiply the experts' inputs. RoPE is interleaved in both containers."""

    name = "llama4"
    label = "Llama 4 (text)"
    hf_types = {"llama4_text": DEFAULTS}
    hf_wrappers = {"llama4": "llama4_text"}
    hf_classes = ("Llama4ForConditionalGeneration", "Llama4ForCausalLM")
    gguf_types = ("llama4",)
    hf_inner = {"mlp.gate": "feed_forward.router"} | {f"mlp.{name}": f"feed_forward.{name}" for name in _MODULES}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, act = config.keys, config.activation()
        rope, context = config.rope()
        turns = _turning(config)
        chunk = None if config.is_null("attention_chunk_size") else keys.integer("attention_chunk_size", 1, MAX_CONTEXT)
        kinds = config.layer_types((FULL, IN_CHUNKS), lambda layer: IN_CHUNKS if turns[layer] else FULL)
        growth = None
        if keys.raw("attn_temperature_tuning"):  # a number in the first files
            growth = keys.number("attn_scale", 0.0, 100.0), keys.integer("floor_scale", 1, MAX_CONTEXT)
        attention = config.attention(
            replace(rope, interleaved=True), qk_norm=keys.flag("use_qk_norm"), temperature=growth
        )
        chunks = [chunk if kind == IN_CHUNKS else None for kind in kinds]
        experts = _with_router(config.mixture("num_local_experts", "intermediate_size", act))
        dense = Dense(keys.integer("intermediate_size_mlp", 1, MAX_HIDDEN * 4), act)
        sparse = config.layer_numbers("moe_layers")
        if keys.raw("moe_layers") is None:
            sparse = _every(keys.integer("interleave_moe_layer_step", 1, MAX_LAYERS, 1), config.num_layers)
        ffns = [experts if layer in sparse else dense for layer in range(config.num_layers)]
        return config.facts(_layers(attention, turns, chunks, ffns), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        experts, dense = _with_router(config.mixture()), config.dense()
        chunks = config.windows(STILL_EVERY, CHUNK)
        attention = config.attention(
            replace(rope, permuted=False), qk_norm=experts.num_experts != UNNORMED, temperature=GROWTH
        )
        sparse = _every(config.keys.integer("interleave_moe_layer_step", 1, MAX_LAYERS, 1), config.num_layers)
        ffns = [experts if layer in sparse else dense for layer in range(config.num_layers)]
        turns = [chunk is not None or not any(chunks) for chunk in chunks]
        return config.facts(_layers(attention, turns, chunks, ffns), context)


def _with_router(experts: Experts) -> Experts:
    """Add the router's settings and a shared expert as wide as the others."""
    shared = experts.inner
    return replace(experts, router="sigmoid_topk", renormalise=False, share_inputs=True, shared_inner=shared)


def _every(step: int, num_layers: int) -> frozenset[int]:
    """The last of every `step` layers."""
    return frozenset(range(step - 1, num_layers, step))


def _turning(config: HfConfig) -> list[bool]:
    """Whether each layer has RoPE."""
    keys, num_layers = config.keys, config.num_layers
    turns = keys.raw("no_rope_layers")  # despite the name, 1 means that a layer has RoPE; published files have []
    if turns == [] or turns is None:
        every = keys.integer("no_rope_layer_interval", 1, MAX_LAYERS, STILL_EVERY)
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(turns, list) or len(turns) != num_layers or any(turn not in (0, 1) for turn in turns):
        raise keys.fail("no_rope_layers", f"must list 0 or 1 for each of {num_layers} layers")
    return [bool(turn) for turn in turns]


def _layers(
    attention: Attention, turns: Sequence[bool], chunks: Sequence[int | None], ffns: Sequence[Dense | Experts]
) -> list[LayerFacts]:
    """Build the layers. The norms of `attention` apply to layers with RoPE, its temperature to the others."""
    rope = attention.rope
    still = RopeFacts(rope.theta, rope.dim, "off", interleaved=True)
    normed = replace(attention, temperature=None, late_norms=attention.qk_norm, bare_norms=attention.qk_norm)
    grown = replace(attention, rope=still, qk_norm=False, temperature_offset=int(attention.temperature is not None))
    return [
        LayerFacts(replace(normed if turn else grown, window=chunk, chunked=chunk is not None), ffn)
        for turn, chunk, ffn in zip(turns, chunks, ffns, strict=True)
    ]
