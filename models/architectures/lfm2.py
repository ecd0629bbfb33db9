"""LFM2, LFM2.5 and LFM3, dense and MoE: gated short convolutions and a few attention layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONV, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gemma3 import NORMS
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Dense, Experts, LayerFacts, Norms
from .mixers import Attention, RopeFacts, ShortConv
from .names import CHOICE_BIAS, NameMap

KINDS = "conv", "full_attention"
FULL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # of LFM3
# defaults for keys that configurations may omit
DEFAULTS: dict[str, Any] = {
    "vocab_size": 65_536,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Lfm2(Architecture):
    """Query and key norms; the final norm is named after the embedding."""

    name = "lfm2"
    label = "LFM2, LFM2.5"
    hf_types = {
        "lfm2": DEFAULTS
        | {"hidden_size": 2560, "intermediate_size": 12_288, "block_multiple_of": 256}
        | {"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True}
    }
    hf_renamed = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
    hf_wrappers = {"lfm2_vl": "lfm2"}
    hf_classes: ClassVar[tuple[str, ...]] = ("Lfm2ForCausalLM",)
    gguf_types: ClassVar[tuple[str, ...]] = ("lfm2",)
    hf_inner: ClassVar[dict[str, str]] = {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate": "feed_forward.gate",
        CHOICE_BIAS: "feed_forward.expert_bias",
    }
    gguf_inner = {f"conv.{name}": f"shortconv.{name}" for name in ("in_proj", "conv", "out_proj")}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        keys = config.keys
        conv = ShortConv(config.hidden_size, keys.integer("conv_L_cache", 2, MAX_CONV), keys.flag("conv_bias"))
        listed = config.layer_numbers("full_attn_idxs")
        kinds = config.layer_types(KINDS, lambda layer: KINDS[not listed or layer in listed])
        attends = [kind == "full_attention" for kind in kinds]
        return config.facts(_layers(_attention(config, rope), conv, attends, self.feed_forward(config)), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        if config.keys.raw("attention.sliding_window") is not None:
            raise config.unsupported(f"{config.source} with windowed attention")
        rope, context = config.rope()
        biased = any(name.endswith(".shortconv.conv.bias") for name in config.checkpoint.tensors)
        conv = ShortConv(config.hidden_size, config.keys.integer("shortconv.l_cache", 2, MAX_CONV), biased)
        attends = config.each("attention.head_count_kv", 0, MAX_HEADS, config.num_kv_heads)
        layers = _layers(_attention(config, rope), conv, attends, self.feed_forward_of_gguf(config))
        return config.facts(layers, context)

    def feed_forward(self, config: HfConfig) -> Sequence[Dense | Experts]:
        """The feed-forward layer of each layer."""
        keys = config.keys
        inner = keys.integer("block_ff_dim", 1, MAX_HIDDEN * 4, keys.integer("intermediate_size", 1, MAX_HIDDEN * 4))
        if keys.flag("block_auto_adjust_ff_dim"):
            multiple = keys.integer("block_multiple_of", 1, MAX_HIDDEN)
            grown = int(keys.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * int(2 * inner / 3))
            inner = -(-grown // multiple) * multiple
        return [Dense(inner)] * config.num_layers

    def feed_forward_of_gguf(self, config: GgufConfig) -> Sequence[Dense | Experts]:
        return [config.dense()] * config.num_layers

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        is_gguf = checkpoint.kind == "gguf"
        last = "token_embd_norm" if is_gguf else found.top["model.norm"].removesuffix("norm") + "embedding_norm"
        return replace(found, top={**found.top, "model.norm": last})

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        if checkpoint.kind == "gguf":
            return self.gguf_inner
        # transformers saves the experts of a layer as one tensor, with names that differ from the published files
        stacked = any("feed_forward.experts." in name and "_proj." in name for name in checkpoint.tensors)
        inner = {f"mlp.{part}": f"feed_forward.{name}" for part, name in _PARTS.items()}
        for part, name in _PARTS.items():
            inner[f"mlp.experts.{{}}.{part}"] = f"feed_forward.experts.{{}}.{part if stacked else name}"
        if any(".self_attn.g_proj." in name for name in checkpoint.tensors):  # the name in the model's code
            inner["self_attn.gate_proj"] = "self_attn.g_proj"
        return self.hf_inner | inner


class Lfm2Moe(Lfm2):
    """The first layers are dense; the router is a sigmoid router with a choice bias."""

    name = "lfm2_moe"
    label = "LFM2 MoE"
    hf_types = {
        "lfm2_moe": DEFAULTS
        | {"hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2}
        | {"num_experts": 32, "num_experts_per_tok": 4, "use_expert_bias": True, "norm_topk_prob": True}
    }
    hf_wrappers = {}
    hf_classes = ("Lfm2MoeForCausalLM",)
    gguf_types = ("lfm2moe",)

    def feed_forward(self, config: HfConfig) -> Sequence[Dense | Experts]:
        keys = config.keys
        experts = config.mixture(
            "num_experts", "moe_intermediate_size",
            router="sigmoid",
            choice_bias=keys.flag("use_expert_bias"),
            **config.router(groups=False),
        )  # fmt: skip
        return _after_dense(config, experts, keys.integer("num_dense_layers", 0, MAX_LAYERS))

    def feed_forward_of_gguf(self, config: GgufConfig) -> Sequence[Dense | Experts]:
        experts = config.mixture(router="sigmoid", choice_bias=True)
        return _after_dense(config, experts, config.keys.integer("leading_dense_block_count", 0, MAX_LAYERS, 0))


class Lfm3(Lfm2):
    """Longer convolutions, some windowed attention, a gate per head, and norms after both blocks."""

    name = "lfm3"
    label = "LFM3"
    hf_types = {
        "lfm3": DEFAULTS
        | {"vocab_size": 128_000, "hidden_size": 2048, "intermediate_size": 7680, "num_hidden_layers": 24}
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7}
        | {"sliding_window": 256, "use_sandwich_norm": True, "use_attention_gate": True}
        | {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}}
    }
    hf_wrappers = {"lfm3_vl": "lfm3"}
    hf_classes = ("Lfm3ForCausalLM",)
    gguf_types = ()
    hf_inner = {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "post_operator_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffn_norm",
    }

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, (rope, local_rope, context) = config.keys, config.ropes(FULL_THETA, LOCAL_THETA)
        conv = ShortConv(config.hidden_size, keys.integer("conv_L_cache", 2, MAX_CONV), keys.flag("conv_bias"))
        full = config.attention(rope, qk_norm=True, gate="heads" if keys.flag("use_attention_gate") else "")
        mixers: dict[str, Attention | ShortConv] = {"conv": conv, "full_attention": full}
        mixers["sliding_attention"] = replace(full, rope=local_rope, window=config.window)
        norms = NORMS if keys.flag("use_sandwich_norm") else Norms(before_ffn=NORMS.before_ffn)
        made = {kind: LayerFacts(mixer, config.dense(), norms) for kind, mixer in mixers.items()}
        kinds = config.layer_types(tuple(mixers), _kind)
        if config.window is None and "sliding_attention" in kinds:
            raise keys.fail("sliding_window", "is missing, but layer_types names windowed layers")
        return config.facts(tuple(made[kind] for kind in kinds), context)


def _kind(layer: int) -> str:
    """The default kind of a layer."""
    return "conv" if layer % 2 or not layer else "full_attention" if layer % 4 == 2 else "sliding_attention"


def _after_dense(config: Config, experts: Experts, first: int) -> list[Dense | Experts]:
    dense = config.dense()
    return [dense if layer < first else experts for layer in range(config.num_layers)]


def _attention(config: Config, rope: RopeFacts) -> Attention:
    return config.attention(rope, qk_norm=True, qkv_bias=False, o_bias=False, fused=False)


def _layers(
    attention: Attention, conv: ShortConv, attends: Sequence[int], ffns: Sequence[Dense | Experts]
) -> list[LayerFacts]:
    return [LayerFacts(attention if count else conv, ffn) for count, ffn in zip(attends, ffns, strict=True)]
