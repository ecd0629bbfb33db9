"""OLMo Hybrid: three gated delta rule layers for each attention layer of OLMo 2, whose norms are in other places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONV, MAX_HEAD_DIM, MAX_HEADS

from .facts import ModelFacts
from .hf import HfConfig, object_of
from .layers import LayerFacts, Norms
from .mamba2 import no_rope
from .mixers import Attention, SplitDelta
from .olmo2 import NORMS, Olmo2
from .qwen3_5 import FULL_EVERY, check_heads

KINDS = ("linear_attention", "full_attention")
# Files have a name of their own for each norm of a delta layer. Transformers saves the first norm of an attention layer
# under the second of these.
DELTA_NORMS = Norms("attention_layer_norm", "feedforward_layer_norm")
OUTPUT_EPS = 1e-5  # of the norm over a delta layer's heads, independent of the model's epsilon


class OlmoHybrid(Olmo2):
    """Delta layers have norms before their blocks, attention layers after them and usually no RoPE."""

    name = "olmo_hybrid"
    label = "OLMo Hybrid"
    hf_types = {
        "olmo_hybrid": {
            "vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008, "num_hidden_layers": 32,
            "num_attention_heads": 30, "max_position_embeddings": 65_536, "linear_conv_kernel_dim": 4,
        }
    }  # fmt: skip
    hf_classes = ("OlmoHybridForCausalLM",)
    gguf_types = ()

    def from_hf(self, config: HfConfig) -> ModelFacts:
        if config.activation() != "silu":  # the convolutions use it as well
            raise config.unsupported(f"{config.source} with hidden_act {config.keys.text('hidden_act')[:60]}")
        rope, context = config.rope() if _has_rope(config) else (no_rope(config), config.context)
        biased = config.keys.flag("attention_bias")
        attention = config.attention(rope, qk_norm=True, whole_norms=True, qkv_bias=biased, o_bias=biased)
        kinds = config.layer_types(KINDS, lambda layer: KINDS[_attends(layer, config.num_layers)])
        mixers: dict[str, Attention | SplitDelta] = {"full_attention": attention}
        if KINDS[0] in kinds:
            mixers[KINDS[0]] = _delta(config, kinds.index(KINDS[0]))
        norms, ffn = dict(zip(KINDS, (DELTA_NORMS, NORMS), strict=True)), config.dense()
        of_kind = {kind: LayerFacts(mixer, ffn, norms[kind]) for kind, mixer in mixers.items()}
        return config.facts(tuple(of_kind[kind] for kind in kinds), context)

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        inner = {"linear_attn.norm": "linear_attn.o_norm", "linear_attn.out_proj": "linear_attn.o_proj"}
        if checkpoint.tensors and not any(f".{NORMS.after_mixer}." in name for name in checkpoint.tensors):
            inner[f"{NORMS.after_mixer}"] = f"{DELTA_NORMS.before_ffn}"
        return inner


def _has_rope(config: HfConfig) -> bool:
    """Whether attention has RoPE: not if a null stands in place of its base, which files have stated in three ways."""
    stated = object_of(config.given, "rope_parameters")
    if stated.get("rope_theta", config.keys.raw("rope_theta")) is not None:
        return True
    return None not in stated.values() and not any(map(config.is_null, ("rope_parameters", "rope_theta")))


def _attends(layer: int, num_layers: int) -> bool:
    """Whether a layer has attention by default: the last of every four, or the last of fewer."""
    return (layer + 1) % min(FULL_EVERY, num_layers) == 0


def _delta(config: HfConfig, layer: int) -> SplitDelta:
    """The facts of the delta layers; `layer` is one of them."""
    keys = config.keys
    k_heads = keys.integer("linear_num_key_heads", 1, MAX_HEADS, config.num_heads)
    usual = min(max(3 * config.hidden_size // (4 * k_heads), 2), MAX_HEAD_DIM)
    k_dim = keys.integer("linear_key_head_dim", 2, MAX_HEAD_DIM, usual)
    delta = SplitDelta(
        num_k_heads=k_heads,
        num_v_heads=keys.integer("linear_num_value_heads", 1, MAX_HEADS, config.num_heads),
        k_dim=k_dim,
        v_dim=keys.integer("linear_value_head_dim", 2, MAX_HEAD_DIM, min(2 * k_dim, MAX_HEAD_DIM)),
        conv_width=keys.integer("linear_conv_kernel_dim", 2, MAX_CONV),
        beta_scale=2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=OUTPUT_EPS,
    )
    check_heads(keys, "linear_num_value_heads", delta)
    # transformers saves the convolutions as three equal parts, whatever the sizes of keys and values
    names = (config.names.tensor(f"model.layers.{layer}.{name}") for name in delta.convs)
    stored = [config.checkpoint.tensors[name].shape for name in names if name in config.checkpoint.tensors]
    cuts = tuple(shape[0] for shape in stored if shape)
    return replace(delta, cuts=cuts) if len(cuts) == len(delta.convs) and sum(cuts) == delta.channels else delta
