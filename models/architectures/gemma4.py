"""Gemma 4 (dense, text): heads of two sizes, values made of the keys, norms without weights, scaled layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HEAD_DIM, MAX_HEADS, Fields

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gemma3 import GGUF_NORMS, NORMS
from .gguf import GgufConfig
from .hf import HfConfig, object_of
from .layers import Attention, LayerFacts, RopeFacts
from .names import GGUF_LAYER, NameMap, gguf_names

FULL_EVERY, FULL_THETA, LOCAL_THETA, TURNED = 6, 1_000_000.0, 10_000.0, 0.25
DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
# what its smaller and its mixed models have on top, by the key that says so
MORE = {
    "hidden_size_per_layer_input": "embeddings of their own for every layer (E2B, E4B)",
    "num_kv_shared_layers": "layers that share keys and values (E2B, E4B)",
    "enable_moe_block": "a mixture of experts (26B-A4B)",
    "embedding_length_per_layer_input": "embeddings of their own for every layer (E2B, E4B)",
    "attention.shared_kv_layers": "layers that share keys and values (E2B, E4B)",
}


class Gemma4(Architecture):
    """Windowed layers have small heads; those that see all have few large ones, of which a quarter turns."""

    name = "gemma4_text"  # not that of the family: its other models are refused
    label = "Gemma 4 (12B, 31B)"
    hf_types = {
        "gemma4_text": DEFAULTS,
        "gemma4_unified_text": DEFAULTS | {"sliding_window": 1024, "max_position_embeddings": 262_144},
    }
    hf_wrappers = {"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}
    hf_classes = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
    gguf_types = ("gemma4",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        _refuse_more(config)
        keys = config.keys
        dim, kv_heads = _global_heads(config)
        parameters = object_of(config.given, "rope_parameters")
        both = [Fields(keys.path, object_of(Fields(keys.path, parameters), f"{one}_attention")) for one in _KINDS]
        for fields, known in zip(both, ("proportional", "default"), strict=True):
            kind = fields.text("rope_type", known)
            if kind != known or fields.number("factor", 1e-3, 1e6, 1.0) != 1.0:
                raise config.unsupported(f"{config.source} with rope scaling of type {kind[:60]}")
        turned = int(both[0].number("partial_rotary_factor", 0.0, 1.0, TURNED) * dim // 2)
        theta = both[0].number("rope_theta", 1.0, 1e15, FULL_THETA)
        rope = RopeFacts(theta, dim, "proportional", turning=turned)
        local = RopeFacts(both[1].number("rope_theta", 1.0, 1e15, LOCAL_THETA), config.head_dim)
        attention = config.attention(local, scale=1.0, qk_norm=True, v_norm=True)
        full = _wide(config, attention, rope, kv_heads, keys.flag("attention_k_eq_v"))
        last = config.num_layers - 1
        windows = config.windows(lambda layer: (layer + 1) % FULL_EVERY != 0 and layer != last)
        dense = config.dense(config.activation("hidden_activation"))
        rest = LayerFacts(attention, dense, NORMS, scaled=config.stores_scale())
        layers = _layers(attention, full, rest, windows)
        return config.facts(layers, config.context, embedding_scale=math.sqrt(config.hidden_size))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        _refuse_more(config)
        keys = config.keys
        rope, context = config.rope()
        windows = config.windows(FULL_EVERY)
        kv_heads = config.each("attention.head_count_kv", 1, MAX_HEADS, config.num_kv_heads)
        dim = keys.integer("attention.key_length_swa", 2, MAX_HEAD_DIM, config.head_dim)
        local = RopeFacts(
            keys.number("rope.freq_base_swa", 1.0, 1e15, LOCAL_THETA),
            keys.integer("rope.dimension_count_swa", 2, MAX_HEAD_DIM, dim),
        )
        wide = config.attention(rope, scale=1.0, qk_norm=True, v_norm=True)
        first = next((layer for layer, window in enumerate(windows) if window is None), 0)
        stored = f"{config.names.source(f'model.layers.{first}.self_attn.v_proj')}.weight" in config.checkpoint.tensors
        full = _wide(config, wide, rope, kv_heads[first], not stored)
        small = next((layer for layer, window in enumerate(windows) if window is not None), 0)
        narrow = replace(wide, rope=local, head_dim=dim, num_kv_heads=kv_heads[small])
        rest = LayerFacts(narrow, config.dense("gelu_tanh"), NORMS, scaled=config.stores_scale())
        layers = _layers(narrow, full, rest, windows)
        return config.facts(layers, context, embedding_scale=math.sqrt(config.hidden_size))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        if checkpoint.kind != "gguf":
            return super().names(checkpoint)
        return gguf_names(GGUF_LAYER | GGUF_NORMS | {"layer_scalar": "layer_output_scale"})


_KINDS = ("full", "sliding")


def _refuse_more(config: Config) -> None:
    for key, what in MORE.items():
        value: Any = config.keys.raw(key)
        if value not in (None, 0, False):
            raise config.unsupported(f"{config.source} with {what}")


def _global_heads(config: HfConfig) -> tuple[int, int]:
    """Head size and heads of K and V of the layers that see all: transformers writes them layer by layer."""
    keys = config.keys
    given = [Fields(keys.path, one) for one in object_of(keys, "per_layer_config").values() if isinstance(one, dict)]
    each = {
        (
            fields.integer("head_dim", 2, MAX_HEAD_DIM, config.head_dim),
            fields.integer("num_key_value_heads", 1, MAX_HEADS, config.num_kv_heads),
        )
        for fields in given
    }
    if len(each) > 1:
        raise config.unsupported(f"{config.source} with heads of {len(each) + 1} kinds")
    if each:
        return each.pop()
    heads = keys.integer("num_global_key_value_heads", 1, MAX_HEADS, config.num_kv_heads)
    tied = keys.flag("attention_k_eq_v") or config.model_type != "gemma4_text"
    return keys.integer("global_head_dim", 2, MAX_HEAD_DIM), heads if tied else config.num_kv_heads


def _wide(config: Config, attention: Attention, rope: RopeFacts, kv_heads: int, k_is_v: bool) -> Attention:
    if config.num_heads % kv_heads or rope.dim % 2:
        raise config.unsupported(f"{config.source} with {kv_heads} KV heads of {rope.dim} for {config.num_heads} heads")
    return replace(attention, head_dim=rope.dim, num_kv_heads=kv_heads, rope=rope, window=None, k_is_v=k_is_v)


def _layers(
    narrow: Attention, full: Attention, rest: LayerFacts, windows: tuple[int | None, ...]
) -> tuple[LayerFacts, ...]:
    kinds = {
        window: replace(rest, mixer=full if window is None else replace(narrow, window=window))
        for window in set(windows)
    }
    return tuple(kinds[window] for window in windows)
