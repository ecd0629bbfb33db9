"""Gemma 4: two head sizes, keys and values from one projection, norms without weights, scaled layers.

E2B and E4B: per-layer inputs, and the last layers share the KV cache of earlier ones. 26B-A4B: a mixture of experts in
parallel to every dense feed-forward layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_VOCAB, Fields
from localllm.checkpoint.mapped_file import bad

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gemma3 import GGUF_NORMS, NORMS
from .gemma4_vision import gemma4_parts, gemma4_vision
from .gguf import GgufConfig
from .hf import HfConfig, object_of
from .layers import Assistant, Dense, Experts, InputTable, LayerFacts, LayerInput, Streams
from .mixers import Attention, RopeFacts
from .names import NameMap
from .vision import Bidirectional

FULL_EVERY, FULL_THETA, LOCAL_THETA, TURNED = 6, 1_000_000.0, 10_000.0, 0.25
ACT = "gelu_tanh"
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
PER_LAYER = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
UNIFIED = {"sliding_window": 1024, "max_position_embeddings": 262_144, "use_bidirectional_attention": "vision"}
EXPERT_NAMES = {f"mlp.experts.{{}}.{name}_proj": f"experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
SHARED_NAMES = {f"mlp.shared_expert.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
ROUTER_NAMES = {
    "mlp.gate": "router.proj",
    "mlp.gate.scale": "router.scale",
    "mlp.gate.per_expert_scale": "router.per_expert_scale",
}
GGUF_INNER = {
    "layer_scalar": "layer_output_scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "mlp.gate.scale": "ffn_gate_inp.scale",
    **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
# models that draft for those of the same generation
ASSISTANTS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
GGUF_TOP = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection",
}


class Gemma4(Architecture):
    """Windowed layers have small heads; full-attention layers have fewer, larger heads, of which a quarter rotates."""

    name = "gemma4"
    label = "Gemma 4"
    hf_types = {
        "gemma4_text": DEFAULTS | PER_LAYER,
        "gemma4_unified_text": DEFAULTS | UNIFIED,
    }
    hf_wrappers = {"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"} | ASSISTANTS
    hf_classes = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
    gguf_types = ("gemma4", "gemma4-assistant")
    hf_inner = EXPERT_NAMES | SHARED_NAMES | ROUTER_NAMES
    gguf_inner = GGUF_NORMS | GGUF_INNER

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        if keys.raw("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": within images only
            raise config.unsupported(f"{config.source} with bidirectional attention")
        dim, kv_heads = global_heads(config, _kv_heads(config))
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
        attention = config.attention(local, scale=1.0, qk_norm=True, v_norm=True, causal=True)
        full = full_attention(config, attention, rope, dim, kv_heads, keys.flag("attention_k_eq_v"))
        windows = config.windows(lambda layer: (layer + 1) % FULL_EVERY != 0)
        dense = config.dense(config.activation("hidden_activation"))
        assistant = _assistant(config)
        keeping = 0
        if assistant is None:
            keeping = config.num_layers - keys.integer("num_kv_shared_layers", 0, config.num_layers - 1, 0)
        grown = dense.inner * (1 + keys.flag("use_double_wide_mlp"))
        ffn: Dense | Experts = dense
        if keys.flag("enable_moe_block"):
            names = {"count": "num_experts", "top_k": "top_k_experts", "inner": "moe_intermediate_size"}
            ffn = config.experts(names, dense.act, apart=True, scales="router")
        stack = Stack(
            narrow=attention,
            full=full,
            ffn=ffn,
            windows=(*windows[:-1], None),  # the last layer always has full attention
            inners=[dense.inner if layer < keeping else grown for layer in range(config.num_layers)],
            keeping=keeping,
            inputs=_inputs(config),
        )
        unified = config.model_type == "gemma4_unified_text"
        given = "" if config.is_null("use_bidirectional_attention") else keys.raw("use_bidirectional_attention")
        both_ways: Bidirectional = "" if given != "vision" else "all" if unified else "windowed"
        vision = gemma4_vision(config.tower, both_ways, unified)
        facts = stack.facts(config, config.context)
        if assistant is not None and assistant.clusters and not facts.tied_embeddings:
            raise config.unsupported(f"{config.source} with use_ordered_embeddings and an untied head")
        return replace(facts, vision=vision, assistant=assistant)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
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
        full = full_attention(config, wide, rope, rope.dim, kv_heads[first], not stored)
        small = next((layer for layer, window in enumerate(windows) if window is not None), 0)
        narrow = replace(wide, rope=local, head_dim=dim, num_kv_heads=kv_heads[small])
        inners = config.each("feed_forward_length", 1, MAX_HIDDEN * 4, 0)
        ffn = config.mixture(act=ACT, apart=True, scales=_gguf_scales(config)) if config.num_experts else Dense(1, ACT)
        assistant, keeping = None, 0
        if config.is_assistant:  # llama.cpp does not use the clusters of the vocabulary either
            assistant = Assistant(keys.integer("embedding_length_out", 1, MAX_HIDDEN))
        else:
            keeping = config.num_layers - keys.integer("attention.shared_kv_layers", 0, config.num_layers - 1, 0)
        size = keys.integer("embedding_length_per_layer_input", 0, MAX_HIDDEN, 0)
        pad = config.general.integer("tokenizer.ggml.padding_token_id", 0, config.vocab_size - 1, 0)
        inputs = InputTable(config.vocab_size, size, config.num_layers, pad=pad) if size else None
        found = Stack(narrow, full, ffn, windows, inners, keeping, inputs).facts(config, context)
        return replace(found, assistant=assistant)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        if checkpoint.kind == "gguf":
            return replace(found, top={**found.top, **GGUF_TOP})
        start = found.top["model.norm"].removesuffix("norm")
        tables = (name for name in GGUF_TOP if name.startswith("model."))
        top = {**found.top, **{name: start + name.removeprefix("model.") for name in tables}}
        beside = Assistant(1, 1).linears(1)
        top |= {name: name for name in beside}
        text = (*found.text, *dict.fromkeys(f"{name.partition('.')[0]}." for name in beside))
        return replace(found, top=top, parts=gemma4_parts(checkpoint), text=text)


_KINDS = ("full", "sliding")


@dataclass(frozen=True)
class Stack:
    """The blocks of the layers, and the values in which layers differ."""

    narrow: Attention
    full: Attention
    ffn: Dense | Experts
    windows: Sequence[int | None]  # of each layer
    inners: Sequence[int]  # of each layer's dense feed-forward layer
    # leading layers with a KV cache; later ones share that of the last such layer of their kind. 0: an assistant, which
    # reads the KV cache of another model
    keeping: int
    inputs: InputTable | None
    cuts: Sequence[float | None] = ()  # `Dense.cut` of each layer; empty: none
    streams: Streams | None = None

    def facts(self, config: Config, context: int, **changes: Any) -> ModelFacts:
        """Build the facts; `changes` as in `Config.facts`."""
        layers, inputs = self._layers(config), self.inputs
        facts = config.facts(layers, context, embedding_scale=math.sqrt(config.hidden_size), **changes)
        tensors = config.checkpoint.tensors
        unread = tuple(_unused_prefixes(config, layers))
        spare = sum(info.nbytes for name, info in tensors.items() if name.startswith(unread)) if unread else 0
        if inputs is not None and inputs.rows:
            table = f"{config.names.source('model.embed_tokens_per_layer')}."
            nbytes = sum(info.nbytes for name, info in tensors.items() if name.startswith(table))
            inputs = replace(inputs, nbytes=nbytes)
        return replace(facts, weight_bytes=facts.weight_bytes - spare, inputs=inputs)

    def _layers(self, config: Config) -> list[LayerFacts]:
        keepers: dict[int | None, int] = {}
        found, scaled = [], config.stores_scale()
        own = None if self.inputs is None else LayerInput(self.inputs.size, self.ffn.act)
        cuts = self.cuts or (None,) * len(self.windows)
        for layer, (window, inner, cut) in enumerate(zip(self.windows, self.inners, cuts, strict=True)):
            if layer < self.keeping:
                keepers[window] = layer
            elif self.keeping and window not in keepers:
                kind = "full-attention" if window is None else "windowed"
                what = f"shares the KV cache of a {kind} layer, but there is none among the first {self.keeping} layers"
                raise bad(config.keys.path, what, key=f"layer {layer}")
            source = None if layer < self.keeping else keepers.get(window, -1)
            mixer = self.full if window is None else replace(self.narrow, window=window)
            mixer = replace(mixer, shares_kv_with=source)
            ffn = _with_inner(self.ffn, inner, cut)
            found.append(LayerFacts(mixer, ffn, NORMS, scaled, own, streams=self.streams))
        return found


def _with_inner(ffn: Dense | Experts, inner: int, cut: float | None) -> Dense | Experts:
    return replace(ffn, shared_inner=inner) if isinstance(ffn, Experts) else replace(ffn, inner=inner, cut=cut)


def _assistant(config: HfConfig) -> Assistant | None:
    """Its own keys stand beside those of its decoder."""
    top = config.top
    if top.text("model_type") not in ASSISTANTS:
        return None
    hidden = top.integer("backbone_hidden_size", 1, MAX_HIDDEN, 1536)
    if not top.flag("use_ordered_embeddings"):
        return Assistant(hidden)
    clusters = top.integer("num_centroids", 1, config.vocab_size, 2048)
    if config.vocab_size % clusters:
        raise top.fail("num_centroids", f"is {clusters:,}, which does not divide {config.vocab_size:,} tokens")
    return Assistant(hidden, clusters, top.integer("centroid_intermediate_top_k", 1, clusters, 32))


def _inputs(config: HfConfig) -> InputTable | None:
    """The per-layer embedding table; an explicit null turns the default off."""
    keys, name = config.keys, "hidden_size_per_layer_input"
    off = name in config.given.values and config.given.raw(name) is None
    size = 0 if off else keys.integer(name, 0, MAX_HIDDEN, 0)
    if not size:
        return None
    rows = keys.integer("vocab_size_per_layer_input", 1, MAX_VOCAB)
    if rows < config.vocab_size:
        what = f"has {rows:,} rows for a vocabulary of {config.vocab_size:,}"
        raise bad(keys.path, what, key=config.names.source("model.embed_tokens_per_layer"))
    return InputTable(rows, size, config.num_layers, pad=keys.integer("pad_token_id", 0, rows - 1, 0))


def _gguf_scales(config: GgufConfig) -> str:
    """Where output scales are stored; in NVFP4 experts, `.scale` belongs to the weight instead."""
    tensors, name = config.checkpoint.tensors, config.names.source("model.layers.0.mlp.experts.0.down_proj")
    weight = tensors.get(f"{name}.weight")
    plain = weight is not None and weight.dtype != "NVFP4"
    return "experts" if plain and f"{name}.scale" in tensors else ""


def _unused_prefixes(config: Config, layers: Sequence[LayerFacts]) -> Iterator[str]:
    """Prefixes of unused tensors: published files store k and v of layers that share another layer's KV cache."""
    for index, layer in enumerate(layers):
        if isinstance(layer.mixer, Attention) and layer.mixer.shares_kv_with is not None:
            for name in ("k_proj", "v_proj", "k_norm"):
                yield f"{config.names.source(f'model.layers.{index}.self_attn.{name}')}."


def global_heads(config: HfConfig, kv_heads: int) -> tuple[int, int]:
    """Head size and KV heads of the full-attention layers, which transformers stores per layer.

    kv_heads   if it does not
    """
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
        raise config.unsupported(f"{config.source} with {len(each) + 1} kinds of heads")
    if each:
        return each.pop()
    return keys.integer("global_head_dim", 2, MAX_HEAD_DIM), kv_heads


def _kv_heads(config: HfConfig) -> int:
    tied = config.keys.flag("attention_k_eq_v")
    own = config.num_kv_heads
    return config.keys.integer("num_global_key_value_heads", 1, MAX_HEADS, own) if tied else own


def full_attention(
    config: Config, attention: Attention, rope: RopeFacts, dim: int, kv_heads: int, k_is_v: bool = False
) -> Attention:
    """The attention of the layers without a window, with heads of `dim` elements."""
    if config.num_heads % kv_heads or dim % 2:
        raise config.unsupported(
            f"{config.source} with {kv_heads} KV heads of size {dim} for {config.num_heads} query heads"
        )
    return replace(attention, head_dim=dim, num_kv_heads=kv_heads, rope=rope, window=None, k_is_v=k_is_v)
